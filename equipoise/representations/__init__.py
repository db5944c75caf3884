"""Representations, which a model computes on the way to its output, and quantities made of them."""

"""What a model computes on the way to its output: representations, and quantities made of them."""

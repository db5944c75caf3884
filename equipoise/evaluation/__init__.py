"""Scores of the clients' models, and the similarity of their representations."""

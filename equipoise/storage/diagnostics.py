"""Names that are data: the numbers that clients report about their updates."""

DIAGNOSTICS = "diagnostics"
"""Key of the numbers in a line of metrics.jsonl, and prefix of their names in a message."""

TITLES = {
    "dual_norm": "norm of the duals",
    "consensus_gap": "distance of the copies from the consensus",
    "squared_distance": "median squared distance of two clients' models",
}
"""What the numbers are, for readers; those of own algorithms are shown by their names."""

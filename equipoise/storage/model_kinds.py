"""The kinds of models that a run scores, and the columns of their scores."""

COLUMNS = ("validation_loss", "validation_metric", "test_loss", "test_metric")


HYBRIDS = {"validation": "hybrid", "test": "oracle"}
"""The name of the better of personal and global model, by the samples on which it was chosen."""


SCORED = ("personal", "consensus", "global")
"""The kinds of models: a client's own; the same with the consensus in place of its copy; one for all clients."""


KINDS = (*SCORED, *HYBRIDS.values())


SUCCESS, UNMARKED, RIGHT = "attack_success", "attack_unmarked", "attack_right"
"""Figures of an attack that wants a certain label, as parts of the samples on which its success is measured: those that
get this label, those that get it without the attack's mark, and those that are still predicted right."""

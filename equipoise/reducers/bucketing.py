"""Bucketing: means of a few clients, drawn anew in every round."""

from typing import ClassVar

import torch

from equipoise.reducers.context import ReductionContext
from equipoise.reducers.mixing import Mixed, Mixer
from equipoise.settings import Count
from equipoise.state import Uploads


class Bucketing(Mixer):
    """Means of groups of `size` messages, drawn anew in every round, so that rows differ less from each other.

    A malicious client spoils one group, so f malicious messages among n are up to f rows among n / size: the rule that
    follows must bear them, and takes its f from n.
    """

    paper: ClassVar[str] = "Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets, ICLR 2022"

    size: Count = 2
    "messages in a group (s); the last group may be smaller"

    def __call__(self, uploads: Uploads, context: ReductionContext) -> Mixed:
        names = context.names(uploads)
        # Each client has a number of its own, so that neither its place nor who else is there matters.
        drawn = [context.generator("bucketing", name).random() for name in names]
        order = sorted(range(len(names)), key=lambda i: (drawn[i], names[i]))
        groups = [order[k : k + self.size] for k in range(0, len(order), self.size)]
        matrix = torch.zeros(len(groups), len(names), dtype=torch.float64)
        for row, group in enumerate(groups):
            matrix[row, group] = 1 / len(group)
        return Mixed(uploads, matrix, tuple(uploads.senders[group[0]] for group in groups))

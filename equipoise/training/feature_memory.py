"""What clients' heads have read in a round, so that not every exchange of messages has to run the body again.

It is memory only: whoever has none, such as a client of a deployment that starts a process for every message, reads
again and gets the same.
"""

from dataclasses import replace

import torch
from torch import Tensor

from equipoise.representations.head_problem import HeadSamples


class FeatureMemory:
    """The newest features of each client of a round, with the body that made them."""

    def __init__(self) -> None:
        self.round = 0
        self.kept: dict[tuple[int, str], tuple[Tensor, HeadSamples]] = {}

    def get(self, round: int, who: int, of: str, body: Tensor) -> HeadSamples | None:
        """Return a client's samples as its head sees them, if they are known.

        Args:
            round: number of the round; what is known of another one is forgotten, so memory has room for a cohort.
            who: the client.
            of: which of its samples.
            body: the body, with the buffers that it uses; another one makes other features.
        """
        if round != self.round:
            self.round, self.kept = round, {}
        known, samples = self.kept.get((who, of), (None, None))
        if known is None or samples is None or not torch.equal(known, body):
            return None
        return replace(samples, features=samples.features.detach())

    def put(self, who: int, of: str, body: Tensor, samples: HeadSamples) -> None:
        """Remember a client's samples as its head sees them."""
        self.kept[who, of] = body.clone(), samples

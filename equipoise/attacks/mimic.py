"""All attackers repeat one benign client, so that it counts several times."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from equipoise import randomness
from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.rows import gram, zeros
from equipoise.settings import Count
from equipoise.state import State


class Mimic(Attack):
    """The message of one benign client, sent by all attackers; it harms where clients differ."""

    paper: ClassVar[str] = "Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets, ICLR 2022"

    choose: Literal["fixed", "extreme"] = "fixed"
    "whom: a client drawn from the seed, or the one whose message differs most from the mean"
    warmup: Count = 1
    "with choose = 'extreme': rounds in which the client is chosen anew; afterwards the last one is kept"

    def messages(self, context: AttackContext) -> Sequence[State]:
        if not context.benign:
            return context.own
        target = context.benign[context.benign_names.index(self._target(context))]
        return [target for _ in context.names]

    def remember(self, context: AttackContext) -> State:
        if self.choose == "fixed" or not context.benign:
            return context.memory
        return State(target=torch.tensor(list(self._target(context).encode()), dtype=torch.uint8))

    def _target(self, context: AttackContext) -> str:
        names = context.benign_names
        if self.choose == "fixed":  # an order of names in which newcomers change nothing for the others
            return min(names, key=lambda name: (randomness.key(context.seed, "mimic", name), name))
        if context.round > self.warmup and "target" in context.memory:
            kept = bytes(context.memory.target.tolist()).decode()
            if kept in names:
                return kept
        return names[self._extreme(context.benign)]

    def _extreme(self, benign: Sequence[State]) -> int:
        """Return the message that is farthest along the direction in which messages differ most."""
        inner = gram(benign, zeros(benign[0])).cpu()
        middle = inner.mean(0)
        centred = inner - middle - middle[:, None] + inner.mean()
        vector = torch.linalg.eigh(centred).eigenvectors[:, -1]
        vector = vector * vector[vector.abs().argmax()].sign()
        return int(vector.argmax())

"""Free-riders: clients that did not train, and send something that looks as if they had."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.rows import completed
from equipoise.settings import NonNegative, Positive
from equipoise.state import State
from equipoise.torch_device import widened

_ROUND, _SPREAD = "round", "spread"


class FreeRider(Attack):
    """What was sent to the clients comes back, as it is or disguised as progress, from clients that did not train."""

    paper: ClassVar[str] = "Fraboni et al., Free-rider Attacks on Model Aggregation in Federated Learning, AISTATS 2021"

    disguise: Literal["none", "noise", "delta"] = "noise"
    "what is added: nothing; noise that decays like the federation's progress; or the federation's last step once more"
    k: NonNegative = 1.0
    "with disguise = 'noise': factor of its standard deviation, which is the mean size of the federation's first step"
    gamma: NonNegative = 1.0
    "with disguise = 'noise': exponent of its decay over rounds"
    weight: Positive | None = None
    "weight (usually a number of samples) that free-riders claim; by default their true one"

    @property
    def needs_origin(self) -> bool:
        return True

    @property
    def needs_weights(self) -> bool:
        return self.weight is not None

    def messages(self, context: AttackContext) -> Sequence[State]:
        return [
            completed(self._disguised(context, name), own) for name, own in zip(context.names, context.own, strict=True)
        ]

    def weights(self, context: AttackContext) -> Sequence[Tensor | None]:
        if self.weight is None:
            return context.weights
        return [None if w is None else torch.full_like(w, self.weight) for w in context.weights]

    def _disguised(self, context: AttackContext, name: str) -> State:
        origin, memory = context.origin, context.memory
        assert origin is not None
        if self.disguise == "none" or context.round == 1:
            return origin
        if self.disguise == "delta":
            return State({k: 2 * t - memory[k] if k in memory else t for k, t in origin.items()})
        spread = self._spread(context)
        if spread is None:
            return origin
        scale, rng = float(self.k * spread * (context.round - 1) ** -self.gamma), context.generator(name)
        drawn: dict[str, Any] = {
            k: torch.randn(t.shape, generator=rng, dtype=t.dtype).to(t.device) for k, t in origin.items()
        }
        return State({k: t + scale * drawn[k] for k, t in origin.items()})

    def _spread(self, context: AttackContext) -> Tensor | None:
        """Return the mean size of a coordinate of the federation's first step, from round 2 on."""
        memory, origin = context.memory, context.origin
        assert origin is not None
        if _SPREAD in memory:
            return memory[_SPREAD]
        if memory.keys() != {*origin, _ROUND}:
            return None
        sizes = [(widened(t) - widened(memory[k])).abs().sum() for k, t in origin.items()]
        return (torch.stack(sizes).sum() / sum(t.numel() for t in origin.values())).reshape(1)

    def remember(self, context: AttackContext) -> State:
        if self.disguise == "none" or context.origin is None:
            return context.memory
        if _ROUND in context.memory and int(context.memory[_ROUND]) == context.round:
            return context.memory  # another exchange of the same round
        now = State(round=torch.tensor([context.round]))
        if self.disguise == "delta" or _ROUND not in context.memory:
            return State(now, **context.origin)
        spread = self._spread(context)
        return context.memory if spread is None else State(now, spread=spread)

"""The lengths of clients' updates, by which an update far beyond all others is found."""

import math
from collections.abc import Mapping, Sequence

import torch

from equipoise.state import State

_ENOUGH = 3  # lengths that a median needs to mean something
_SMALLEST = 1e-6  # of the broadcast's length: updates of other clients below it do not make a bound


def difference_norm(message: State, known: Sequence[State] = ()) -> float:
    """Return the Euclidean norm of what is new in a message.

    Each field is compared with what both sides already have of its shape, and with zero, and the nearest counts. An
    algorithm does not announce what a field is a change of, and no honest update becomes longer by this.

    Args:
        message: the message.
        known: messages that both sides have.
    """
    total = 0.0
    for t in message.values():
        lengths = [_norm(t), *(_norm(t, other) for each in known for other in each.values() if other.shape == t.shape)]
        total = math.hypot(total, min(lengths))
    return total


def _norm(t: torch.Tensor, other: torch.Tensor | None = None) -> float:
    t = t.double()
    if other is not None:
        t = t - other.to(t)
    return float(torch.linalg.vector_norm(t))


class UploadNorms:
    """The norm of every client's last accepted update, one table per exchange of a round."""

    def __init__(self, factor: float):
        """Create empty tables.

        Args:
            factor: how many times longer than the median an update may be; 0: as long as it likes.
        """
        self.factor = factor
        self.last: dict[int, dict[str, float]] = {}

    def outliers(self, step: int, norms: Mapping[str, float], scale: float) -> dict[str, str]:
        """Return the clients whose update is far too long, with the reason.

        The bound is a multiple of the median over all clients, each with its update of now or its last one. Of two
        medians the larger counts, so that half of the clients cannot have the others refused by sending nothing. With
        fewer than three clients there is no median to speak of; what remains is a bound by the broadcast's own length.

        Args:
            step: number of the exchange within the round, as its messages may be of another kind.
            norms: norms of the updates by client.
            scale: norm of the longest message that the server had sent, and at least one.
        """
        if not self.factor or not norms:
            return {}
        everyone = sorted({**self.last.get(step, {}), **norms}.values())
        median = everyone[len(everyone) // 2]
        bound, why = self.factor**2 * scale, f"{self.factor**2:g} times the norm {scale:.3g} of what was sent to it"
        if len(everyone) >= _ENOUGH:
            typical = max(median, _SMALLEST * scale)
            if self.factor * typical < bound:
                bound = self.factor * typical
                why = f"deploy.largest_norm = {self.factor:g} times the median {typical:.3g} of all clients"
        return {
            name: f"the update's norm {norm:.3g} is above {why}" for name, norm in norms.items() if not norm <= bound
        }

    def keep(self, step: int, norms: Mapping[str, float]) -> None:
        """Remember the norms of accepted updates."""
        self.last.setdefault(step, {}).update(norms)

    def facts(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps, as JSON."""
        return {str(step): dict(norms) for step, norms in self.last.items()}

    def restore(self, facts: Mapping[str, Mapping[str, float]]) -> None:
        """Take back what was saved."""
        self.last = {int(step): dict(norms) for step, norms in facts.items()}

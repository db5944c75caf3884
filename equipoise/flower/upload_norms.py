"""The lengths of clients' updates, by which an update far beyond all others is found."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.state import State

_ORDINARY = 10.0  # of the broadcast's length: no update up to it is refused, however short the others are


def difference_norm(message: State, references: Mapping[str, Sequence[Tensor]] | None = None) -> float:
    """Return the Euclidean norm of what is new in a message.

    Args:
        message: the message.
        references: what a field is a change of, by the name of the field; of several tensors the nearest counts, and
            without any the field itself is what is new.
    """
    total = 0.0
    for name, t in message.items():
        known = (references or {}).get(name, ())
        total = math.hypot(total, min((_norm(t.double() - other.to(t).double()) for other in known), default=_norm(t)))
    return total


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.double()))


class UploadNorms:
    """The norm of every client's last accepted update, one table per exchange of a round."""

    def __init__(self, factor: float):
        """Create empty tables.

        Args:
            factor: how many times longer than the median of the others an update may be; 0: as long as it likes.
        """
        self.factor = factor
        self.last: dict[int, dict[str, float]] = {}

    def outliers(self, step: int, norms: Mapping[str, float], scale: float) -> dict[str, str]:
        """Return the clients whose update is far too long, with the reason.

        An update is compared with the median over all other clients, each with its update of now or its last one. An
        update that is not much longer than the model itself is never refused, however little the others have left to
        change: a client that joins late, or comes back, has more. A client without others is compared with the model.

        Args:
            step: number of the exchange within the round, as its messages may be of another kind.
            norms: norms of the updates by client.
            scale: norm of the longest message that the server had sent, and at least one.
        """
        if not self.factor:
            return {}
        everyone = {**self.last.get(step, {}), **norms}
        ordered = sorted(everyone.values())
        found = {}
        for name, norm in norms.items():
            bound, why = self.factor * scale, f"{self.factor:g} times the norm {scale:.3g} of what was sent to it"
            if len(ordered) > 1:
                median = _median_without(ordered, norm)
                bound = max(self.factor * median, _ORDINARY * scale)
                why = f"deploy.largest_norm = {self.factor:g} times the median {median:.3g} of the other clients"
            if not norm <= bound:
                found[name] = f"the update's norm {norm:.3g} is above {why}"
        return found

    def keep(self, step: int, norms: Mapping[str, float]) -> None:
        """Remember the norms of accepted updates."""
        self.last.setdefault(step, {}).update(norms)

    def facts(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps, as JSON."""
        return {str(step): dict(norms) for step, norms in self.last.items()}

    def restore(self, facts: Mapping[str, Mapping[str, float]]) -> None:
        """Take back what was saved."""
        self.last = {int(step): dict(norms) for step, norms in facts.items()}


def _median_without(ordered: Sequence[float], own: float) -> float:
    """Return the median of sorted numbers without one of them; the lower one of two."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle + (bisect_left(ordered, own) <= middle)]

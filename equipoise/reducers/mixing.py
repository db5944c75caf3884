"""Mixing of messages before a rule sees them: each row that the rule sees is a mean of several messages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from equipoise.reducers.context import ReductionContext
from equipoise.settings import Settings
from equipoise.state import State, Upload, Uploads, equal_shares
from equipoise.torch_device import widened


class Mixer(Settings, ABC):
    """A rule that makes mixtures of messages, to which a reducer is then applied."""

    @abstractmethod
    def __call__(self, uploads: Uploads, context: ReductionContext) -> "Mixed":
        """Return the mixtures."""


@dataclass(frozen=True)
class Mixed(Uploads):
    """Mixtures of messages. They have no weights, because no mixture belongs to one client."""

    inner: Uploads
    "the messages"
    matrix: Tensor
    "one row per mixture: the shares of the messages in it, which sum to one"
    by: tuple[int, ...]
    "the number of the client that each mixture is named after; every client at most once"

    @property
    def who(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.who

    @property
    def senders(self) -> tuple[int, ...]:
        return self.by

    @property
    def sent(self) -> int:
        return self.inner.sent

    def __len__(self) -> int:
        return len(self.matrix)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.inner.uploads

    @property
    def like(self) -> State:
        return self.inner.like

    @property
    def weighted(self) -> bool:
        return False

    def mean(self) -> State:
        return self.combined(self.weights())

    def weights(self) -> Tensor:
        return equal_shares(len(self), self.like)

    def columns(self, name: str, low: int, high: int) -> Tensor:
        rows = self.inner.columns(name, low, high)
        return (self.matrix.to(rows.device) @ widened(rows)).to(rows.dtype)

    def combined(self, weights: Tensor) -> State:
        return self.inner.combined(weights @ self.matrix.to(weights))

    def only(self, *names: str) -> "Mixed":
        return replace(self, inner=self.inner.only(*names))

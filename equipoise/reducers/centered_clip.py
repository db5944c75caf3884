"""Centered clipping: messages are clipped around where the last round is expected to lead, with worker momentum."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.reducers.base import ContextReducer
from equipoise.reducers.client_memory import ClientMemory
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences, clipping
from equipoise.reducers.order import median
from equipoise.settings import Fraction, Positive
from equipoise.state import State, Upload, Uploads, equal_shares
from equipoise.torch_device import widened

_STEP = "step."


class CenteredClip(ContextReducer):
    """A point v that takes steps towards all messages, each step cut to a length tau.

    v begins where it would be if the last round were repeated. With momentum, the server remembers for each client the
    moving average m_i of its differences and combines those. (In the paper clients compute m_i; a forged message passes
    through the average here, which is a little weaker than a forged average.)
    """

    paper: ClassVar[str] = "Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021"
    needs_origin: ClassVar[bool] = True

    iterations: Annotated[int, Field(ge=1, le=100_000)] = 1
    "steps of v in a round; 3 after bucketing"
    tau: Positive | Literal["median"] = "median"
    "length to which a step towards a message is cut; or the median distance of messages from the start of v"
    momentum: Fraction = 0.0
    "weight beta of the past in the clients' moving averages; 0: their differences of the round"

    @property
    def remembers(self) -> bool:
        return True

    def memory(self, like: State, clients: int) -> State:
        step = State({_STEP + k: torch.zeros_like(t) for k, t in like.items()})
        if not self.momentum:
            return step
        return State(step, **ClientMemory.empty({k: t.numel() for k, t in like.items()}, like, clients))

    def apply(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        if not self.momentum:
            return super().apply(uploads, context)
        # Before mixing, because mixtures belong to no client.
        step = State({k: t for k, t in context.memory.items() if k.startswith(_STEP)})
        rows = State({k: t for k, t in context.memory.items() if k not in step})
        m = ClientMemory(rows, uploads.senders)
        averaged = Averaged.of(uploads, context.origin_for(uploads, self), m, self.momentum)
        message, after = super().apply(averaged, context)
        return message, State(after, **m.after)

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        o = context.origin_for(uploads, self)
        v = State({k: t + context.memory[_STEP + k] for k, t in o.items()})
        d = Differences(uploads, v)
        a = coefficients(d.gram(), self.tau, self.iterations)
        message = d.combined(a)
        return message, State({_STEP + k: t - o[k] for k, t in message.items()})


def coefficients(gram: Tensor, tau: float | str, iterations: int) -> Tensor:
    """Return the coefficients of v = v_0 + sum a_i (x_i - v_0) after some steps.

    Args:
        gram: inner products of the messages' differences from v_0.
        tau: length to which a step towards a message is cut, or "median".
        iterations: number of steps.
    """
    norms = gram.diagonal()
    bound = median(norms.sqrt()[:, None])[0] if isinstance(tau, str) else tau
    a = torch.zeros_like(norms)
    for _ in range(iterations):
        seen = gram @ a
        distances = (norms - 2 * seen + a @ seen).clamp(min=0).sqrt()
        share = clipping(distances, bound) / len(norms)
        a = (1 - share.sum()) * a + share
    return a


@dataclass(frozen=True)
class Averaged(Uploads):
    """Messages whose differences from their origin are replaced by the clients' moving averages of them."""

    inner: Uploads
    origin: State
    averages: State = field(repr=False)
    "one row per message: m_i"

    @staticmethod
    def of(uploads: Uploads, origin: State, m: ClientMemory, beta: float) -> "Averaged":
        """Update the moving averages m_i <- beta m_i + (1 - beta) d_i, in `m`, too; the first one is d_i."""
        past = widened(beta * m.known)[:, None]
        rows: dict[str, list[Tensor]] = {}
        for name in uploads.like:
            for low, high, d in Differences(uploads, origin).field(name):
                new = past * m.get(name, low, high) + (1 - past) * d
                rows.setdefault(name, []).append(m.put(name, low, high, new))
        return Averaged(uploads, origin, State({k: torch.cat(blocks, dim=1) for k, blocks in rows.items()}))

    @property
    def who(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.who

    @property
    def senders(self) -> tuple[int, ...]:
        return self.inner.senders

    @property
    def sent(self) -> int:
        return self.inner.sent

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.inner.uploads

    @property
    def like(self) -> State:
        return self.inner.like

    @property
    def weighted(self) -> bool:
        return self.inner.weighted

    def mean(self) -> State:
        return self.combined(equal_shares(len(self), self.like))

    def weights(self) -> Tensor:
        return self.inner.weights()

    def columns(self, name: str, low: int, high: int) -> Tensor:
        return self.origin[name].flatten()[low:high] + self.averages[name][:, low:high]

    def only(self, *names: str) -> "Averaged":
        raise TypeError("moving averages are combined as a whole")

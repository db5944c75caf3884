"""What Learn2pFed learns: where the learnables lie in one vector, their initial values, and their updates."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from equipoise import randomness
from equipoise.optimizers import adam
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.linear_head import LinearHead, linear_head
from equipoise.state import State

SCALARS = ("rho", "eta", "theta")
"""A client's learnables besides Λ."""


@dataclass(frozen=True)
class Layout:
    """The head as a matrix, and the learnables Λ, rho, eta, theta, set by set, as a vector."""

    head: LinearHead
    sets: int
    "number of sets of learnables: one, or one per cell"

    @property
    def size(self) -> int:
        """Return the number of entries of Λ in a set."""
        return self.head.inputs * self.head.outputs

    @property
    def slices(self) -> dict[str, slice]:
        """Return where each family of learnables lies."""
        size = self.sets * self.size
        return {"lam": slice(0, size)} | {
            name: slice(size + k * self.sets, size + (k + 1) * self.sets) for k, name in enumerate(SCALARS)
        }

    def places(self, names: tuple[str, ...]) -> list[int]:
        """Return the places of all learnables of these families."""
        return [k for name in names for k in range(self.slices[name].start, self.slices[name].stop)]

    def lam(self, raw: Tensor, k: int) -> Tensor:
        """Return the learnables behind Λ of set k, as matrices with a leading axis for the networks."""
        piece = raw[..., k * self.size : (k + 1) * self.size]
        lam: Tensor = piece.unflatten(-1, (1, self.head.inputs, self.head.outputs))
        return lam

    def scalars(self, raw: Tensor, k: int) -> tuple[Tensor, ...]:
        """Return rho, eta and theta of set k, to be multiplied with matrices of several networks."""
        first = self.sets * self.size + k
        return raw[..., first :: self.sets].exp()[..., None, None, None].unbind(-4)

    def gradient(self, k: int, lam: Tensor, scalars: Tensor) -> Tensor:
        """Return the gradient of all learnables, given that of set k; it is zero for the other sets.

        Args:
            k: the number of the set.
            lam: the gradient of its Λ.
            scalars: the gradient of its scalars.
        """
        size = self.size
        gradient = lam.new_zeros((*scalars.shape[:-1], self.sets * (size + len(SCALARS))))
        gradient[..., k * size : (k + 1) * size] = lam.flatten(-3)
        gradient[..., self.sets * size + k :: self.sets] = scalars
        return gradient


def set_of(cell: int, sets: int) -> int:
    """Return the number of the set of learnables that a cell uses."""
    return cell if sets > 1 else 0


@lru_cache(maxsize=16)
def layout(space: ParameterSpace, sets: int) -> Layout:
    """Return the layout for a model and a number of sets."""
    return Layout(linear_head(space), sets)


def initial_learnables(
    layout: Layout, seed: int, lam: float, scalars: tuple[float, float, float], draw: bool, log: bool
) -> Tensor:
    """Return the initial learnables of a client, the same for all clients, in float64.

    Args:
        layout: where they lie.
        seed: seed of the run.
        lam: scale of Λ.
        scalars: rho, eta and theta.
        draw: whether Λ is multiplied by random numbers from 0 to 1.
        log: whether Λ is the exponential of what is learned.
    """
    size = layout.size
    generator = randomness.torch_generator(seed, "learn2pfed")
    drawn = torch.rand(size, generator=generator, dtype=torch.float64) if draw else torch.ones(size).double()
    raw = (lam * drawn).clamp(min=1e-6 * lam).repeat(layout.sets)
    logs = torch.tensor(scalars, dtype=torch.float64).log()
    return torch.cat([raw.log() if log else raw, logs.repeat_interleave(layout.sets)])


@dataclass(frozen=True)
class Descent:
    """Gradient steps of learnables, with clipping."""

    rule: Literal["sgd", "adam"]
    rate: float
    clip: float
    "largest norm, over all axes but those of a stack; 0: no limit"
    decay_after: int
    decay: float

    @staticmethod
    def memory(raw: Tensor, columns: int = 1) -> State:
        """Return the initial memory of the rule for vectors like this, with no steps taken.

        Args:
            raw: the learnables.
            columns: number of columns that may take steps without the others.
        """
        return State(first=torch.zeros_like(raw), second=torch.zeros_like(raw), age=raw.new_zeros(columns))

    def __call__(self, raw: Tensor, gradient: Tensor, memory: State, axes: int, there: Tensor | None = None) -> State:
        """Return the learnables after one step, with the new memory.

        Args:
            raw: the learnables.
            gradient: their gradient.
            memory: what the rule remembers.
            axes: number of last axes that form one vector.
            there: 1 for each column of the learnables that takes the step and 0 for the others, which stay as they are,
                and so does their memory; None if all do.
        """
        gradient = gradient if there is None else gradient * there
        if self.clip:
            norm = gradient.flatten(-axes).norm(dim=-1)[(..., *[None] * axes)]
            gradient = gradient * (self.clip / norm.clamp(min=self.clip))
        first, second, age = memory.first, memory.second, memory.age + (1 if there is None else there)
        if self.rule == "adam":
            first, second, gradient = adam(first, second, age, gradient)
        rate = torch.where(age > self.decay_after, self.rate * self.decay, self.rate)
        stepped = State(raw=raw - rate * gradient, first=first, second=second, age=age)
        if there is None:
            return stepped
        before = State(memory, raw=raw)
        return State({name: torch.where(there > 0, t, before[name]) for name, t in stepped.items()})

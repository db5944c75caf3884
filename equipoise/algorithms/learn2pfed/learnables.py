"""What Learn2pFed learns: where the learnables lie in one vector, how they begin, and how they are stepped."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from equipoise import randomness
from equipoise.optimizers import adam
from equipoise.parameter_space import ParameterSpace, linear_head
from equipoise.state import State

SCALARS = ("rho", "eta", "theta")
"""A client's learnables besides Λ."""


@dataclass(frozen=True)
class Layout:
    """The head as a matrix, with one row per input; and the learnables Λ, rho, eta, theta, set by set, as a vector."""

    inputs: int
    "inputs of the head, with the constant one where it has a bias"
    outputs: int
    bias: bool
    sets: int
    "number of sets of learnables: one, or one per cell"

    @property
    def slices(self) -> dict[str, slice]:
        """Return where each family of learnables lies."""
        size = self.sets * self.inputs * self.outputs
        return {"lam": slice(0, size)} | {
            name: slice(size + k * self.sets, size + (k + 1) * self.sets) for k, name in enumerate(SCALARS)
        }

    def places(self, names: tuple[str, ...]) -> list[int]:
        """Return the places of all learnables of these families."""
        return [k for name in names for k in range(self.slices[name].start, self.slices[name].stop)]

    def matrix(self, head: Tensor) -> Tensor:
        """Turn the head's vector (weights output by output, then the bias) into a matrix."""
        inputs = self.inputs - self.bias
        weight = head[..., : inputs * self.outputs].unflatten(-1, (self.outputs, inputs)).mT
        return torch.cat([weight, head[..., None, inputs * self.outputs :]], dim=-2) if self.bias else weight

    def head(self, matrix: Tensor) -> Tensor:
        """Turn the matrix back into the head's vector."""
        inputs = self.inputs - self.bias
        weight = matrix[..., :inputs, :].mT.flatten(-2)
        return torch.cat([weight, matrix[..., inputs, :]], dim=-1) if self.bias else weight

    def lam(self, raw: Tensor, k: int) -> Tensor:
        """Return what Λ of set k is made of, as matrices with an axis for the networks before them."""
        size = self.inputs * self.outputs
        lam: Tensor = raw[..., k * size : (k + 1) * size].unflatten(-1, (1, self.inputs, self.outputs))
        return lam

    def scalars(self, raw: Tensor, k: int) -> tuple[Tensor, ...]:
        """Return rho, eta and theta of set k, to be multiplied with matrices of several networks."""
        first = self.sets * self.inputs * self.outputs + k
        return raw[..., first :: self.sets].exp()[..., None, None, None].unbind(-4)

    def slope(self, k: int, lam: Tensor, scalars: Tensor) -> Tensor:
        """Return the gradient of all learnables from that of set k; that of the others is zero."""
        size = self.inputs * self.outputs
        slope = lam.new_zeros((*scalars.shape[:-1], self.sets * (size + len(SCALARS))))
        slope[..., k * size : (k + 1) * size] = lam.flatten(-3)
        slope[..., self.sets * size + k :: self.sets] = scalars
        return slope


@lru_cache(maxsize=16)
def layout(space: ParameterSpace, sets: int) -> Layout:
    """Return the layout for a model and a number of sets."""
    return Layout(*linear_head(space), sets)


def initial_learnables(
    layout: Layout, seed: int, lam: float, scalars: tuple[float, float, float], draw: bool, log: bool
) -> Tensor:
    """Return what the learnables of a client begin as, the same for all clients, in float64.

    Args:
        layout: where they lie.
        seed: seed of the run.
        lam: scale of Λ.
        scalars: rho, eta and theta.
        draw: whether Λ is multiplied by random numbers from 0 to 1.
        log: whether Λ is the exponential of what is learned.
    """
    size = layout.inputs * layout.outputs
    generator = randomness.torch_generator(seed, "learn2pfed")
    drawn = torch.rand(size, generator=generator, dtype=torch.float64) if draw else torch.ones(size).double()
    raw = (lam * drawn).clamp(min=1e-6 * lam).repeat(layout.sets)
    logs = torch.tensor(scalars, dtype=torch.float64).log()
    return torch.cat([raw.log() if log else raw, logs.repeat_interleave(layout.sets)])


@dataclass(frozen=True)
class Descent:
    """Steps of learnables against their gradient, which is clipped first."""

    rule: Literal["sgd", "adam"]
    rate: float
    clip: float
    "largest norm, over all axes but those of a stack; 0: any"
    decay_after: int
    decay: float

    @staticmethod
    def memory(raw: Tensor) -> State:
        """Return what the rule remembers of vectors like this, and how many steps it has taken: nothing yet."""
        return State(first=torch.zeros_like(raw), second=torch.zeros_like(raw), age=raw.new_zeros(1))

    def __call__(self, raw: Tensor, slope: Tensor, memory: State, axes: int) -> State:
        """Return the new `raw` with the new memory; the last `axes` axes are one vector."""
        if self.clip:
            norm = slope.flatten(-axes).norm(dim=-1)[(..., *[None] * axes)]
            slope = slope * (self.clip / norm.clamp(min=self.clip))
        first, second, age = memory.first, memory.second, memory.age + 1
        if self.rule == "adam":
            first, second, slope = adam(first, second, age, slope)
        rate = torch.where(age > self.decay_after, self.rate * self.decay, self.rate)
        return State(raw=raw - rate * slope, first=first, second=second, age=age)

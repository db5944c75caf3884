"""A copy of the module for one thread, whose parameters are views of one vector."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.data.federation import BatchBuffer
from equipoise.equilibrium import Solves, SolveStats, auxiliary_layers, layers, projected, set_budget
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import ForwardHook
from equipoise.torch_device import random_generator
from equipoise.training.buffers import load_buffers, read_buffers

_SEEDED_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def draws_random_numbers(layer: nn.Module) -> bool:
    """Tell whether a layer draws random numbers in training."""
    return (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0) or getattr(layer, "draws", False)


class Replica:
    """A module whose parameters are views of `vector`, so that loading a client is one copy."""

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        w0: Tensor,
        head: str | None = None,
        unseeded: bool = False,
        buffer_names: Sequence[str] = (),
    ):
        """Copy a module.

        Args:
            module: the module to copy.
            space: the layout of its parameters.
            w0: their initial values.
            head: name of the submodule that is the head.
            unseeded: whether it draws from torch's global random stream.
            buffer_names: the buffers that training changes.
        """
        self.module = copy.deepcopy(module)
        self.vector = w0.clone()
        space.bind(self.module, self.vector)
        named = dict(self.module.named_parameters())
        self.parameters = [named[entry.name] for entry in space.entries]
        self.batch_buffer = BatchBuffer()
        self.hooks: dict[tuple[str, ...], ForwardHook] = {}
        self.head, self.unseeded, self.buffer_names = head, unseeded, buffer_names
        self.equilibria = dict(layers(self.module))
        self.projected = projected(self.module)
        self.auxiliary = auxiliary_layers(self.module)
        self.random = random_generator(w0.device)
        for layer in self.module.modules():
            if type(layer) in _SEEDED_DROPOUT:
                layer.forward = self._dropout(layer)
            elif getattr(layer, "draws", False):  # a layer of this library, which uses the generator that it is given
                layer.generator = self.random  # type: ignore[assignment]

    def _dropout(self, layer: Any) -> Callable[[Tensor], Tensor]:
        whole_channels = not isinstance(layer, nn.Dropout)

        def forward(x: Tensor) -> Tensor:
            if not layer.training or layer.p == 0:
                return x
            shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if whole_channels else x.shape
            keep = torch.empty(shape, dtype=x.dtype, device=self.random.device)
            keep = keep.bernoulli_(1 - layer.p, generator=self.random).to(x.device)
            dropped: Tensor = x * keep / max(1 - layer.p, torch.finfo(x.dtype).tiny)
            return dropped

        return forward

    def hook(self, names: tuple[str, ...]) -> ForwardHook:
        """Return the hook that records representations at these points, and install it if necessary."""
        if names not in self.hooks:
            self.hooks[names] = ForwardHook(self.module, names, self.head)
        return self.hooks[names]

    def seed(self, key: int) -> None:
        """Make all random numbers, in dropout and from torch's global stream, depend on `key` only."""
        self.random.manual_seed(key % 2**63)
        if self.unseeded:
            torch.manual_seed(key % 2**63)

    def set_budget(self, iterations: int | None) -> None:
        """Limit the iterations of equilibrium solves from now on; None restores the layers' own limits."""
        if self.equilibria:
            set_budget(self.module, iterations)

    @property
    def iterations(self) -> int:
        """Return the current iteration limit of equilibrium solves; 1 without equilibrium layers."""
        return max((layer.limit for layer in self.equilibria.values()), default=1)

    @property
    def iterations_performed(self) -> float:
        """Return the mean number of iterations of forward solves since the last reset; 1 if there were none."""
        found = SolveStats()
        for layer in self.equilibria.values():
            found.add(layer.solves.forward)
        return found.mean if found.solves else 1.0

    def forget_solves(self) -> None:
        """Reset the counts of equilibrium solves."""
        for layer in self.equilibria.values():
            layer.solves = Solves()

    def solves(self) -> dict[str, Solves]:
        """Return the solves of each equilibrium layer since the last reset, by the layer's name."""
        return {name: layer.solves for name, layer in self.equilibria.items()}

    def load_buffers(self, vector: Tensor) -> None:
        """Load the buffers from a vector."""
        load_buffers(self.module, self.buffer_names, vector)

    def read_buffers(self) -> Tensor:
        """Return the buffers as one vector."""
        return read_buffers(self.module, self.buffer_names, self.vector)

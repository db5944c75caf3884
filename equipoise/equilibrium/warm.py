"""Warm starts by sample: a solve begins where the last one for the same sample ended."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise.equilibrium.layer import Equilibrium, layers
from equipoise.equilibrium.solve import Solution
from equipoise.errors import EquipoiseError


class WarmStart:
    """The fixed points of `samples` samples in every equilibrium layer of a module whose warm start is not off.

        warm = WarmStart(model, len(dataset))
        for index, x, y in loader:       # index: which samples these are
            with warm.at(index):
                loss = criterion(model(x), y)

    A sample that has not been met yet starts as the layer says. Nothing is remembered of samples that diverged.
    """

    def __init__(self, module: nn.Module, samples: int):
        self.samples = samples
        self.slots = [_Slot(layer, samples) for _, layer in layers(module) if layer.options.warm_start != "off"]

    @contextmanager
    def at(self, index: Tensor) -> Iterator[None]:
        """In here, row k of a batch is sample index[k]; each layer may be passed once."""
        if index.ndim != 1 or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.samples):
            raise EquipoiseError(f"samples are known by a row of numbers 0 to {self.samples - 1}, one a sample")
        for slot in self.slots:
            slot.layer.memory = slot.opened(index)
        try:
            yield
        finally:
            for slot in self.slots:
                slot.layer.memory = None

    def tensors(self, kept: str = "client") -> dict[str, Tensor]:
        """What is remembered of the layers with this kind of warm start; empty where nothing is known yet."""
        found: dict[str, Tensor] = {}
        for k, slot in enumerate(self.slots):
            if slot.layer.options.warm_start == kept and slot.z is not None:
                found |= {f"{k}.z": slot.z, f"{k}.known": slot.known}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for k, slot in enumerate(self.slots):
            if f"{k}.z" in tensors:
                slot.z, slot.known = tensors[f"{k}.z"].clone(), tensors[f"{k}.known"].clone()


class _Slot:
    """One layer's table, a row a sample."""

    def __init__(self, layer: Equilibrium, samples: int):
        self.layer = layer
        self.z: Tensor | None = None
        self.known = torch.zeros(samples, dtype=torch.bool)

    def opened(self, index: Tensor) -> Callable[[Tensor], tuple[Tensor, Callable[[Solution], None]]]:
        def guess(default: Tensor) -> tuple[Tensor, Callable[[Solution], None]]:
            if len(default) != len(index):
                raise EquipoiseError(f"a batch of {len(default)} samples came with the numbers of {len(index)}")
            if self.z is None:
                self.z = default.new_zeros(len(self.known), *default.shape[1:])
            known = self.known[index].view(-1, *(1 for _ in default.shape[1:]))
            start = torch.where(known, self.z[index], default)
            if default.ndim == 4:  # as the convolutions want it, not as it lies in the table
                layout = torch.channels_last if _channels_last(default) else torch.contiguous_format
                start = start.contiguous(memory_format=layout)
            return start, keep

        def keep(solution: Solution) -> None:
            assert self.z is not None
            self.z[index], self.known[index] = solution.f, solution.finite

        return guess


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()

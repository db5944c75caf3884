"""Warm starts by sample: a solve begins where the last one for the same sample ended."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise.equilibrium.fixed_point import Solution, channels_last
from equipoise.equilibrium.layer import Equilibrium, Memory, layers
from equipoise.errors import EquipoiseError


class WarmStart:
    """The fixed points of `samples` samples in every equilibrium layer of a module whose warm start is not off.

        warm = WarmStart(model, len(dataset))
        for index, x, y in loader:       # index: which samples these are
            with warm.at(index):
                loss = criterion(model(x), y)

    A sample that has not been met yet starts as the layer says. Nothing is remembered of samples that diverged. A layer
    inside another equilibrium is left out: it is called with ever fewer samples. A layer that is passed twice in there
    starts the second time where the first ended.
    """

    def __init__(self, module: nn.Module, samples: int):
        if not isinstance(samples, int) or samples < 0:
            raise EquipoiseError(f"samples = {samples!r} is not allowed; it must be a whole number >= 0")
        self.samples = samples
        found = dict(layers(module))
        outer = [layer for layer in found.values() if not _inside_another(layer, found.values())]
        self.slots = [_Slot(layer, samples) for layer in outer if layer.options.warm_start != "off"]

    @contextmanager
    def at(self, index: Tensor | Sequence[int]) -> Iterator[None]:
        """In here, row k of a batch is sample index[k]."""
        which = torch.as_tensor(index)
        known = which.ndim == 1 and not which.is_floating_point() and which.dtype != torch.bool
        if not known or (len(which) and not 0 <= int(which.min()) <= int(which.max()) < self.samples):
            raise EquipoiseError(f"samples are known by a row of whole numbers 0 to {self.samples - 1}, one a sample")
        for slot in self.slots:
            slot.layer.memory = slot.opened(which)
        try:
            yield
        finally:
            for slot in self.slots:
                slot.layer.memory = None

    def tensors(self, only: str | None = None) -> dict[str, Tensor]:
        """What is remembered, of layers with this kind of warm start only; empty where nothing is known yet."""
        found: dict[str, Tensor] = {}
        for k, slot in enumerate(self.slots):
            if only in (None, slot.layer.options.warm_start) and slot.z is not None:
                found |= {f"{k}.z": slot.z, f"{k}.known": slot.known}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave, also of more or fewer samples than there are now."""
        for k, slot in enumerate(self.slots):
            if f"{k}.z" in tensors:
                slot.load(tensors[f"{k}.z"], tensors[f"{k}.known"])


def _inside_another(layer: Equilibrium, others: Iterable[Equilibrium]) -> bool:
    return any(layer is not other and any(layer is m for m in other.modules()) for other in others)


class _Slot:
    """One layer's table, a row a sample."""

    def __init__(self, layer: Equilibrium, samples: int):
        self.layer, self.samples = layer, samples
        self.z: Tensor | None = None
        self.known = torch.zeros(samples, dtype=torch.bool)

    def load(self, z: Tensor, known: Tensor) -> None:
        n = min(len(z), self.samples)
        self.z = z.new_zeros(self.samples, *z.shape[1:])
        self.known = known.new_zeros(self.samples)
        self.z[:n], self.known[:n] = z[:n], known[:n]

    def opened(self, index: Tensor) -> Memory:
        def guess(default: Tensor) -> tuple[Tensor, Callable[[Solution], None]]:
            nonlocal index
            if len(default) != len(index):
                raise EquipoiseError(f"a batch of {len(default)} samples came with the numbers of {len(index)}")
            index = index.to(default.device)
            like = self.z is not None and (self.z.shape[1:], self.z.dtype) == (default.shape[1:], default.dtype)
            if not like:  # nothing is known yet, or of another kind of samples
                self.z = default.new_zeros(self.samples, *default.shape[1:])
                self.known = torch.zeros(self.samples, dtype=torch.bool, device=default.device)
            assert self.z is not None
            known = self.known[index].view(-1, *(1 for _ in default.shape[1:]))
            start = torch.where(known, self.z[index], default)
            if default.ndim == 4:  # as the convolutions want it, not as it lies in the table
                layout = torch.channels_last if channels_last(default) else torch.contiguous_format
                start = start.contiguous(memory_format=layout)
            return start, keep

        @torch.no_grad()
        def keep(solution: Solution) -> None:
            assert self.z is not None
            found = index[solution.finite]
            self.z[found], self.known[index] = solution.f[solution.finite], solution.finite

        return guess

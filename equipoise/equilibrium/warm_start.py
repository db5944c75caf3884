"""Warm starts per sample: a solve starts where the last one for the same sample ended."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise.equilibrium.fixed_point import Solution, channels_last
from equipoise.equilibrium.layer import Equilibrium, Memory, layers
from equipoise.errors import EquipoiseError


class WarmStart:
    """The last fixed points of samples, in every equilibrium layer of a module whose warm start is not off.

        warm = WarmStart(model, len(dataset))
        for index, x, y in loader:       # index: which samples these are
            with warm.at(index):
                loss = criterion(model(x), y)

    A sample that has not been seen yet starts at the layer's default guess. Samples that diverged are forgotten. Layers
    inside another equilibrium are not included, because they are called with fewer and fewer samples. A layer that is
    called twice within `at` starts the second time where the first call ended.
    """

    def __init__(self, module: nn.Module, samples: int):
        """Create empty warm starts for the layers of `module` and `samples` samples."""
        if not isinstance(samples, int) or samples < 0:
            raise EquipoiseError(f"samples = {samples!r} is not allowed; it must be a whole number >= 0")
        self.samples = samples
        found = dict(layers(module))
        outer = [layer for layer in found.values() if not _inside_another(layer, found.values())]
        self.slots = [_Slot(layer, samples) for layer in outer if layer.options.warm_start != "off"]

    @contextmanager
    def at(self, index: Tensor | Sequence[int]) -> Iterator[None]:
        """Use and update the warm starts within the context, where row k of a batch is sample index[k]."""
        which = torch.as_tensor(index)
        known = which.ndim == 1 and not which.is_floating_point() and which.dtype != torch.bool
        if not known or (len(which) and not 0 <= int(which.min()) <= int(which.max()) < self.samples):
            raise EquipoiseError(
                f"index must be a vector of whole numbers from 0 to {self.samples - 1}, one per sample"
            )
        for slot in self.slots:
            slot.layer.memory = slot.opened(which)
        try:
            yield
        finally:
            for slot in self.slots:
                slot.layer.memory = None

    def tensors(self, only: str | None = None) -> dict[str, Tensor]:
        """Return what is remembered, of all layers or only of those with one kind of warm start."""
        found: dict[str, Tensor] = {}
        for k, slot in enumerate(self.slots):
            if only in (None, slot.layer.options.warm_start) and slot.z is not None:
                found |= {f"{k}.z": slot.z, f"{k}.known": slot.known}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned; the number of samples may have changed since."""
        for k, slot in enumerate(self.slots):
            if f"{k}.z" in tensors:
                slot.load(tensors[f"{k}.z"], tensors[f"{k}.known"])


def _inside_another(layer: Equilibrium, others: Iterable[Equilibrium]) -> bool:
    return any(layer is not other and any(layer is m for m in other.modules()) for other in others)


class _Slot:
    """The table of one layer, one row per sample."""

    def __init__(self, layer: Equilibrium, samples: int):
        self.layer, self.samples = layer, samples
        self.z: Tensor | None = None
        self.known = torch.zeros(samples, dtype=torch.bool)

    def load(self, z: Tensor, known: Tensor) -> None:
        n = min(len(z), self.samples)
        with torch.inference_mode(False):
            self.z = z.new_zeros(self.samples, *z.shape[1:])
            self.known = known.new_zeros(self.samples)
        self.z[:n], self.known[:n] = z[:n], known[:n]

    def opened(self, index: Tensor) -> Memory:
        def guess(default: Tensor) -> tuple[Tensor, Callable[[Solution], None]]:
            nonlocal index
            if len(default) != len(index):
                raise EquipoiseError(f"the batch has {len(default)} samples, but index has {len(index)}")
            index = index.to(default.device)
            like = self.z is not None and (self.z.shape[1:], self.z.dtype) == (default.shape[1:], default.dtype)
            if not like:  # nothing is known yet, or the samples have another shape
                with torch.inference_mode(False):  # tables of inference mode could not be changed in training
                    self.z = default.new_zeros(self.samples, *default.shape[1:])
                    self.known = torch.zeros(self.samples, dtype=torch.bool, device=default.device)
            assert self.z is not None
            known = self.known[index].view(-1, *(1 for _ in default.shape[1:]))
            start = torch.where(known, self.z[index], default)
            if default.ndim == 4:  # the memory layout of the batch, not of the table
                layout = torch.channels_last if channels_last(default) else torch.contiguous_format
                start = start.contiguous(memory_format=layout)
            return start, keep

        @torch.no_grad()
        def keep(solution: Solution) -> None:
            assert self.z is not None
            found = index[solution.finite]
            self.z[found], self.known[index] = solution.f[solution.finite], solution.finite

        return guess

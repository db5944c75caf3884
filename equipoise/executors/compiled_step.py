"""The local step of one client, compiled ahead of time: forward, backward and update in one call."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.schema import ShapeProbe
from equipoise.data.federation import Federation
from equipoise.equilibrium import auxiliary_layers, layers, projected
from equipoise.errors import EquipoiseError
from equipoise.executors.aot_library import AotFunction, Built, build_library
from equipoise.optimizers import Rate
from equipoise.parameter_space import Part
from equipoise.torch_device import is_accelerator
from equipoise.training.batches import Batch
from equipoise.training.local_trainer import is_plain_sgd
from equipoise.training.replica import draws_random_numbers
from equipoise.training.task import Task

Kind = Literal["step", "gradient"]
"""What is compiled: a whole step of plain SGD, or the gradient for any other optimizer."""
CompiledSteps = dict[tuple[Kind, Part], "CompiledStep"]


def why_not_compiled(task: Task) -> str | None:
    """Return why steps of this task cannot be compiled for threads, or None if nothing is known against it."""
    if is_accelerator(task.device):
        return "on an accelerator, only stacked steps are compiled"
    if task.mixed:
        return "engine.precision is 'bf16-mixed'"
    if any(layers(task.module)):
        return "the model has equilibrium layers, whose solves take as many iterations as they need"
    if projected(task.module):
        return "the model's weights are projected after every step"
    if task.buffer_names:
        return "the model has buffers that training changes (BatchNorm statistics)"
    if auxiliary_layers(task.module):
        return "the model has layers with auxiliary losses"
    if task.unseeded or any(map(draws_random_numbers, task.module.modules())):
        return "the model draws random numbers (dropout) in training"
    return None


class CompiledStep:
    """A compiled step or gradient, for the use of one thread; it takes batches of one shape only."""

    def __init__(self, function: AotFunction, x: Tensor, constants: Sequence[Tensor], dtype: torch.dtype):
        self.function, self.constants = function, constants
        self.shape, self.stride = x.shape, x.stride()
        self.lr = torch.zeros((), dtype=dtype)
        self.rate: Rate = 0.0

    def fits(self, batch: Batch) -> bool:
        """Tell whether the batch has the shape that was compiled."""
        return batch.x.shape == self.shape and batch.x.stride() == self.stride

    def step(self, v: Tensor, batch: Batch, lr: Rate) -> None:
        """Take a step of plain SGD, in place."""
        if lr != self.rate:
            self.lr.fill_(lr)
            self.rate = lr
        self._call(v, batch, self.lr)

    def gradient(self, v: Tensor, batch: Batch, out: Tensor) -> None:
        """Write the gradient of the trained part of v into `out`."""
        self._call(v, batch, out)

    def _call(self, v: Tensor, batch: Batch, last: Tensor) -> None:
        try:
            self.function([v, batch.x, batch.y, last, *self.constants])
        except RuntimeError as error:
            raise EquipoiseError(
                f"the model or its loss fails on a batch of {len(batch.x)} samples: {error}"
            ) from error


class StepCompiler:
    """The compiled steps of a run: of each part that the algorithm trains, for the batches that are most frequent."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        start: Start,
        report: Callable[[str], None] = lambda text: None,
    ):
        """Compile the steps, or load them from the cache.

        Args:
            task: the task to train for.
            federation: the clients and their data, which determine the shape of batches.
            algorithm: the algorithm, which determines the parts.
            start: what is known before the first round.
            report: receives a sentence about what was compiled.
        """
        self.task, self.kind = task, _kind(algorithm)
        self.x, self.y = _frequent_batch(federation, algorithm.batch)
        self.names, self.constants = _constants(task)
        parts = _parts(algorithm, start)
        if not parts:
            raise EquipoiseError(
                f"engine.compile = true has no effect: every step of {type(algorithm).__name__} has a loss term or "
                "a rule of its own; leave it out"
            )
        began = time.perf_counter()
        built = {part: self._build(part) for part in parts}
        self.libraries = {part: each.library for part, each in built.items()}
        if new := [each for each in built.values() if each.new]:
            what = f"the {self.kind}" if len(new) == 1 else f"{len(new)} {self.kind}s"
            where = "" if new[0].folder is None else f"; cached in {new[0].folder}"
            report(f"compiled {what} in {time.perf_counter() - began:.1f} s{where}")

    def for_thread(self) -> CompiledSteps:
        """Return the compiled steps for the use of one thread."""
        return {
            (self.kind, part): CompiledStep(library.function(), self.x, self.constants, self.task.dtype)
            for part, library in self.libraries.items()
        }

    def _build(self, part: Part) -> Built:
        last = torch.zeros(()) if self.kind == "step" else self.task.w0[self.task.space.part(part)]
        inputs = [self.task.w0, self.x, self.y, last.to(self.task.dtype, copy=True), *self.constants]
        try:
            return build_library(self._trace(part, inputs), inputs)
        except Exception as error:  # whatever torch cannot trace or compile, the model trains without it
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EquipoiseError(
                f"engine.compile = true: the step of this model cannot be compiled ({text}); leave it out"
            ) from error

    def _trace(self, part: Part, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        task, names = self.task, self.names
        low, high, _ = task.space.part(part).indices(task.space.size)
        moving = [e for e in task.space.entries if low <= e.offset < high]
        still = [e for e in task.space.entries if not low <= e.offset < high]
        module = copy.deepcopy(task.module).train()

        def gradient(v: Tensor, x: Tensor, y: Tensor, constants: Sequence[Tensor]) -> Tensor:
            given = {e.name: e.view(v) for e in still} | dict(zip(names, constants, strict=True))

            def loss(p: dict[str, Tensor]) -> Tensor:
                return task.loss.mean(task.predict(partial(functional_call, module, {**p, **given}), x), y)

            found = grad(loss)({e.name: e.view(v) for e in moving}).values()
            # One concatenation compiles to faster code than writing into views of the vector.
            return torch.cat([(g.permute(0, 2, 3, 1) if g.ndim == 4 else g).reshape(-1) for g in found])

        def into(v: Tensor, x: Tensor, y: Tensor, last: Tensor, *constants: Tensor) -> tuple[()]:
            g = gradient(v, x, y, constants)
            if self.kind == "step":
                v[low:high].sub_(last * g)
            else:
                last.copy_(g)
            return ()

        return make_fx(into, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _kind(algorithm: Algorithm) -> Kind:
    return "step" if is_plain_sgd(algorithm) else "gradient"


def _frequent_batch(federation: Federation, batch: int) -> tuple[Tensor, Tensor]:
    """Return a batch of the size that most steps have; a client with fewer samples has a batch of all of them."""
    sizes = federation.train.lengths
    size = int(np.bincount(np.minimum(sizes, batch), np.where(sizes > 0, np.maximum(sizes // batch, 1), 0)).argmax())
    largest = federation.train[int(sizes.argmax())]
    return federation.gather(torch.from_numpy(largest[:size]))


def _constants(task: Task) -> tuple[list[str], list[Tensor]]:
    """Return the names and values of frozen parameters and buffers, which are inputs of the step."""
    moving = {entry.name for entry in task.space.entries}
    named = [(name, p.detach()) for name, p in task.module.named_parameters() if name not in moving]
    named += list(task.module.named_buffers())
    return [name for name, _ in named], [t for _, t in named]


def _parts(algorithm: Algorithm, start: Start) -> list[Part]:
    """Return the parts that the algorithm trains by the loss alone, found by calling its hooks once."""
    probe = _PartProbe(start)
    algorithm.local_update(algorithm.init_client(start), algorithm.broadcast(algorithm.init_server(start), 0), probe)
    return [part for part in probe.parts if len(start.w0[start.space.part(part)])]


class _PartProbe(ShapeProbe):
    """Local data that train nothing, and record which parts would be trained."""

    def __init__(self, start: Start):
        super().__init__(start)
        self.parts: dict[Any, None] = {}

    def descend(self, start: Tensor, **options: Any) -> Tensor:
        part = options.get("part", "all")
        if options.get("term") is None and isinstance(part, str):
            self.parts[part] = None
        return super().descend(start, **options)

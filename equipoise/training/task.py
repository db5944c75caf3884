"""The learning task: a module with its loss and metric, and what is known about the module."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.own_modules import OwnTensor, with_own_modules
from equipoise.equilibrium import Solves, WarmStart, auxiliary_layers, auxiliary_loss, layers, projected
from equipoise.errors import EquipoiseError
from equipoise.losses import fitting_loss
from equipoise.metrics import AnyMetric, MetricLike, fitting_metrics
from equipoise.parameter_space import ParameterSpace, Selection, selectors
from equipoise.representations.points import RepresentationPoint
from equipoise.torch_device import CPU, forked_random, is_accelerator
from equipoise.training.buffers import BufferLayout, load_buffers, read_buffers
from equipoise.training.memory_usage import peak_tensor_bytes
from equipoise.training.model_probe import find_point, probe_model
from equipoise.training.replica import Replica, draws_random_numbers

# Layers whose operators are small enough that training many clients in one batched call is faster, as long as
# parameters times rows per sample are few; benchmarks/modes.py compares the two modes on both sides of the limit.
_SMALL = (nn.Linear, nn.LayerNorm, nn.Embedding, OwnTensor)
_SMALL_WORK = 250_000
_DEFAULT_SAMPLES = 512  # samples of a client whose number of samples is unknown


def has_head(module: nn.Module) -> bool:
    """Tell whether there is something to train in a submodule named `head`."""
    return any(p.requires_grad and f"{name}.".startswith("head.") for name, p in module.named_parameters())


class Task:
    """A module with its loss and metric, and its parameters as one vector (see `ParameterSpace`)."""

    def __init__(
        self,
        module: nn.Module,
        sample: tuple[Tensor, Tensor],
        *,
        head: Selection | None = "head",
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross-entropy",
        metric: MetricLike | Sequence[MetricLike] | None = None,
        dtype: torch.dtype = torch.float32,
        mixed: bool = False,
        device: torch.device = CPU,
    ):
        """Create a task, and run the module on the sample once to find out what it does.

        Args:
            module: the model to train.
            sample: a few samples (x, y), which show what inputs and targets look like.
            head: name of the submodule that is the head, or any parameters, selected as in `ParameterSpace.mask`.
            loss: "cross-entropy", "squared", "pinball", a `Pinball`, or a function (output, target) that returns the
                mean over the batch or one value per sample.
            metric: a metric or several, each a name, a `Metric` or a function (outputs, targets); by default the one
                that belongs to the loss.
            dtype: number format of parameters and inputs.
            mixed: whether the module runs under autocast, with bfloat16 where torch chooses it.
            device: where the model is trained.
        """
        self._given: dict[str, Any] = {"loss": loss, "metric": metric, "dtype": dtype, "mixed": mixed, "device": device}
        if head is None or (head == "head" and not has_head(module)):
            head = ()
        self.module = copy.deepcopy(module).to(device, dtype)
        for _, layer in layers(self.module):
            layer.quiet = True  # in a run, the engine reads the statistics of solves and warns
        self.dtype, self.mixed, self.device = dtype, mixed, device
        if mixed and any(layers(self.module)):
            raise EquipoiseError(
                "engine.precision = 'bf16-mixed' is too coarse for the solves of equilibrium layers; use 'float32'"
            )
        self.space = ParameterSpace(module, head, device)
        named = selectors(head, "head")
        self.head = str(named[0]) if len(named) == 1 and named[0] in dict(module.named_modules()) else None
        "name of the submodule that is the head, if it is exactly one"
        if self.space.size == 0:
            raise EquipoiseError("the model has no parameters to train")
        self.w0 = self.space.vector(module, dtype).to(device)
        self.channels_last = any(isinstance(m, nn.Conv2d) for m in module.modules())
        sample = (sample[0].to(device), sample[1].to(device))
        self.sample = sample
        replica = Replica(self.module, self.space, self.w0, self.head)
        probe = probe_model(replica, self.module, sample[0])
        self.unseeded, self.rows = probe.unseeded, probe.rows
        self.fixed_point_shapes = probe.fixed_point_shapes
        self.set_buffers(probe.buffer_names)
        self.smallest_batch = probe.smallest_batch
        self.outputs = probe.output.shape[-1]
        self.loss = fitting_loss(loss, probe.output, sample[1])
        self.metrics = fitting_metrics(metric, loss, probe.output.detach(), sample[1], self.loss.pinball)
        self.outputs_per_sample = probe.output[0].numel()

    def with_own_modules(self, algorithm: Algorithm, seed: int) -> "Task":
        """Return the task with the algorithm's own modules in the model, if it has any; this task if not.

        Args:
            algorithm: the algorithm.
            seed: seed of the run, which determines the initial values.
        """
        module = with_own_modules(self.module, self.head, algorithm, seed, self.space.described_head())
        return self if module is self.module else Task(module, self.sample, head=self.head, **self._given)

    def set_buffers(self, names: Sequence[str]) -> None:
        """Set which buffers training changes; found by a trial, which may not show it without real samples."""
        self.buffer_names = tuple(names)
        self.buffers = read_buffers(self.module, self.buffer_names, self.w0)
        self.buffer_layout = BufferLayout(self.module, self.buffer_names, self.device)

    @property
    def metric(self) -> AnyMetric:
        """Return the first metric, which decides what is better."""
        return self.metrics.first

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Task({type(self.module).__name__}, {self.space.size} parameters, {self.metric.name}, {dtype})"

    def replica(self) -> Replica:
        """Return a copy of the module for one thread."""
        return Replica(self.module, self.space, self.w0, self.head, self.unseeded, self.buffer_names)

    def predict(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a module on inputs in the task's precision; outputs are in the number format of the parameters."""
        if not self.mixed:
            return module(x)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            output = module(x)
        return output.to(self.dtype)

    def batch_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch; a model that draws several times in training has several rows per sample."""
        times = len(output) // len(y)
        return self.loss.mean(output, y if times == 1 else y.repeat(times, *[1] * (y.ndim - 1)))

    def start(self, clients: int, samples: int = 0, seed: int = 0) -> Start:
        """Return what is known before the first round of a run.

        Args:
            clients: number of clients that train.
            samples: number of training samples of all clients together.
            seed: seed of the run.
        """
        return Start(self.space, self.w0, clients, samples, seed, self.outputs, self.point)

    @cached_property
    def why_not_stacked(self) -> str | None:
        """Return why a stack of clients cannot be trained in one call, or None if it can."""
        if (why := self.why_not_in_rows) is not None:
            return why
        if self.loss.each is None:
            return "the loss gives only a mean over the batch, not one value per sample"
        views = self.space.views(self.w0.expand(2, -1).contiguous())
        try:
            with torch.no_grad():
                vmap(lambda p, x: functional_call(self.module, p, (x,)))(views, torch.stack([self.sample[0]] * 2))
        except RuntimeError as error:
            return f"the model cannot be batched over clients ({str(error).splitlines()[0]})"
        return None

    @property
    def why_not_in_rows(self) -> str | None:
        """Return why several models, or a model on single samples, cannot be run in one call, as far as layers tell."""
        if any(layers(self.module)):
            return "the model has equilibrium layers, whose solves end at different times"
        if projected(self.module):
            return "the model's weights are projected after every step, one client at a time"
        if auxiliary_layers(self.module):
            return "the model has layers with auxiliary losses, which are computed for one client at a time"
        if self.buffer_names:
            return "the model has buffers (BatchNorm statistics), which differ by client"
        if self.unseeded or any(map(draws_random_numbers, self.module.modules())):
            return "the model draws random numbers (dropout) in training"
        return None

    @cached_property
    def _points(self) -> dict[str, RepresentationPoint]:
        return {}

    def point(self, name: str) -> RepresentationPoint:
        """Return the representation point after the submodule `name`, or before the head."""
        if name not in self._points:
            self._points[name] = find_point(self.module, self.space, self.w0, self.sample[0][:2], self.head, name)
        return self._points[name]

    @property
    def why_not_twice(self) -> str | None:
        """Return what makes a batch's gradients at two vectors incomparable, or None if nothing does.

        Variance reduction needs both gradients to be of the same function.
        """
        if self.buffer_names:
            return "BatchNorm"
        if self.unseeded or any(map(draws_random_numbers, self.module.modules())):
            return "dropout"
        return "equilibrium layers" if any(layers(self.module)) else None

    def mode(self) -> str:
        """Return the execution mode that `auto` selects: stacked if every operator is small, else threads.

        An operator is small if its layer is of certain kinds and parameters times rows per sample are few. A sample has
        several rows if it is a text, one per character. On an accelerator, every model that can be is stacked.
        """
        if is_accelerator(self.device):  # a call costs the same for few numbers as for many
            return "stacked" if self.why_not_stacked is None else "threads"
        small = all(
            isinstance(m, _SMALL) for m in self.module.modules() if next(m.parameters(recurse=False), None) is not None
        )
        if small and self.space.size * self.rows <= _SMALL_WORK and self.why_not_stacked is None:
            return "stacked"
        return "threads"

    @torch.no_grad()
    def check_symbols(self, x: Tensor) -> None:
        """Raise an error if the model cannot handle all symbols in the data.

        In a stack, an embedding would otherwise read rows of another client.
        """
        flat = x.flatten(1)
        rows = torch.stack([flat.amin(1).argmin(), flat.amax(1).argmax()])
        try:
            copy.deepcopy(self.module).eval()(x[rows].to(self.device))
        except Exception as error:
            raise EquipoiseError(
                f"the model does not take the inputs {int(x.min())} to {int(x.max())} that are in the data: {error}"
            ) from None

    @property
    def keeps(self) -> bool:
        """Tell whether the model has buffers or fixed points that a client keeps from round to round."""
        return bool(len(self.buffers) or self.fixed_point_shapes)

    def fixed_points(self, samples: int) -> dict[str, Tensor]:
        """Return blank tables of fixed points for this many samples; no tables if the model keeps none."""
        return {k: torch.zeros(samples, *shape, dtype=t) for k, (shape, t) in self.fixed_point_shapes.items()}

    def judge(self, clients: Iterable[dict[str, Solves]]) -> tuple[Solves, str | None]:
        """Return the solves of several clients together, and a complaint about the worst layer, if there is one."""
        total = Solves()
        by_layer: dict[str, Solves] = {}
        for client in clients:
            for name, solves in client.items():
                by_layer.setdefault(name, Solves()).add(solves)
                total.add(solves)
        complaints = []
        for name, layer in layers(self.module):
            if name in by_layer:
                complaints += layer.complaints(by_layer[name])
        return total, max(complaints, key=lambda found: found[0])[1] if complaints else None

    def judge_reported(self, solves: Solves) -> tuple[Solves, str | None]:
        """Return solves that clients have reported, and a complaint, if there is one.

        Reports do not tell which unconverged solves were intended; where some may be, none is complained of.
        """
        found = list(layers(self.module))
        ways = {"forward": solves.forward, "backward": solves.backward}
        for way, stats in ways.items():
            if any(layer.may_stop_unconverged(way) for _, layer in found):
                ways[way] = replace(stats, intended=stats.unconverged)
        share = max(stats.unexpected for stats in ways.values())
        text = f"{share:.0%} of the solves of equilibrium layers did not converge; see the clients' logs"
        return Solves(**ways), text if share else None

    @cached_property
    def _step_bytes(self) -> dict[tuple[int, int], int]:
        return {}

    def step_bytes(self, batch: int, samples: int | None = None) -> int:
        """Return the peak size in bytes of the tensors in a training step.

        Parameters, gradients, what the backward pass needs, and the fixed points that warm starts remember count.

        Args:
            batch: batch size.
            samples: number of training samples of the client, if it is known.
        """
        samples = samples or min(batch, _DEFAULT_SAMPLES)
        batch = min(batch, samples)
        if (batch, samples) not in self._step_bytes:
            x, y = (t[:1].expand(batch, *t.shape[1:]).contiguous() for t in self.sample)

            def step() -> object:
                module = copy.deepcopy(self.module).train()
                for _, layer in layers(module):
                    layer.options = layer.options.model_copy(update={"jacobian_probability": 1.0})
                warm = WarmStart(module, samples)
                with warm.at(torch.arange(batch)):
                    loss = self.batch_loss(module(x), y)
                    auxiliary = auxiliary_loss(module)
                    (loss if auxiliary is None else loss + auxiliary).backward()
                return module, warm

            with forked_random(self.device), torch.enable_grad():
                self._step_bytes[batch, samples] = peak_tensor_bytes(step)
        return self._step_bytes[batch, samples]

    def to_module(self, vector: Tensor, buffers: Tensor | None = None, device: torch.device = CPU) -> nn.Module:
        """Return a module with these parameters and buffers.

        Args:
            vector: the parameters.
            buffers: the buffers; by default those of the initial model.
            device: where the module is to be.
        """
        buffers = self.buffers if buffers is None else buffers
        return build_module(self.module, self.space, vector.to(device), self.buffer_names, buffers)


def build_module(
    template: nn.Module, space: ParameterSpace, vector: Tensor, buffer_names: Sequence[str], buffers: Tensor
) -> nn.Module:
    """Return a copy of a module with other parameters and buffers.

    Args:
        template: the module.
        space: the layout of its parameters.
        vector: the parameters.
        buffer_names: names of the buffers that change.
        buffers: the values of these buffers.
    """
    module = space.module(template, vector)
    for _, layer in layers(module):
        layer.quiet = False
    load_buffers(module, buffer_names, buffers)
    return module

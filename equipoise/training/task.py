"""What is learned: a module, its loss and its metric, and what the module can be asked to do."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equipoise.algorithms.local_data import Start
from equipoise.data.federation import BatchBuffer
from equipoise.equilibrium import Solves, WarmStart, layers, projected, set_budget
from equipoise.errors import EquipoiseError
from equipoise.losses import Metric, fitting_loss, fitting_metric
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import HEAD, ForwardHook, RepresentationPoint
from equipoise.settings import nearest
from equipoise.training.memory_usage import peak_tensor_bytes

# Layers whose operators are small enough that many clients are better worked on in one batched call, as long as
# parameters times rows a sample are few; benchmarks/modes.py compares the two modes on both sides of the limit.
_SMALL = (nn.Linear, nn.LayerNorm, nn.Embedding)
_SMALL_WORK = 250_000
_UNKNOWN = 512  # samples of a client of which nothing is known


class Task:
    """A module with its loss and metric, laid out in a `ParameterSpace`.

    `loss` is "cross-entropy", "squared", or a function (output, target) -> mean over the batch or one
    value a sample. `metric` is "accuracy", "rmse", "mse" or a `Metric`.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: tuple[Tensor, Tensor],
        *,
        head: str | Sequence[str] | None = "head",
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross-entropy",
        metric: str | Metric | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        if head == "head" and not hasattr(module, "head"):
            head = None
        self.module = copy.deepcopy(module).to(dtype)
        for _, layer in layers(self.module):
            layer.quiet = True  # in a run, the engine reads what its solves came to, and says so
        self.dtype = dtype
        self.space = ParameterSpace(module, head)
        self.head = head if isinstance(head, str) and head in dict(module.named_modules()) else None
        "the name of the submodule that is the head, where it is one"
        if self.space.size == 0:
            raise EquipoiseError("the model has no parameters to train")
        self.w0 = self.space.vector(module, dtype)
        self.channels_last = any(isinstance(m, nn.Conv2d) for m in module.modules())
        self.unseeded = False
        self.rows = 1
        "as how many rows a sample goes through the linear layers: as one, or as one a position"
        self.buffer_names: tuple[str, ...] = ()
        self.fixed_point_shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        "what is kept with a client's state for each of its samples, where a layer's warm start asks for it"
        self.sample = sample
        output = self._probe(sample[0])
        self.buffers = read_buffers(self.module, self.buffer_names, dtype)
        self.outputs = output.shape[-1]
        self.loss = fitting_loss(loss, output, sample[1])
        self.metric = fitting_metric(metric, loss, output, sample[1])

    def _probe(self, x: Tensor) -> Tensor:
        """What the model makes of a few samples; on the way it shows what else it does when it is trained."""
        replica = Replica(self)
        replica.seed(0)

        def count_rows(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.rows = max(self.rows, output.shape[:-1].numel() // len(x))

        for layer in replica.module.modules():
            if type(layer) is nn.Linear:
                layer.register_forward_hook(count_rows)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.random.get_rng_state()
            try:
                warm = WarmStart(replica.module, len(x))
                with warm.at(torch.arange(len(x))):
                    replica.module.train()(x)
                self.fixed_point_shapes = {k: (t.shape[1:], t.dtype) for k, t in warm.tensors("client").items()}
                moved = dict(replica.module.named_buffers())
                output: Tensor = replica.module.eval()(x)
            except EquipoiseError:
                raise
            except Exception as error:
                raise EquipoiseError(f"the model does not take inputs of shape {tuple(x.shape[1:])}: {error}") from None
            # Random numbers that come from nowhere we know can be seeded only one client at a time.
            self.unseeded = not torch.equal(before, torch.random.get_rng_state())
        # Buffers that training moves (BatchNorm statistics) belong to a client; constants (masks) to all.
        still = dict(self.module.named_buffers())
        self.buffer_names = tuple(n for n, b in moved.items() if not torch.equal(b, still[n]))
        return output

    def start(self, clients: int, samples: int = 0, seed: int = 0) -> Start:
        """What is known before the first round of a run with so many clients and training samples."""
        return Start(self.space, self.w0, clients, samples, seed, self.outputs, self.point)

    @cached_property
    def why_not_stacked(self) -> str | None:
        """What keeps a stack of clients from being trained in one call, or None if nothing does."""
        if any(layers(self.module)):
            return "the model has equilibrium layers, whose solves end at different times"
        if projected(self.module):
            return "the model's weights are projected after every step, one client at a time"
        if self.buffer_names:
            return "the model has buffers (BatchNorm statistics), which differ by client"
        if self.unseeded or any(map(_draws, self.module.modules())):
            return "the model draws random numbers (dropout) in training"
        if self.loss.each is None:
            return "the loss gives only a mean over the batch, not one value a sample"
        views = self.space.views(self.w0.expand(2, -1).contiguous())
        try:
            with torch.no_grad():
                vmap(lambda p, x: functional_call(self.module, p, (x,)))(views, torch.stack([self.sample[0]] * 2))
        except RuntimeError as error:
            return f"the model cannot be batched over clients ({str(error).splitlines()[0]})"
        return None

    @cached_property
    def _points(self) -> dict[str, RepresentationPoint]:
        return {}

    def point(self, name: str) -> RepresentationPoint:
        """The place after the submodule of this name, or before the head, and which parameters lead there."""
        if name not in self._points:
            self._points[name] = self._find_point(name)
        return self._points[name]

    def _find_point(self, name: str) -> RepresentationPoint:
        module = copy.deepcopy(self.module).eval()
        if name == HEAD and self.head is None:
            raise EquipoiseError("representations are what the model's head reads; name the submodule that is the head")
        if name != HEAD and name not in (names := dict(module.named_modules())):
            raise EquipoiseError(f"the model has no submodule {name!r}{nearest(name, filter(None, names))}")
        if any(name.startswith(f"{place}.") for place, _ in layers(module)):
            raise EquipoiseError(f"{name!r} lies within an equilibrium layer, which is one place as a whole")
        parameters = {k: t.detach().clone().requires_grad_() for k, t in self.space.views(self.w0).items()}
        listener = ForwardHook(module, (name,), self.head)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            functional_call(module, parameters, (self.sample[0][:2],))
            if listener.silent():
                raise EquipoiseError(f"the model never calls its submodule {name!r}, so it has no output")
            (h,) = listener.take()
            given = list(parameters.values())
            found = torch.autograd.grad(h.sum(), given, allow_unused=True) if h.requires_grad else (None,) * len(given)
        reach = torch.zeros(self.space.size, dtype=torch.bool)
        for entry, gradient in zip(self.space.entries, found, strict=True):
            reach[entry.offset : entry.end] = gradient is not None
        return RepresentationPoint(name, h.shape[1], reach)

    @property
    def why_not_twice(self) -> str | None:
        """What keeps the gradient of a batch from being taken at two vectors alike, or None if nothing does."""
        if self.buffer_names:
            return "BatchNorm"
        if self.unseeded or any(map(_draws, self.module.modules())):
            return "dropout"
        return "equilibrium layers" if any(layers(self.module)) else None

    def mode(self) -> str:
        """The fixed rule of `auto`: stacked where every operator is small, threads elsewhere.

        Small are layers of certain kinds with few parameters; where a sample is many rows (a text, a row a character),
        they must be fewer by as much.
        """
        small = all(
            isinstance(m, _SMALL) for m in self.module.modules() if next(m.parameters(recurse=False), None) is not None
        )
        if small and self.space.size * self.rows <= _SMALL_WORK and self.why_not_stacked is None:
            return "stacked"
        return "threads"

    @torch.no_grad()
    def check_symbols(self, x: Tensor) -> None:
        """Does the model know all symbols there are? Stacked, an embedding would read another client's rows instead."""
        flat = x.flatten(1)
        rows = torch.stack([flat.amin(1).argmin(), flat.amax(1).argmax()])
        try:
            copy.deepcopy(self.module).eval()(x[rows])
        except Exception as error:
            raise EquipoiseError(
                f"the model does not take the inputs {int(x.min())} to {int(x.max())} that are in the data: {error}"
            ) from None

    @property
    def keeps(self) -> bool:
        """Is there anything of the model's that stays with a client from round to round?"""
        return bool(len(self.buffers) or self.fixed_point_shapes)

    def fixed_points(self, samples: int) -> dict[str, Tensor]:
        """Tables for as many samples, of which nothing is known yet; empty where none are to be kept."""
        return {k: torch.zeros(samples, *shape, dtype=t) for k, (shape, t) in self.fixed_point_shapes.items()}

    def judge(self, clients: Iterable[dict[str, Solves]]) -> tuple[Solves, str | None]:
        """The solves of several clients together, and what is wrong with the worst of the layers, if anything is."""
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

    @cached_property
    def _step_bytes(self) -> dict[tuple[int, int], int]:
        return {}

    def step_bytes(self, batch: int, samples: int | None = None) -> int:
        """The most bytes of tensors in a step of a client with so many samples.

        These are parameters, gradients, what backward needs, and the fixed points that warm starts remember.
        """
        samples = samples or min(batch, _UNKNOWN)
        batch = min(batch, samples)
        if (batch, samples) not in self._step_bytes:
            x, y = (t[:1].expand(batch, *t.shape[1:]).contiguous() for t in self.sample)

            def step() -> object:
                module = copy.deepcopy(self.module).train()
                warm = WarmStart(module, samples)
                with warm.at(torch.arange(batch)):
                    self.loss.mean(module(x), y).backward()
                return module, warm

            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                self._step_bytes[batch, samples] = peak_tensor_bytes(step)
        return self._step_bytes[batch, samples]

    def to_module(self, vector: Tensor, buffers: Tensor | None = None) -> nn.Module:
        module = self.space.module(self.module, vector)
        for _, layer in layers(module):
            layer.quiet = False
        load_buffers(module, self.buffer_names, self.buffers if buffers is None else buffers)
        return module


def load_buffers(module: nn.Module, names: Sequence[str], vector: Tensor) -> None:
    offset, buffers = 0, dict(module.named_buffers())
    for name in names:
        size = buffers[name].numel()
        buffers[name].copy_(vector[offset : offset + size].view(buffers[name].shape))
        offset += size


def read_buffers(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    buffers = dict(module.named_buffers())
    return torch.cat([torch.empty(0, dtype=dtype), *(buffers[name].detach().flatten().to(dtype) for name in names)])


def _draws(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.dropout._DropoutNd) or getattr(layer, "draws", False)


_SEEDED_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Replica:
    """A copy of the module whose parameters are views of one vector; one a thread."""

    def __init__(self, task: Task):
        self.module = copy.deepcopy(task.module)
        self.vector = task.w0.clone()
        task.space.bind(self.module, self.vector)
        named = dict(self.module.named_parameters())
        self.parameters = [named[entry.name] for entry in task.space.entries]
        self.memory = BatchBuffer()
        self.listeners: dict[tuple[str, ...], ForwardHook] = {}
        self.head = task.head
        self.equilibria = dict(layers(self.module))
        self.projected = projected(self.module)
        self.unseeded, self.buffer_names = task.unseeded, task.buffer_names
        self.random = torch.Generator()
        for layer in self.module.modules():
            if type(layer) in _SEEDED_DROPOUT:
                layer.forward = self._dropout(layer)
            elif getattr(layer, "draws", False):  # a layer of ours, which asks where its numbers come from
                layer.generator = self.random  # type: ignore[assignment]

    def _dropout(self, layer: Any) -> Callable[[Tensor], Tensor]:
        whole_channels = not isinstance(layer, nn.Dropout)

        def forward(x: Tensor) -> Tensor:
            if not layer.training or layer.p == 0:
                return x
            shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if whole_channels else x.shape
            keep = torch.empty(shape, dtype=x.dtype).bernoulli_(1 - layer.p, generator=self.random)
            dropped: Tensor = x * keep / max(1 - layer.p, torch.finfo(x.dtype).tiny)
            return dropped

        return forward

    def listener(self, names: tuple[str, ...]) -> ForwardHook:
        """What the module says at these places; it is there from now on."""
        if names not in self.listeners:
            self.listeners[names] = ForwardHook(self.module, names, self.head)
        return self.listeners[names]

    def seed(self, key: int) -> None:
        """Make dropout, and whatever else draws from torch's global stream, depend on `key` alone."""
        self.random.manual_seed(key % 2**63)
        if self.unseeded:
            torch.manual_seed(key % 2**63)

    def set_budget(self, iterations: int | None) -> None:
        """Most iterations of a solve from now on; None: as the layers say."""
        if self.equilibria:
            set_budget(self.module, iterations)

    @property
    def iterations(self) -> int:
        """Most iterations of a solve, as things stand; 1 where there are no equilibrium layers."""
        return max((layer.limit for layer in self.equilibria.values()), default=1)

    def forget_solves(self) -> None:
        for layer in self.equilibria.values():
            layer.solves = Solves()

    def solves(self) -> dict[str, Solves]:
        """What each equilibrium layer's solves came to since they were last forgotten, by its place."""
        return {name: layer.solves for name, layer in self.equilibria.items()}

    def load_buffers(self, vector: Tensor) -> None:
        load_buffers(self.module, self.buffer_names, vector)

    def read_buffers(self) -> Tensor:
        return read_buffers(self.module, self.buffer_names, self.vector.dtype)

"""The gradient of a whole stack of clients, traced once into a plain list of tensor operations."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.executors.traced_graph import TRACED_RATE, TracedGraph, make_rate_an_input, simplify
from equipoise.optimizers import Rate, move
from equipoise.parameter_space import ParameterEntry, Part
from equipoise.representations.points import ForwardHook
from equipoise.representations.terms import BatchTerm, LossTerm
from equipoise.state import State
from equipoise.torch_device import is_accelerator
from equipoise.training.batches import Batch
from equipoise.training.task import Task

_NARROW = 32


def _narrow_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a forward function that computes x W' as (W x')': batched, this is several times faster on a CPU."""

    def forward(x: Tensor) -> Tensor:
        if x.ndim != 2 or layer.bias is None:
            return nn.functional.linear(x, layer.weight, layer.bias)
        return (layer.weight @ x.t() + layer.bias[:, None]).t()

    return forward


class StackedModule:
    """A model of a stack of clients, whose gradient is traced once per shape of the batches, for all threads."""

    def __init__(self, task: Task, compiled: bool = False):
        self.task, self.compiled = task, compiled
        self.module = copy.deepcopy(task.module)
        for layer in self.module.modules():
            if type(layer) is nn.Linear and layer.out_features <= _NARROW and not is_accelerator(task.device):
                layer.forward = _narrow_linear(layer)  # type: ignore[method-assign,assignment]
        self.module.train()
        self.traced: dict[tuple[object, ...], Callable[..., Tensor]] = {}
        self.lock = threading.Lock()

    def gradient(self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None, term_only: bool) -> Tensor:
        """Return the gradients of the trained part of v as one (cohort, P) tensor; see `LocalTrainer.gradient`."""

        def flat(v: Tensor, *rest: Tensor) -> Tensor:
            found = self._each(v, *rest, part=part, term=term, term_only=term_only)
            pieces = [g.permute(0, 1, 3, 4, 2) if g.ndim == 5 else g for _, g in found]
            return torch.cat([piece.reshape(len(v), -1) for piece in pieces], dim=1)

        return self._call(("gradient", part, term_only), flat, v, batch, term)

    def step(self, v: Tensor, batch: Batch, part: Part, lr: Rate, term: LossTerm | None) -> None:
        """Take a step of plain SGD in place, without assembling the gradient into one tensor first.

        The rate is an input of the traced step, so that a step with another rate needs no new trace.
        """
        if self.compiled and not isinstance(lr, Tensor):  # a number would be compiled into the step
            lr = v.new_full((len(v), 1), lr)

        def into(v: Tensor, *rest: Tensor) -> Tensor:
            rate: Rate = TRACED_RATE
            if isinstance(lr, Tensor):
                rate, rest = rest[-1], rest[:-1]
            for entry, g in self._each(v, *rest, part=part, term=term, term_only=False):
                per_client = rate.view(-1, *(1 for _ in entry.shape)) if isinstance(rate, Tensor) else rate
                move(entry.view(v), g, per_client)
            return v

        self._call(("step", part, isinstance(lr, Tensor)), into, v, batch, term, lr)

    def _each(
        self,
        v: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        *term_tensors: Tensor,
        part: Part,
        term: LossTerm | None,
        term_only: bool,
    ) -> list[tuple[ParameterEntry, Tensor]]:
        """Return the gradient of each trained parameter.

        The tensors of the term are the arguments `term_tensors`, because a trace must not keep those that it was made
        with.
        """
        space, each = self.task.space, self.task.loss.each
        low, high, _ = space.part(part).indices(space.size)
        moving = [e for e in space.entries if low <= e.offset < high]
        still = [e for e in space.entries if not low <= e.offset < high]
        assert each is not None
        hook = None if term is None else ForwardHook(self.module, term.at, self.task.head)

        def value(output: Tensor, x: Tensor, y: Tensor, weights: Tensor, term_tensors: tuple[Tensor, ...]) -> Tensor:
            """Return the loss of each sample with the term, whose probes run in the same pass.

            With a term of the whole batch, it is one number for the batch.
            """
            if term is None or hook is None:
                return each(output, y)
            h = hook.take()
            probed: tuple[Tensor, ...] = ()
            for probe in term_tensors[: len(term.probes)]:
                self.task.predict(partial(functional_call, self.module, space.views(probe)), x)
                probed += hook.take()
            given = State(zip(term.given, term_tensors[len(term.probes) :], strict=True))
            if isinstance(term, BatchTerm):
                whole = term.whole(h, probed, y, weights, given)
                return whole if term_only else whole + (weights * each(output, y)).sum()
            found = term.each(h, probed, y, given)
            return found if term_only else found + each(output, y)

        def gradient(
            p: dict[str, Tensor],
            fixed: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
            weights: Tensor,
            term_tensors: tuple[Tensor, ...],
        ) -> dict[str, Tensor]:
            """Return the gradient of the weighted sum of the samples' losses, in fewer operations than `grad` does."""

            def values(p: dict[str, Tensor]) -> Tensor:
                output = self.task.predict(partial(functional_call, self.module, {**p, **fixed}), x)
                return value(output, x, y, weights, term_tensors).to(weights.dtype)

            of_batch = isinstance(term, BatchTerm)
            found: dict[str, Tensor] = vjp(values, p)[1](torch.ones_like(weights[0]) if of_batch else weights)[0]
            return found

        p, fixed = ({e.name: e.view(v) for e in entries} for entries in (moving, still))
        try:
            gradients = vmap(gradient)(p, fixed, x, y, weights, term_tensors)
        finally:
            if hook is not None:
                hook.close()
        return [(e, gradients[e.name]) for e in moving]

    def _call(
        self,
        what: tuple[object, ...],
        function: Callable[..., Tensor],
        v: Tensor,
        batch: Batch,
        term: LossTerm | None,
        lr: Rate | None = None,
    ) -> Tensor:
        x, y, weights = batch[:3]
        term_tensors: list[Tensor] = []
        if term is not None:
            term_tensors = [t[: len(v)] for t in (*term.probes, *term.given.values())]
            what = (*what, type(term), term.at, len(term.probes), tuple(term.given), *(t.shape for t in term_tensors))
        key = (*what, x.shape, y.shape, v.dtype)
        given = (v, x, y, weights, *term_tensors, *([] if lr is None else [lr]))
        if key not in self.traced:
            with self.lock:  # tracing changes the module, and settings of torch that all threads share
                if key not in self.traced:
                    self.traced[key] = self._trace(function, given)
        return self.traced[key](*given)

    def _trace(self, function: Callable[..., Tensor], given: tuple[Any, ...]) -> Callable[..., Tensor]:
        """Return a plain list of operations that does what the function does with arguments of these shapes."""
        v, *rest = (argument for argument in given if isinstance(argument, Tensor))
        graph = make_fx(function)(v.clone(), *rest)
        if isinstance(given[-1], float):
            make_rate_an_input(graph)
        simplify(graph)
        if not self.compiled:
            return TracedGraph(graph)
        compiled: Callable[..., Tensor] = torch._inductor.compile(graph, [v, *rest])
        return compiled

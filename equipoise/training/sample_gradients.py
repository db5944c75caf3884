"""Sums of single samples' clipped gradients, for one model or a stack of models."""

import copy
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equipoise.errors import EquipoiseError
from equipoise.parameter_space import Part
from equipoise.representations.points import ForwardHook
from equipoise.representations.terms import LossTerm
from equipoise.state import State
from equipoise.training.task import Task

_CHUNK_BYTES = 64 << 20  # of the gradients of single samples that are in memory at once
_SLACK = 32  # rounding errors of a norm, in units of the number format's precision


class SampleGradients:
    """Computes the gradient of every single sample of a batch, and clips it; used by one thread at a time."""

    def __init__(self, task: Task):
        self.task = task

    @cached_property
    def module(self) -> nn.Module:
        """Return the module that is run; it is made when it is first needed."""
        return copy.deepcopy(self.task.module).train()

    def clipped_sum(
        self,
        v: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Tensor,
        clip: float,
        part: Part = "all",
        mask: Tensor | None = None,
        term: LossTerm | None = None,
        term_only: bool = False,
    ) -> Tensor:
        """Return the sum of the samples' gradients in the trained part, each clipped to a norm.

        A sample whose gradient is not finite contributes nothing, as whether there is one depends on the data.

        Args:
            v: the model, (P,), or a stack of models, (cohort, P).
            x: inputs, one row per sample, after the axis of the stack if there is one.
            y: targets.
            counts: 1 for samples that count, 0 for padding.
            clip: the largest norm of a sample's gradient.
            part: the trained part of the vector.
            mask: multiplies each gradient, in the trained part, before it is clipped.
            term: a term that is added to each sample's loss.
            term_only: whether the gradient is that of the term alone.
        """
        samples = x.shape[v.ndim - 1]
        width = len(range(*self.task.space.part(part).indices(self.task.space.size)))
        total = v.new_zeros(*v.shape[:-1], width)
        tensors = () if term is None else (*([] if term.probe is None else [term.probe]), *term.given.values())
        hook = None if term is None else ForwardHook(self.module, term.at, self.task.head)
        one: Callable[..., Tensor] = partial(
            self._clipped_sum, clip=clip, part=part, term=term, term_only=term_only, hook=hook
        )
        if v.ndim > 1:
            one = vmap(one, in_dims=(0, 0, 0, 0, None if mask is None or mask.ndim == 1 else 0, 0))
            tensors = tuple(t[: len(v)] for t in tensors)
        chunk = max(1, _CHUNK_BYTES // max(1, total.nbytes))
        try:
            for first in range(0, samples, chunk):
                rows = (slice(None),) * (v.ndim - 1) + (slice(first, first + chunk),)
                total += one(v, x[rows], y[rows], counts[rows], mask, tensors)
        finally:
            if hook is not None:
                hook.close()
        return total

    def _clipped_sum(
        self,
        v: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Tensor,
        mask: Tensor | None,
        tensors: tuple[Tensor, ...],
        *,
        clip: float,
        part: Part,
        term: LossTerm | None,
        term_only: bool,
        hook: ForwardHook | None,
    ) -> Tensor:
        space = self.task.space
        low, high, _ = space.part(part).indices(space.size)
        moving = [e for e in space.entries if low <= e.offset < high]
        fixed = {e.name: e.view(v) for e in space.entries if not low <= e.offset < high}

        def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            x, y = x.unsqueeze(0), y.unsqueeze(0)
            output = self.task.predict(partial(functional_call, self.module, {**p, **fixed}), x)
            if term is None or hook is None:
                return self._loss(output, y)
            h = hook.take()
            probed: tuple[Tensor, ...] = ()
            if term.probe is not None:
                self.task.predict(partial(functional_call, self.module, space.views(tensors[0])), x)
                probed = hook.take()
            given = State(zip(term.given, tensors[term.probe is not None :], strict=True))
            found = term.each(h, probed, y, given)[0]
            return found if term_only else found + self._loss(output, y)

        found = vmap(grad(loss), in_dims=(None, 0, 0))({e.name: e.view(v) for e in moving}, x, y)
        pieces = [found[e.name] for e in moving]
        pieces = [g.permute(0, 1, 3, 4, 2) if g.ndim == 5 else g for g in pieces]
        gradients = torch.cat([g.reshape(len(g), -1) for g in pieces], dim=1)
        if mask is not None:
            gradients = gradients * mask
        return (clipped_rows(gradients, clip) * counts.unsqueeze(1).to(v.dtype)).sum(0)

    def _loss(self, output: Tensor, y: Tensor) -> Tensor:
        each = self.task.loss.each
        return self.task.loss.mean(output, y) if each is None else each(output, y)[0]


def clipped_rows(gradients: Tensor, clip: float) -> Tensor:
    """Return gradients, one per row, each scaled to at most a norm; a row that is not finite becomes zero."""
    norm = gradients.square().sum(1, keepdim=True).sqrt()
    shorter = clip / norm.clamp(min=clip) * (1 - _SLACK * torch.finfo(gradients.dtype).eps)
    factor = torch.where(norm <= clip, torch.ones_like(norm), shorter)
    return torch.where(norm.isfinite(), gradients * factor, torch.zeros_like(gradients))


def check_sample_gradients(task: Task) -> None:
    """Raise an error if a model has no gradients of single samples."""
    what = f"privacy.unit = 'sample' needs the gradient of every single sample, and {type(task.module).__name__}"
    if task.buffer_names or any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in task.module.modules()):
        raise EquipoiseError(f"{what} has BatchNorm, which mixes the samples of a batch; use a model with GroupNorm")
    if (why := task.why_not_in_rows) is not None:
        raise EquipoiseError(f"{what} has none: {why}")
    x, y = (t[:2] for t in task.sample)
    try:
        SampleGradients(task).clipped_sum(task.w0, x, y, torch.ones(len(x), device=x.device), 1.0)
    except (RuntimeError, ValueError, IndexError) as error:
        raise EquipoiseError(f"{what} has none: {str(error).splitlines()[0]}") from error

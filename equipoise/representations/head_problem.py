"""The problem that a linear head solves: the task's loss as a function of the head's matrix, on fixed features."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.losses import Loss
from equipoise.representations.head_features import HeadTargets
from equipoise.representations.head_moments import Moments
from equipoise.torch_device import widened

GroupOrder = Literal["auto", "interleaved", "blocks", "stratified"]
"""How samples are divided into groups: in turn, in blocks of consecutive ones, or those of each class in turn; "auto":
blocks if they are in the order of time, else in turn."""
Group = slice | Tensor
"""The samples in a group: every so many of a range, or their numbers."""


def groups_of(count: int, groups: int, blocks: bool) -> list[slice]:
    """Divide samples into groups.

    Args:
        count: number of samples.
        groups: number of groups.
        blocks: whether a group consists of consecutive samples; otherwise samples are assigned in turn.
    """
    if blocks:
        return [slice(count * g // groups, count * (g + 1) // groups) for g in range(groups)]
    return [slice(g, count, groups) for g in range(groups)]


def strata(y: Tensor, groups: int) -> list[Tensor]:
    """Divide samples into groups with equal shares of every class, as far as their numbers allow.

    Args:
        y: labels of the samples.
        groups: number of groups.
    """
    if y.is_floating_point() or y.ndim != 1:
        raise EquipoiseError("the algorithm divides samples class by class and needs data with one label per sample")
    by_class = y.argsort(stable=True)
    return [by_class[g::groups].sort().values for g in range(groups)]


@dataclass(frozen=True, eq=False)
class HeadSamples:
    """One client's samples as its head sees them."""

    features: Tensor
    "what the head reads, of shape (samples, inputs) or (samples, positions, inputs), with ones if it has a bias"
    y: Tensor
    "targets of the samples"
    count: int
    "number of samples; where it is 0, there is one that does not count, so that there is something to compute with"
    groups: Sequence[Group]
    "the samples in each group"
    output_shape: torch.Size
    "shape of the model's output for one sample"
    outputs: int
    "number of outputs of the head"
    purged: Sequence[Tensor] | None = None
    "indices of the samples outside of each group to which nothing may be fitted that is judged on it; None: none"

    def moments(self) -> Moments:
        """Return the second moments of each group of samples."""
        x, y = self.features[: self.count], self.y[: self.count]
        values = HeadTargets(y).values(y, self.outputs, x.dtype)
        return Moments.of(x, values.reshape(*x.shape[:-1], self.outputs), self.groups, self.purged)

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """Return features and targets of so many samples, with the first one again and again at the end."""
        if length == len(self.y):
            return self.features, self.y
        which = torch.arange(length, device=self.y.device)
        which = which.where(which < len(self.y), 0)
        return self.features[which], self.y[which]


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """The samples of a client, or of each client in a stack, and the task's loss of a head on them.

    A head is a matrix with one row per input. Several heads of a client have one more axis in front, and so have the
    clients of a stack. Samples have weights, of shape (..., heads, samples); the clients' samples are padded to equal
    numbers, and what is added belongs to no group.
    """

    clients: Sequence[HeadSamples]
    stacked: bool
    "whether results have an axis for the clients"
    loss: Loss

    @property
    def _axes(self) -> int:
        """Return the number of axes before that of the samples."""
        return int(self.stacked)

    def moments(self) -> Moments:
        """Return the second moments of each group of samples."""
        each = [client.moments() for client in self.clients]
        return Moments.stack(each) if self.stacked else each[0]

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        """Return features and targets, padded to the largest number of samples."""
        length = max(len(client.y) for client in self.clients)
        x, y = zip(*(client.padded(length) for client in self.clients), strict=True)
        return (torch.stack(x), torch.stack(y)) if self.stacked else (x[0], y[0])

    @cached_property
    def members(self) -> Tensor:
        """Return 1 where a sample is in a group and 0 elsewhere, of shape (..., groups, samples)."""
        return self._marked([client.groups for client in self.clients])

    @cached_property
    def purged(self) -> Tensor | None:
        """Return 1 where a sample is purged for a group and 0 elsewhere, likewise; None if none is anywhere."""
        purged = [client.purged for client in self.clients if client.purged is not None]
        return self._marked(purged) if purged else None

    def _marked(self, chosen: Sequence[Sequence[slice | Tensor]]) -> Tensor:
        """Return 1 at some samples of each client and group and 0 elsewhere."""
        x, y = self._samples
        marks = x.new_zeros(len(chosen), len(chosen[0]), y.shape[self._axes])
        for k, groups in enumerate(chosen):
            for g, group in enumerate(groups):
                marks[k, g, group] = 1
        return marks if self.stacked else marks[0]

    @property
    def _rows(self) -> Tensor:
        """Return the features with one row per point; a sample has one point, or one per position."""
        return self._samples[0].flatten(self._axes, -2)

    def losses(self, v: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the samples' losses, for each head.

        Args:
            v: the heads.
            weights: the weights of the samples. Of a loss that is known only as a mean over a batch, the weights of a
                head must be equal, or zero.
        """
        client, y = self.clients[0], self._samples[1]
        heads = v.shape[-3]
        every = self._rows @ v.movedim(-3, -2).flatten(-2)  # one product for all heads
        outputs = every.unflatten(-1, (heads, -1)).movedim(-2, -3).reshape(*weights.shape, *client.output_shape)
        if self.loss.each is None:
            return torch.stack([self._mean(o, w) for o, w in zip(outputs, weights, strict=True)])
        y = y.unsqueeze(self._axes).expand(*weights.shape, *y.shape[1 + self._axes :])
        each = self.loss.each(outputs.flatten(0, weights.ndim - 1), y.flatten(0, weights.ndim - 1))
        return (weights * each.view(weights.shape)).sum(-1)

    def _mean(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted loss of one head, from the mean over the samples that have a weight."""
        some = weights.nonzero().flatten()
        if not len(some):
            return 0 * outputs.sum()
        return weights.sum() * self.loss.mean(outputs[some], self._samples[1][some])

    def gradient(self, v: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of `losses` at v, as a function that can be differentiated where autograd records."""
        varies = v.requires_grad or any(client.features.requires_grad for client in self.clients)
        deep = torch.is_grad_enabled() and varies
        with torch.enable_grad():
            at = v if v.requires_grad and deep else v.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.losses(at, weights).sum(), at, create_graph=deep)
        return found

    def smoothness(self, weights: Tensor) -> Tensor:
        """Return a bound of the largest eigenvalue of the second derivatives of `losses`, of shape (..., heads, 1, 1).

        It is the largest eigenvalue of the weighted moments of the features, times the loss's own bound
        (`Loss.curvature`), which for a function of the user's is a guess.
        """
        rows, positions = self._rows.unsqueeze(-3), self._rows.shape[-2] // weights.shape[-1]
        weights = weights.repeat_interleave(positions, dim=-1).unsqueeze(-1) / positions
        moments = widened((weights * rows).mT @ rows)
        bound: Tensor = self.loss.curvature(self.clients[0].outputs) * largest_eigenvalue(moments)
        return bound.to(weights.dtype)


def largest_eigenvalue(symmetric: Tensor) -> Tensor:
    """Return the largest eigenvalue of each matrix, of shape (..., 1, 1); NaN for one that is not finite."""
    bad = ~symmetric.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    found: Tensor = torch.linalg.eigvalsh(symmetric.masked_fill(bad, 0))[..., -1:, None]
    return found.clamp(min=0).masked_fill(bad, torch.nan)

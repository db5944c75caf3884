"""The link between a client's network and the heads that cells fit: what they are fitted to, and what judges them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise.algorithms.learn2pfed.fits import (
    Fit,
    HeadFit,
    Judge,
    LossFit,
    LossJudge,
    SquaresJudge,
    UnfactoredFit,
)
from equipoise.algorithms.learn2pfed.learnables import Layout
from equipoise.algorithms.local_data import DataSplit, LocalData
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.head_moments import Moments
from equipoise.representations.head_problem import GroupOrder, HeadProblem
from equipoise.state import State


def network_with_head(layout: Layout, space: ParameterSpace, client: State, matrices: Tensor) -> Tensor:
    """Return the client's network with the last of these matrices as its head."""
    head = layout.head.vector(matrices[..., -1, :, :])
    return space.join(space.body(client.network), head) if space.body_size else head


class Sides(NamedTuple):
    """What heads are fitted to, and what judges them; the judge is needed only where the backward pass begins."""

    fit: HeadFit
    judge: Judge | None


@dataclass(frozen=True)
class Trials:
    """The samples that heads are fitted to, and those on which they are judged.

    With folds, there is a network for each held-out fold and one, the last, that is fitted to all training samples and
    judged on none.
    """

    fit: Literal["squares", "loss"]
    outer: Literal["train", "validation", "folds"]
    folds: int
    order: GroupOrder

    @property
    def networks(self) -> int:
        """Return the number of networks."""
        return self.folds + 1 if self.outer == "folds" else 1

    @property
    def _groups(self) -> int:
        return self.folds if self.outer == "folds" else 1

    def _splits(self, judged: bool) -> tuple[DataSplit, ...]:
        """Return the samples that are needed, those that heads are fitted to first."""
        return ("train", "validation") if judged and self.outer == "validation" else ("train",)

    def measure(self, model: Tensor, client: State, data: LocalData) -> State:
        """Add the moments of what the head of a model reads to a client's state, for squares."""
        splits = self._splits(judged=True)
        found = [
            data.moments(model, groups=self._groups, order=self.order, of=split).to(model.dtype) for split in splits
        ]
        xx, xy, outer_xx, outer_xy = self._moments(found)
        return State(client, **Fit.of(xx, xy)._asdict(), outer_xx=outer_xx, outer_xy=outer_xy)

    def from_loss(self, model: Tensor, data: LocalData, judged: bool) -> Sides:
        """Return the task's loss on the features that a model makes, with the judge if it is asked for."""
        splits = self._splits(judged)
        return self.of([data.head_problem(model, groups=self._groups, order=self.order, of=k) for k in splits], judged)

    def of(self, problems: Sequence[HeadProblem], judged: bool = True) -> Sides:
        """Return both sides as functions of the features, which can be differentiated.

        Args:
            problems: what the network's head reads of the training samples and, if need be, of the validation samples.
            judged: whether the judge is needed.
        """
        seen, tried = problems[0], problems[-1]
        if self.fit == "squares":
            xx, xy, outer_xx, outer_xy = self._moments([p.moments().to(p.clients[0].features.dtype) for p in problems])
            return Sides(UnfactoredFit(xx, xy), SquaresJudge(outer_xx, outer_xy))
        fitted, weights = seen.members, tried.members
        weights = weights / weights.sum((-2, -1), keepdim=True).clamp(min=1)
        if self.outer == "folds":
            fitted, weights = _all_but_each(fitted, seen.purged, -2), pad(weights, (0, 0, 0, 1))
        fit = LossFit.of(seen, fitted / fitted.sum(-1, keepdim=True).clamp(min=1))
        return Sides(fit, LossJudge(tried, weights) if judged else None)

    def _moments(self, found: Sequence[Moments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return X'X and X'Y of the samples that heads are fitted to, and the means of those of the judge."""
        seen, judged = found[0], found[-1]
        n = judged.n.sum(-3, keepdim=True).clamp(min=1)
        xx, xy, outer_xx, outer_xy = seen.xx, seen.xy, judged.xx / n, judged.xy / n
        if self.outer == "folds":
            near = seen.purged
            xx = _all_but_each(xx, None if near is None else near.xx, -3)
            xy = _all_but_each(xy, None if near is None else near.xy, -3)
            outer_xx, outer_xy = (pad(m, (0, 0, 0, 0, 0, 1)) for m in (outer_xx, outer_xy))
        return xx, xy, outer_xx, outer_xy

    def body_gradient(self, model: Tensor, objective: Callable[[Sides], Tensor], data: LocalData) -> Tensor:
        """Return the gradient at a model's body of a function of both sides that its features make."""
        return data.body_gradient(
            model,
            lambda *problems: objective(self.of(problems)),
            groups=self._groups,
            order=self.order,
            of=self._splits(judged=True),
        )


def _all_but_each(groups: Tensor, purged: Tensor | None, axis: int) -> Tensor:
    """Return the sums over all groups but one and what is purged for it, for each of them, and then the sum over all.

    Args:
        groups: the sum of each group.
        purged: that of the samples that are purged for it; None: there are none.
        axis: the axis of the groups.
    """
    total = groups.sum(axis, keepdim=True)
    rest = total - groups
    return torch.cat([rest if purged is None else rest - purged, total], dim=axis)

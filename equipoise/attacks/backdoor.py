"""Backdoors: training samples with a mark and a wrong label, so that models obey the mark."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise.attacks.base import PoisonContext, SuccessMeasure
from equipoise.attacks.labels import Label, Share, classes_of
from equipoise.attacks.scaling import Boosted
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Number

Pixel = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
BARS: tuple[tuple[int, int], ...] = tuple((row, first + k) for row in (0, 3) for first in (0, 6) for k in range(4))
"""Four bars of four pixels near the upper left corner."""


class Backdoor(Boosted):
    """Part of the training images get a mark of a few pixels and the attackers' label."""

    paper: ClassVar[str] = "Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020"

    pixels: Annotated[tuple[Pixel, ...], Field(min_length=1)] = BARS
    "the mark: pixels as (row, column); by default four bars near the upper left corner"
    value: Number = 1.0
    "value of these pixels in all channels, before inputs are normalised"
    target: Label = 2
    "label that marked images get"
    part: Share = 0.3125
    "fraction of a malicious client's training samples that are marked"

    @property
    def needs_labels(self) -> bool:
        return True

    def pixels_of(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return the pixels that a malicious client marks in training, by its place among them."""
        return self.pixels

    def samples(self, x: Tensor, y: Tensor, context: PoisonContext) -> tuple[Tensor, Tensor]:
        classes = classes_of(context, y, "backdoor")
        if self.target >= classes:
            raise EquipoiseError(
                f"attack.target = {self.target} is not a label of these data; they have {classes} classes, numbered "
                "from 0"
            )
        if not self.part:
            return x, y
        count = max(1, round(self.part * len(y)))
        rows = torch.randperm(len(y), generator=context.rng)[:count].sort().values
        x, y = x.clone(), y.clone()
        x[rows], y[rows] = self.marked(x[rows], context.normalize, self.pixels_of(context.index)), self.target
        return x, y

    def marked(self, x: Tensor, normalize: tuple[float, float], pixels: Sequence[tuple[int, int]]) -> Tensor:
        """Return images with these pixels set.

        Args:
            x: the images, with rows and columns last.
            normalize: mean and deviation by which inputs were normalised.
            pixels: the pixels.
        """
        if x.ndim != 4 or not x.is_floating_point():
            raise EquipoiseError("an attack with a mark of pixels needs images, of shape (channels, rows, columns)")
        rows, columns = (torch.tensor(axis, device=x.device) for axis in zip(*pixels, strict=True))
        if int(rows.max()) >= x.shape[2] or int(columns.max()) >= x.shape[3]:
            raise EquipoiseError(
                f"attack.pixels has pixels beyond the images, which have {x.shape[2]} rows and {x.shape[3]} columns; "
                "give others, as [[row, column], ...]"
            )
        mean, deviation = normalize
        x = x.clone()
        # As inputs are normalised, in their own number format.
        x[:, :, rows, columns] = (torch.full((), self.value, dtype=x.dtype, device=x.device) - mean) / deviation
        return x

    def success(self) -> SuccessMeasure | None:
        def trigger(x: Tensor, normalize: tuple[float, float]) -> Tensor:
            return self.marked(x, normalize, self.pixels)

        pixels = ", ".join(f"({row}, {column})" for row, column in self.pixels)
        return SuccessMeasure(self.target, trigger=trigger, described=f"{self.value:g} in {pixels}")


class DistributedBackdoor(Backdoor):
    """A backdoor whose mark is divided among the attackers in training, and complete where success is measured."""

    paper: ClassVar[str] = "Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020"

    parts: Count = 4
    "number of parts into which the pixels are cut, in their order; attackers use them in turn"

    def pixels_of(self, index: int) -> tuple[tuple[int, int], ...]:
        cut = np.array_split(np.arange(len(self.pixels)), min(self.parts, len(self.pixels)))
        return tuple(self.pixels[k] for k in cut[index % len(cut)])

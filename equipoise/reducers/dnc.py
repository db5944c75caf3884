"""Divide and conquer (DnC): messages far out along the direction in which all vary most are removed."""

from math import floor
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.reducers.base import ContextReducer, Part
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.distances import LARGEST
from equipoise.settings import Count, NonNegative
from equipoise.state import State, Uploads
from equipoise.torch_device import CPU, wide_dtype, widened

_SAME = 1e-9  # relative difference of scores, and of eigenvalues, that tie


class DnC(ContextReducer):
    """The mean of the messages that are not far out along the direction in which random coordinates vary most.

    In each of a few draws of coordinates, the `c` f messages with the largest squared projections on the top singular
    vector are removed, f = `malicious` n. Those that no draw removes are averaged or, if none is left, those that were
    removed least often.
    """

    paper: ClassVar[str] = "Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021, Alg. 2"

    malicious: Part = 0.2
    "fraction f/n of the clients that may be malicious"
    iterations: Count = 5
    "number of draws"
    coordinates: Count = 10_000
    "coordinates in a draw; all of them if the messages have fewer"
    c: NonNegative = 1.0
    "messages that a draw removes, as a multiple of f"

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        n, f = len(uploads), round(self.malicious * uploads.sent)
        kept = min(max(floor(n - self.c * f + 1e-9), 1), n)
        names = context.names(uploads)
        removed = torch.zeros(n, dtype=torch.int64)
        for gram in self._drawn_products(uploads, context):
            removed[removed_by(outlier_scores(gram), kept, names)] += 1
        stays = widened(removed == removed.min())
        return uploads.combined(stays / stays.sum()), context.memory

    def _drawn_products(self, uploads: Uploads, context: ReductionContext) -> list[Tensor]:
        """Return the inner products of centred messages on the coordinates of each draw, in one pass."""
        size = uploads.like.numel
        count = min(size, self.coordinates)
        # If all coordinates are taken, all draws are the same.
        draws = [
            np.sort(context.generator("dnc", k).choice(size, count, replace=False, shuffle=False))
            for k in range(1 if count == size else self.iterations)
        ]
        device = next((t.device for t in uploads.like.values()), CPU)
        grams = [torch.zeros(len(uploads), len(uploads), dtype=wide_dtype(device), device=device) for _ in draws]
        offset = 0
        for name, t in uploads.like.items():
            for low, high in uploads.spans(name):
                rows = widened(uploads.columns(name, low, high))
                for gram, drawn in zip(grams, draws, strict=True):
                    first, last = np.searchsorted(drawn, (offset + low, offset + high))
                    some = rows[:, torch.from_numpy(drawn[first:last] - offset - low).to(device)]
                    some = (some - some.mean(0)).clamp(-LARGEST[some.dtype], LARGEST[some.dtype])
                    gram += some @ some.T
            offset += t.numel()
        return grams


def outlier_scores(gram: Tensor) -> Tensor:
    """Return the squared projections of rows on their top singular vector, from their inner products.

    If several singular values are the largest, the projections on all of their vectors are added.
    """
    values, vectors = torch.linalg.eigh(widened(gram).cpu())
    top = values >= values[-1] * (1 - _SAME)
    scores: Tensor = (vectors[:, top].square() * values[top].clamp(min=0)).sum(1)
    return scores


def removed_by(scores: Tensor, kept: int, names: list[str]) -> list[int]:
    """Return the messages with the highest scores; of those that tie for the last place, the first by name stay."""
    last = float(scores.sort().values[kept - 1])
    ties = [i for i, score in enumerate(scores.tolist()) if abs(score - last) <= _SAME * last]
    below = [i for i, score in enumerate(scores.tolist()) if score < last and i not in ties]
    stay = {*below, *sorted(ties, key=lambda i: names[i])[: kept - len(below)]}
    return [i for i in range(len(names)) if i not in stay]

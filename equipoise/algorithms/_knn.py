"""Predictions from the nearest of a client's own samples, in the feature space of its model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.algorithms.local_data import ClientSamples
from equipoise.representations.head_features import HeadTargets
from equipoise.torch_device import widened

_PAIRS = 4 << 20  # number of distances in memory at once


class Neighbours:
    """A client's training samples, found by their features: what the head of its model reads."""

    def __init__(self, module: nn.Module, head: str, x: Tensor, y: Tensor, scale: float = 1.0):
        self.module, self.head, self.scale = module, module.get_submodule(head), scale
        self.points = HeadTargets(y)
        features, outputs = self.points.look(module, self.head, x)
        self.features = widened(features)
        self.classes = None if y.is_floating_point() else outputs.shape[-1]
        self.values = self.points.values(y, outputs.shape[-1], outputs.dtype)

    @torch.no_grad()
    def answers(self, x: Tensor, ks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the model's own predictions for x and, for every k, those of the nearest k samples."""
        features, outputs = self.points.look(self.module, self.head, x)
        own = outputs if self.classes is None else outputs.softmax(-1)
        at_once = max(1, _PAIRS // len(self.features))
        parts = [self._nearest(widened(part), ks) for part in features.split(at_once)]
        return own, [torch.cat(each) for each in zip(*parts, strict=True)]

    def _nearest(self, features: Tensor, ks: Sequence[int]) -> list[Tensor]:
        most = min(max(ks), len(self.features))
        distances, which = torch.cdist(features, self.features).topk(most, largest=False)
        values, found = self.values[which], []
        for k in (min(k, most) for k in ks):
            weights = (-distances[:, :k] / self.scale).softmax(-1).to(values.dtype)
            found.append((weights.unsqueeze(1) @ values[:, :k]).squeeze(1))
        return found

    def mixed(self, own: Tensor, nearest: Tensor, mix: float) -> Tensor:
        """Return the mixture as a model's outputs: for classes, the logarithms of their probabilities."""
        both = (1 - mix) * own + mix * nearest
        return both if self.classes is None else both.clamp(min=torch.finfo(both.dtype).tiny).log()

    def best(self, own: ClientSamples, ks: Sequence[int], mixes: Sequence[float]) -> tuple[int, float]:
        """Return the k and the mix that score best on the validation samples, or the first ones if there are none."""
        x, y = own.validation
        if not len(y):
            return ks[0], mixes[0]
        answers, nearest = self.answers(x, ks)
        targets, best = self.points.targets(y), None
        for k, near in zip(ks, nearest, strict=True):
            for mix in mixes:
                score = own.metric.score(self.mixed(answers, near, mix), targets)
                if best is None or own.metric.better(score, best[0]):
                    best = score, k, mix
        assert best is not None
        return best[1:]


class Mixed(nn.Module):
    """A module that mixes its predictions with those of a client's nearest samples."""

    def __init__(self, neighbours: Neighbours, k: int, mix: float):
        super().__init__()
        self.neighbours, self.k, self.mix = neighbours, k, mix

    def forward(self, x: Tensor) -> Tensor:
        own, (nearest,) = self.neighbours.answers(x, [self.k])
        out = self.neighbours.mixed(own, nearest, self.mix)
        return out.unflatten(0, (len(x), -1)) if self.neighbours.points.by_position else out

"""Answers from the nearest of a client's own samples, as its model's body sees them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.algorithm import Own

_BATCH = 512
_PAIRS = 4 << 20  # distances that are held at once


class Neighbours:
    """A client's training samples, laid out by their features: what the head of its model reads.

    A text with a target a position is a point a position; one with a single target counts by its last position.
    """

    def __init__(self, module: nn.Module, head: str, x: Tensor, y: Tensor, scale: float = 1.0):
        self.module, self.head, self.scale = module, module.get_submodule(head), scale
        self.by_position = y.ndim == 2 and not y.is_floating_point()
        self.one_of_many = y.ndim == 1 and not y.is_floating_point()
        features, outputs = self._look(x)
        self.features = features.double()
        self.classes = None if y.is_floating_point() else outputs.shape[-1]
        self.values = self.targets(y)
        if self.classes is not None:
            self.values = nn.functional.one_hot(self.values.long(), self.classes)
        self.values = self.values.to(outputs.dtype)

    def targets(self, y: Tensor) -> Tensor:
        """A row a point."""
        return y.reshape(len(y), -1) if y.is_floating_point() else y.flatten()

    @torch.no_grad()
    def _look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features and outputs, a row a point."""
        seen: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = torch.cat([self.module(part) for part in x.split(_BATCH)])
        finally:
            handle.remove()
        features = torch.cat(seen)
        if self.by_position:
            return features.flatten(0, 1), outputs.flatten(0, 1)
        if self.one_of_many and outputs.ndim == 3:
            return features[:, -1], outputs[:, -1]
        return features.flatten(1), outputs.reshape(len(x), outputs[0].numel())

    @torch.no_grad()
    def answers(self, x: Tensor, ks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """For each point of x: what the model answers by itself, and what the nearest k samples do, for every k."""
        features, outputs = self._look(x)
        own = outputs if self.classes is None else outputs.softmax(-1)
        at_once = max(1, _PAIRS // len(self.features))
        parts = [self._nearest(part.double(), ks) for part in features.split(at_once)]
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
        """As outputs of a model: of classes, the logarithms of their probabilities."""
        both = (1 - mix) * own + mix * nearest
        return both if self.classes is None else both.clamp(min=torch.finfo(both.dtype).tiny).log()

    def best(self, own: Own, ks: Sequence[int], mixes: Sequence[float]) -> tuple[int, float]:
        """The k and the weight with the best score on the validation samples, or the first ones if there are none."""
        x, y = own.validation
        if not len(y):
            return ks[0], mixes[0]
        answers, nearest = self.answers(x, ks)
        targets, best = self.targets(y), None
        for k, near in zip(ks, nearest, strict=True):
            for mix in mixes:
                score = own.metric.each(self.mixed(answers, near, mix), targets).double().mean()
                if best is None or own.metric.better(score, best[0]):
                    best = score, k, mix
        assert best is not None
        return best[1:]


class Mixed(nn.Module):
    """A module that answers together with a client's nearest samples."""

    def __init__(self, neighbours: Neighbours, k: int, mix: float):
        super().__init__()
        self.neighbours, self.k, self.mix = neighbours, k, mix

    def forward(self, x: Tensor) -> Tensor:
        own, (nearest,) = self.neighbours.answers(x, [self.k])
        out = self.neighbours.mixed(own, nearest, self.mix)
        return out.unflatten(0, (len(x), -1)) if self.neighbours.by_position else out

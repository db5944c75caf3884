"""Feature decay: local training that keeps the representation of samples small."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.representations.terms import LossTerm
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload


class Size(LossTerm):
    """The squared length of representations."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        """Return the sum of squared lengths over the representation points, weighted by given.weight."""
        return torch.stack([a.square().sum(-1) for a in h], dim=-1) @ given.weight


class FeatureDecay(Algorithm):
    """Local training with a penalty on the squared length of the representation; nothing is sent.

    u, v: the client's extractor and head; h: the representation of a sample, the head's input. Head and extractor are
    trained in turn, the extractor on f + lam/2 mean |h(u)|^2. It is what remains of FedReCo where the probe's
    representations are zero, and so the control that tells what of its gain is shrinkage alone.
    """

    lam: NonNegative = 0.01
    "strength of the penalty on the squared length of representations"
    head_epochs: Count = 1
    "passes that train the head, before those that train the extractor"
    head_lr: Positive | None = None
    "learning rate of the head; by default lr"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True)

    def init_client(self, start: Start) -> State:
        return State(w=start.w0)  # (u, v)

    def _local(self, w: Tensor, data: LocalData, epochs: int | None = None) -> Tensor:
        decay = Size(given=State(weight=torch.full_like(w[..., :1], self.lam / 2)))
        w = data.descend(w, part="head", epochs=epochs or self.head_epochs, lr=self.head_lr, stream=1)
        return data.descend(w, part="body", epochs=epochs, term=decay if self.lam and data.space.body_size else None)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return State(w=self._local(client.w, data)), Upload()

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._local(client.w, data, self.adapt_epochs)

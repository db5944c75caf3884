"""FedRoD: a generic model trained as if classes were balanced, and a personal head that adds what is special."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.algorithms.base import Requirements
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.representations.points import OUTPUT
from equipoise.representations.terms import LossTerm
from equipoise.settings import NonNegative
from equipoise.state import State, Upload

_NEVER = -1e9  # added to the output of a class that the client does not have


class Balance(LossTerm):
    """What makes of cross-entropy the balanced one: that of a + prior, minus that of a, the outputs."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        balanced = F.cross_entropy(h[0] + given.prior, y, reduction="none")
        return balanced - F.cross_entropy(h[0], y, reduction="none")


class FedRoD(FedAvg):
    """FedAvg on a balanced loss, and heads of the clients' own that are added to the common one.

    w = (theta, psi): body and generic head; phi: the personal head, zero at first; n: the client's samples by class. A
    client first trains w on the cross-entropy of the outputs + gamma log n; then phi alone on the ordinary loss of
    psi(z) + phi(z). The paper trains both in each step; the order is ours, and where phi ends is the same. With
    gamma = 0, w is FedAvg's. The paper's hypernetwork that makes phi for new clients is left out: they train the head.
    """

    paper: ClassVar[str] = "Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022"

    gamma: NonNegative = 1.0
    "how strongly classes are balanced"
    personal_lr: NonNegative | None = None
    "learning rate of the personal head; by default lr"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, linear_head=True, labels=True, cross_entropy=True)

    def init_client(self, start: Start) -> State:
        return State(phi=torch.zeros_like(start.space.head(start.w0)))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        n = data.class_counts
        prior = torch.where(n > 0, self.gamma * n.log(), _NEVER)
        w = data.descend(down.w, term=Balance((OUTPUT,), given=State(prior=prior)) if self.gamma else None)
        both = data.descend(self._with(client.phi, w, data), part="head", lr=self.personal_lr, stream=1)
        phi = data.space.head(both) - data.space.head(w)
        return State(phi=phi), Upload(State(w=w), reference=down, weight=data.size)

    @staticmethod
    def _with(phi: Tensor, w: Tensor, data: LocalData) -> Tensor:
        """Return the model with the outputs psi(z) + phi(z): heads that are linear layers can be added."""
        return data.space.join(data.space.body(w), data.space.head(w) + phi)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._with(client.phi, down.w, data)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, part="head", epochs=self.adapt_epochs, lr=self.personal_lr)

"""APFL: every client predicts with a mixture of a model of its own and the global one."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms._plain_sgd import check_plain_sgd
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import BatchGradient, LocalData, Start
from equipoise.optimizers import moved
from equipoise.settings import Positive
from equipoise.state import State, Upload, Uploads


class APFL(Algorithm):
    """FedAvg, and personal models alpha v + (1 - alpha) w whose part v is trained on the loss of the mixture.

    w: the global model; w_i: client i's copy of it; v: its own model; alpha: how much of it is in the mixture. In each
    step, w_i and v move on the same batch, the mixture being that of before the step. With alpha = 0, personal models
    are the global one, and with alpha = 1 they are those of Local. Means are weighted by numbers of samples; the
    paper's count every client once.
    """

    paper: ClassVar[str] = "Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    "share of the client's own model in the mixture; with `adaptive`, at first"
    adaptive: bool = False
    "whether each client moves its alpha by a gradient step, once a round"
    alpha_lr: Positive | None = None
    "learning rate of alpha; by default lr"

    def model_post_init(self, _: object) -> None:
        check_plain_sgd(self, "moves two models together by steps of plain SGD")

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def init_client(self, start: Start) -> State:
        return State(v=start.w0, alpha=start.w0.new_tensor([self.alpha]))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        def step(s: State, grad: BatchGradient) -> State:
            own, mixed = grad(s.w), grad(s.alpha * s.v + (1 - s.alpha) * s.w)
            v = moved(s.v, s.alpha * mixed, data.lr)  # the chain rule: d mixture / dv = alpha
            return State(w=moved(s.w, own, data.lr), v=v, alpha=self._moved(s, mixed, data), first=0 * s.first)

        begin = State(w=down.w, v=client.v, alpha=client.alpha, first=torch.ones_like(data.size))
        end = data.walk(begin, step)
        return State(v=end.v, alpha=end.alpha), Upload(State(w=end.w), reference=down, weight=data.size)

    def _moved(self, s: State, mixed: Tensor, data: LocalData) -> Tensor:
        """Return the next alpha; in the first step of a round it moves along <v - w, gradient at the mixture>."""
        if not self.adaptive:
            return s.alpha
        slope = ((s.v - s.w) * mixed).sum(-1, keepdim=True)
        return torch.where(s.first > 0, moved(s.alpha, slope, data.rate(self.alpha_lr)).clamp(0, 1), s.alpha)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.alpha * client.v + (1 - client.alpha) * down.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        # v begins at w, which is fixed: the mixture then moves by alpha^2 times the gradient.
        return data.descend(down.w, lr=self.lr * client.alpha.square(), epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.w

"""Ditto: a global model, and personal models pulled towards it."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class Ditto(Algorithm):
    """A global model trained by FedAvg, and personal models pulled towards it; lam = 0 is Local.

    w: the global model; w_i: client i's copy of it; v: its personal model.
    """

    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    lam: NonNegative = 1.0
    "strength of the pull of the personal model towards the global model"
    personal_lr: Positive | None = None
    "learning rate of the personal model; by default lr"
    personal_epochs: Count | None = None
    "passes that train the personal model; by default epochs"

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def init_client(self, start: Start) -> State:
        return State(v=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.w)
        v = data.descend(  # Alg. 1: v <- v - eta (grad F_i(v) + lam (v - w)), w as received
            client.v,
            lr=self.personal_lr,
            epochs=self.personal_epochs,
            pull=lambda v: self.lam * (v - down.w),
        )
        return State(v=v), Upload(State(w=w_i), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.v

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(
            down.w, lr=self.personal_lr, epochs=self.adapt_epochs, pull=lambda v: self.lam * (v - down.w)
        )

    def global_model(self, server: State) -> Tensor:
        return server.w

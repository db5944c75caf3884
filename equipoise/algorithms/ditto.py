"""Ditto: a global model, and personal models pulled towards it."""

from typing import ClassVar, Literal

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
    weights: Literal["samples", "equal"] = "samples"
    "a client's weight in the global model: its number of samples, as in FedAvg, or 1, as in FLAME's paper"
    synchronised: bool = True
    "whether a client's copy of the global model begins a round at the server's; if not (FLAME's code), where it ended"
    global_steps: Count | None = None
    "batches that train this copy in a round (1 in FLAME's code); by default all of `epochs` or `steps`"

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def init_client(self, start: Start) -> State:
        return State(v=start.w0) if self.synchronised else State(v=start.w0, w_i=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.w if self.synchronised else client.w_i, steps=self.global_steps)
        v = data.descend(  # Alg. 1: v <- v - eta (grad F_i(v) + lam (v - w)), w as received
            client.v,
            lr=self.personal_lr,
            epochs=self.personal_epochs,
            pull=lambda v: self.lam * (v - down.w),
        )
        kept = State(v=v) if self.synchronised else State(v=v, w_i=w_i)
        weight = data.size if self.weights == "samples" else None
        return kept, Upload(State(w=w_i), reference=down, weight=weight)

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

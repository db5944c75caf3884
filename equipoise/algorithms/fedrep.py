"""FedRep: a common body; every client first fits its head to it, then trains the body."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count, Positive
from equipoise.state import State, Upload, Uploads


class FedRep(Algorithm):
    """Clients train the head with the body fixed, then the body with the head fixed; only the body is sent.

    phi: the common representation (body); h: a client's head. With an empty head it is FedAvg.
    """

    paper: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("phi",)

    head_epochs: Count = 1
    "passes that fit the head, before those that train the body"
    head_lr: Positive | None = None
    "learning rate of the head; by default lr"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True)

    def init_server(self, start: Start) -> State:
        return State(phi=start.space.body(start.w0))

    def init_client(self, start: Start) -> State:
        return State(h=start.space.head(start.w0))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.space.join(down.phi, client.h)
        w = data.descend(w, part="head", epochs=self.head_epochs, lr=self.head_lr, stream=1)
        w = data.descend(w, part="body")
        phi_i, h = data.space.body(w), data.space.head(w)
        return State(h=h), Upload(State(phi=phi_i), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(down.phi, client.h)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = data.space.join(down.phi, client.h)
        return data.descend(w, part="head", epochs=self.adapt_epochs, lr=self.head_lr)

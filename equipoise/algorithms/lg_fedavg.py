"""LG-FedAvg: every client has a body of its own, and all share the head."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.state import State, Upload, Uploads


class LGFedAvg(Algorithm):
    """The head is averaged and the body never leaves the client: FedPer with the parts exchanged.

    w_l: a client's own layers (body); w_g: the common ones (head). Without a head it is Local, without a body FedAvg.
    A client that took no part in training begins with the initial body, which is ours: the paper averages the
    predictions of all clients' models, for which their bodies would have to be sent.
    """

    paper: ClassVar[str] = "Liang et al., Think Locally, Act Globally, 2020"
    averaged: ClassVar[tuple[str, ...]] = ("w_g",)

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True)

    def init_server(self, start: Start) -> State:
        return State(w_g=start.space.head(start.w0))

    def init_client(self, start: Start) -> State:
        return State(w_l=start.space.body(start.w0))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.descend(data.space.join(client.w_l, down.w_g))
        w_l, w_g = data.space.body(w), data.space.head(w)
        return State(w_l=w_l), Upload(State(w_g=w_g), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(client.w_l, down.w_g)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(data.space.join(client.w_l, down.w_g), epochs=self.adapt_epochs)

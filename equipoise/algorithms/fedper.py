"""FedPer: a common body and personal heads, trained together."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.state import State, Upload, Uploads


class FedPer(Algorithm):
    """The body is averaged, the head never leaves the client, and both are trained together.

    w_b: the common body; w_p: a client's head.
    """

    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, 2019, Algs. 1 and 2"
    averaged: ClassVar[tuple[str, ...]] = ("w_b",)

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True)

    def init_server(self, start: Start) -> State:
        return State(w_b=start.space.body(start.w0))

    def init_client(self, start: Start) -> State:
        return State(w_p=start.space.head(start.w0))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.descend(data.space.join(down.w_b, client.w_p))
        w_b, w_p = data.space.body(w), data.space.head(w)
        return State(w_p=w_p), Upload(State(w_b=w_b), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(down.w_b, client.w_p)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(data.space.join(down.w_b, client.w_p), part="head", epochs=self.adapt_epochs)

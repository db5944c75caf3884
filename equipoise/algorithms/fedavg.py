"""FedAvg: one global model, the mean of the models that clients train from it."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.state import State, Upload, Uploads


class FedAvg(Algorithm):
    """Federated averaging: local training from the global model, then a mean weighted by numbers of samples.

    w: the global model; w_i: client i's model; n_i: its number of samples.
    """

    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.w)
        return client, Upload(State(w=w_i), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)  # w = sum n_i w_i / sum n_i

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.w

"""Local training: the baseline without communication."""

from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.state import State, Upload


class Local(Algorithm):
    """Every client trains alone; nothing is sent.

    v: the client's own model.
    """

    def init_client(self, start: Start) -> State:
        return State(v=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return State(v=data.descend(client.v)), Upload()

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.v

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(client.v, epochs=self.adapt_epochs)

"""FedProx: FedAvg with a proximal term that keeps clients near the global model."""

from typing import ClassVar

from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.settings import NonNegative
from equipoise.state import State, Upload


class FedProx(FedAvg):
    """FedAvg with the proximal term mu/2 ||w_i - w||^2 in every client's loss; mu = 0 is FedAvg.

    w: the global model; w_i: client i's model.
    """

    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2"

    mu: NonNegative = 0.1
    "strength of the proximal term"

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.w, pull=lambda w_i: self.mu * (w_i - down.w))
        return client, Upload(State(w=w_i), reference=down, weight=data.size)

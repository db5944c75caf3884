"""FL-DEQ: federated averaging weighted by the equilibrium iterations that each client can afford."""

from typing import ClassVar, Literal

import torch

from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.state import State, Upload


class FlDEQ(FedAvg):
    """FedAvg for devices of unequal power, weighted by their numbers of iterations, which [devices] sets (FL-DEQ).

    theta (here w): the global model; k_n: the iteration limit of equilibrium solves on client n.
    """

    paper: ClassVar[str] = "FL-DEQ: equilibrium models in federated averaging, Eq. 14"

    fusion: Literal["iterations", "plain"] = "iterations"
    "weight of a client in the average: its iteration limit k_n, or the same for all"

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta_n = data.descend(down.w)
        k_n = data.iterations if self.fusion == "iterations" else torch.ones_like(data.iterations)
        return client, Upload(State(w=theta_n), reference=down, weight=k_n)  # Eq. 14: sum k_n theta_n / sum k_n

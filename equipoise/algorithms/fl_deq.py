"""FL-DEQ: federated averaging in which a client counts by how many iterations of its equilibrium it can afford."""

from typing import ClassVar, Literal

import torch

from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.state import State, Upload


class FlDEQ(FedAvg):
    """FedAvg for devices of unequal power: each counts by its iterations, which [devices] sets (FL-DEQ).

    theta (here w): the global model; k_n: most iterations of a solve that client n affords.
    """

    paper: ClassVar[str] = "FL-DEQ: equilibrium models in federated averaging, Eq. 14"

    fusion: Literal["iterations", "plain"] = "iterations"
    "what a client counts by in the average: its iterations k_n, or all clients equally"

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta_n = data.descend(down.w)
        k_n = data.iterations if self.fusion == "iterations" else torch.ones_like(data.iterations)
        return client, Upload(State(w=theta_n), reference=down, weight=k_n)  # Eq. 14: sum k_n theta_n / sum k_n

"""FL-DEQ: federated averaging weighted by the equilibrium iterations that each client performs."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.state import State, Upload


class FlDEQ(FedAvg):
    """FedAvg for devices of unequal power, weighted by numbers of iterations, which [devices] limits (FL-DEQ).

    theta (here w): the global model; k_n: the mean number of iterations of client n's forward solves in the round. A
    client that solved nothing has k_n = 1, the fewest that a solve can have.
    """

    paper: ClassVar[str] = "FL-DEQ: equilibrium models in federated averaging, Eq. 14"

    fusion: Literal["iterations", "limit", "plain"] = "iterations"
    "weight of a client in the average: the iterations k_n that it performed, its iteration limit, or the same for all"

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta_n = data.descend(down.w)
        return client, Upload(State(w=theta_n), reference=down, weight=self._weight(data))

    def _weight(self, data: LocalData) -> Tensor:
        """Return k_n of Eq. 14, sum k_n theta_n / sum k_n, after training."""
        if self.fusion == "iterations":
            return data.iterations_performed
        return data.iterations if self.fusion == "limit" else torch.ones_like(data.iterations)

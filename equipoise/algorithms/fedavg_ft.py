"""FedAvg+FT: FedAvg's global model, fine-tuned by every client on its own data."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.settings import Count
from equipoise.state import State


class FedAvgFT(FedAvg):
    """FedAvg, then every client fine-tunes the global model on its own data; the result is never sent."""

    paper: ClassVar[str] = "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020"
    trains_as: ClassVar[type[Algorithm] | None] = FedAvg

    finetune_epochs: Count = 1
    "passes over the client's data that fine-tune the global model"

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, epochs=self.finetune_epochs)

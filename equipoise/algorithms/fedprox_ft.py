"""FedProx+FT: FedProx's global model, fine-tuned by every client on its own data."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.fedprox import FedProx
from equipoise.algorithms.local_data import LocalData
from equipoise.settings import Count
from equipoise.state import State


class FedProxFT(FedProx):
    """FedProx, then every client fine-tunes the global model on its own data, without the proximal term."""

    paper: ClassVar[str] = "Li et al., MLSys 2020, with the local adaptation of Yu et al., 2020"
    trains_as: ClassVar[type[Algorithm] | None] = FedProx

    finetune_epochs: Count = 1
    "passes over the client's data that fine-tune the global model"

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, epochs=self.finetune_epochs)

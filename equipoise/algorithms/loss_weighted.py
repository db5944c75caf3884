"""The base of fair algorithms that weigh clients by their losses at the model that they received."""

from torch import Tensor

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.state import State, Upload, Uploads
from equipoise.torch_device import widened


class LossWeighted(FedAvg):
    """A global model; clients send their trained model and the loss F_k of the model that they received."""

    def broadcast(self, server: State, client: int) -> State:
        return State(w=server.w)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        F_k = data.loss(down.w)
        w_k = data.descend(down.w)
        # F_k is a change of nothing, so it has no reference.
        return client, Upload(State(w=w_k, F=F_k), reference=State(w=down.w))

    @staticmethod
    def losses(uploads: Uploads) -> Tensor:
        """Return F_k of the clients of a round, in float64; a forged or noised one below zero counts as zero."""
        return widened(uploads.columns("F", 0, 1).flatten()).clamp(min=0)

    @staticmethod
    def weighted_mean(uploads: Uploads, weights: Tensor, reduce: Reduce) -> Tensor:
        """Combine the models with these weights; a reducer that ignores weights ignores them. Losses are left alone."""
        models = uploads.only(*(name for name in uploads.like if name != "F"))
        return reduce(models.weighing(weights)).w

"""FedBN: clients keep the parameters and the statistics of their batch normalisation."""

from typing import ClassVar, Literal

from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.parameter_space import ParameterSpace
from equipoise.state import State, Upload, Uploads

_BATCH = (nn.modules.batchnorm._NormBase,)  # batch and instance normalisation
_LAYERS = {"batch": _BATCH, "norm": (*_BATCH, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)}


class FedBN(Algorithm):
    """FedAvg of all parameters but those of normalisation layers, which stay with the client like their statistics.

    w: the common parameters; b: the client's own. Without such layers it is FedAvg. There is no global model. A client
    that took no part in training adapts b only, which is ours: what the paper does for new domains is not certain.
    """

    paper: ClassVar[str] = "Li et al., FedBN: Federated Learning on Non-IID Features, ICLR 2021"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    buffers: Literal["average", "local"] | None = "local"
    "BatchNorm statistics: kept by each client, which is the method; or averaged over all"
    layers: Literal["batch", "norm"] = "batch"
    "what stays with the client: batch (and instance) normalisation; or group, layer and RMS normalisation, too"

    def _own(self, space: ParameterSpace) -> Tensor:
        """Return the mask of b, by the kinds of layers and not by their names."""
        return space.mask(_LAYERS[self.layers], optional=True)

    def init_server(self, start: Start) -> State:
        return State(w=start.w0[~self._own(start.space)])

    def init_client(self, start: Start) -> State:
        return State(b=start.w0[self._own(start.space)])

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        own = self._own(data.space)
        v = data.descend(data.space.merge(own, client.b, down.w))
        return State(b=v[..., own]), Upload(State(w=v[..., ~own]), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.merge(self._own(data.space), client.b, down.w)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        own = self._own(data.space)
        return data.descend(data.space.merge(own, client.b, down.w), part=own, epochs=self.adapt_epochs)

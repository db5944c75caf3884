"""FedAMP: every client is pulled towards a mean of models in which similar ones count most."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import ReportsDiagnostics
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.settings import Positive
from equipoise.state import State, Upload, Uploads
from equipoise.torch_device import widened

_COLUMNS = 1 << 18  # parameters of all clients that are taken to float64 at once


class FedAMP(ReportsDiagnostics, Algorithm):
    """Models are pulled towards each other by attention: the more similar two are, the more strongly.

    w: a client's model; u: its cloud model, the mean of all models by its weights xi; d: the squared distance of two
    models, which attract each other by A(d) = 1 - e^(-d / sigma). A client minimises f + lam / (2 alpha_k) |w - u|^2.
    It is not certain whether the paper begins training at u or at the last w; published code begins at w.
    """

    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021, Alg. 1"

    lam: Positive = 1.0
    "strength of the attraction; the pull towards the cloud model is lam / alpha_k, which compares with lam of Ditto"
    alpha_k: Positive | None = None
    "step by which models approach each other; at most sigma / (clients - 1), by default sigma / clients"
    sigma: Positive = 1.0
    """squared distance beyond which models hardly attract each other: choose it by `squared_distance`, which is logged
    (the median over pairs); with cosines, how strongly similar models are preferred"""
    similarity: Literal["distance", "cosine"] = "distance"
    "weights by distances (FedAMP), or by cosines (HeurFedAMP, for large models)"
    own_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    "weight of the client's own model in its cloud model, with cosines"
    begin: Literal["own", "cloud"] = "own"
    "start of local training: the client's last model, or the cloud model"

    def _step(self, clients: int) -> float:
        """Return alpha_k."""
        return self.sigma / clients if self.alpha_k is None else self.alpha_k

    def init_server(self, start: Start) -> State:
        m = start.clients
        alpha_k = self._step(m)
        if self.similarity == "distance" and m > 1 and alpha_k * (m - 1) > self.sigma:
            raise EquipoiseError(
                f"algorithm.alpha_k = {alpha_k:g} is not allowed with sigma = {self.sigma:g} and {m} clients, because "
                f"a client's own model could have a negative weight; it must be at most {self.sigma / (m - 1):g}"
            )
        if self.optimizer == "sgd" and self.clip is None and self.lr * self.lam / alpha_k >= 2:
            raise EquipoiseError(
                f"FedAMP pulls with the strength lam / alpha_k = {self.lam / alpha_k:g}, for which algorithm.lr = "
                f"{self.lr:g} is too large (training diverges where their product is 2 or more); lower lr or lam"
            )
        return self._server(start.w0.expand(m, -1).clone())

    def _server(self, w: Tensor) -> State:
        """Return the server's state with these models, one row per client."""
        xi, distance = self._weights(w)
        return State(w=w, xi=xi.to(w.dtype), distance=distance.to(w.dtype).reshape(1))

    def _weights(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return xi, one row per client, and the median squared distance of two models."""
        m = len(w)
        gram = widened(w.new_zeros(m, m))
        for block in map(widened, w.split(_COLUMNS, dim=1)):
            if self.similarity == "distance":  # a distance is that of the differences from the mean, which are smaller
                block = block - block.mean(0)
            gram += block @ block.T
        square = gram.diagonal()
        d = (square[:, None] + square - 2 * gram).clamp(min=0)
        others = ~torch.eye(m, dtype=torch.bool, device=w.device)
        median = d[others].median() if m > 1 else d.new_zeros(())
        if self.similarity == "distance":
            xi = (self._step(m) / self.sigma * (-d / self.sigma).exp()).masked_fill(~others, 0)  # alpha_k A'(d)
        else:
            norms = square.sqrt().clamp(min=1e-12)
            cosines = (gram / norms / norms[:, None]).masked_fill(~others, -torch.inf)
            xi = (1 - self.own_weight) * (self.sigma * cosines).softmax(1) if m > 1 else torch.zeros_like(d)
        return xi + torch.diag(1 - xi.sum(1)), median

    def init_client(self, start: Start) -> State:
        return State(w=start.w0, clients=start.w0.new_tensor([start.clients]))

    def broadcast(self, server: State, client: int) -> State:
        newcomer = client >= len(server.w)  # the server has no model of it
        u = server.w.mean(0) if newcomer else server.xi[client] @ server.w
        return State(u=u, distance=server.distance)

    def origin(self, server: State) -> None:
        return None  # what a client begins with is its own

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = self._trained(client.w if self.begin == "own" else down.u, client, down, data)
        return State(client, w=w), Upload(State(w=w), reference=State(w=down.u))

    def _trained(self, w: Tensor, client: State, down: State, data: LocalData, epochs: int | None = None) -> Tensor:
        alpha_k = self.sigma / client.clients if self.alpha_k is None else self.alpha_k
        return data.descend(w, epochs=epochs, pull=lambda w: self.lam / alpha_k * (w - down.u))

    def diagnostics(self, client: State, down: State) -> State:
        return State(squared_distance=down.distance)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        w = server.w.clone()  # models of absent clients stay
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            if who < len(w):
                w[who] = upload.message.w
        return self._server(w)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._trained(down.u, client, down, data, self.adapt_epochs)

"""FedADMM: one global model, on which clients agree by ADMM."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import ReportsDiagnostics, TrainsOtherModel, UsesLastUploads, agreement
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class FedADMM(TrainsOtherModel, ReportsDiagnostics, UsesLastUploads, Algorithm):
    """One global model on which clients agree by ADMM; dual = false and rho = 0 is FedAvg if all take part.

    theta: the client's model; w: the global model; pi: the dual of theta = w; u: what is sent; alpha = 1 / clients.
    """

    paper: ClassVar[str] = "Zhou and Li, Federated Learning via Inexact ADMM, TPAMI 2023; FLAME, Eq. 19"

    rho: NonNegative = 0.1
    "strength of the pull of the clients' models towards the global model; above 0 with duals"
    dual: bool = True
    "use dual variables; without them rho is the weight of a proximal term"
    begin: Literal["global", "own"] = "global"
    "start of local training: the global model, or the client's last model"

    def model_post_init(self, _: object) -> None:
        if self.dual and not self.rho:
            raise EquipoiseError("algorithm.rho = 0 is not allowed with duals; give rho > 0, or dual = false")

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def init_client(self, start: Start) -> State:
        clients = start.w0.new_tensor([start.clients])
        return State(theta=start.w0, pi=torch.zeros_like(start.w0), clients=clients)

    def initial_upload(self, start: Start) -> State:
        return State(u=start.w0)

    def origin(self, server: State) -> State:
        return State(u=server.w)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w, pi, rho, alpha = down.w, client.pi, self.rho, 1 / client.clients
        # Minimise alpha f(theta) + <pi, theta - w> + rho/2 ||theta - w||^2, divided by alpha.
        theta = data.descend(
            w if self.begin == "global" else client.theta,
            pull=lambda theta: (pi + rho * (theta - w)) / alpha,
        )
        if self.dual:
            pi = pi + rho * (theta - w)
        u, before = (theta + pi / rho, client.theta + client.pi / rho) if self.dual else (theta, client.theta)
        return State(theta=theta, pi=pi, clients=client.clients), Upload(State(u=u), reference=State(u=before))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return State(w=reduce(uploads).u)  # the mean of all clients' last u

    def diagnostics(self, client: State, down: State) -> State:
        return agreement(client.theta, down.w, client.pi if self.dual else None)

    def trained_model(self, client: State, message: State) -> Tensor:
        return client.theta

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.w

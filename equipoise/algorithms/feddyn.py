"""FedDyn: a regulariser that changes from round to round, so that clients' optima move to the common one."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Positive
from equipoise.state import State, Upload, Uploads


class FedDyn(Algorithm):
    """One global model; a client minimises f_k(v) - <g_k, v> + alpha/2 |v - theta|^2, where g_k adds up its past.

    theta: the model that is sent; theta_k: client k's; g_k: the gradient of its loss at its last model, as far as
    training was exact; h: the mean of g_k over all clients; gamma: the mean of the models of the last round; m: the
    number of clients (`clients`). All clients have the same weight. In the limit theta and gamma are equal. It is
    FedADMM with rho = alpha / m, except that absent clients do not count in gamma.
    """

    paper: ClassVar[str] = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Alg. 1"

    alpha: Positive = 0.01
    "strength of the pull towards the received model; small values let updates pile up, so the limit 0 is not FedAvg"
    predict: Literal["mean", "sent"] = "mean"
    "the global model: gamma, of which the paper's theorem speaks and whose like its code scores; or theta"

    def init_server(self, start: Start) -> State:
        clients = start.w0.new_tensor([start.clients])
        return State(theta=start.w0, gamma=start.w0, h=torch.zeros_like(start.w0), clients=clients)

    def init_client(self, start: Start) -> State:
        return State(g=torch.zeros_like(start.w0))

    def broadcast(self, server: State, client: int) -> State:
        return State(theta=server.theta)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta, g, alpha = down.theta, client.g, self.alpha
        theta_k = data.descend(theta, pull=lambda v: alpha * (v - theta) - g)
        return State(g=g - alpha * (theta_k - theta)), Upload(State(theta=theta_k), reference=down)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        gamma, before = reduce(uploads).theta, server.clients
        m = before.clamp(min=max(uploads.who) + 1)  # clients that join later begin with g_k = 0
        h = before / m * server.h - self.alpha * len(uploads) / m * (gamma - server.theta)
        return State(theta=gamma - h / self.alpha, gamma=gamma, h=h, clients=m)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.theta, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.gamma if self.predict == "mean" else server.theta

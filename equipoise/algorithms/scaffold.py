"""SCAFFOLD: control variates correct the drift of clients in local training."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms._plain_sgd import check_plain_sgd
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Positive
from equipoise.state import State, Upload, Uploads


class Scaffold(Algorithm):
    """One global model; every local step is corrected by the difference of the mean gradient and the client's own.

    x: the global model; y_i: client i's model; c_i: its control variate, an estimate of its gradient; c: the mean of
    all c_i; K_i: the number of local steps; eta_g: `server_lr`; m: the number of clients (`clients`). All clients have
    the same weight, so that the mean of the clients' losses is minimised. Every c_i is zero at first.
    """

    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, ICML 2020, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("x",)

    server_lr: Positive = 1.0
    "step size of the server from the last global model towards the clients' mean; 1: the mean itself"
    option: Literal["I", "II"] = "II"
    "the new control variate: the gradient at the received model, one more pass (I); or the mean of the steps (II)"

    def model_post_init(self, _: object) -> None:
        once = self.option == "I"
        why = "adds a correction to the steps of SGD" if once else "finds the mean gradient from where SGD has led"
        check_plain_sgd(self, why, momentum=once, clip=once)

    def init_server(self, start: Start) -> State:
        return State(x=start.w0, c=torch.zeros_like(start.w0), clients=start.w0.new_tensor([start.clients]))

    def init_client(self, start: Start) -> State:
        return State(c=torch.zeros_like(start.w0))

    def broadcast(self, server: State, client: int) -> State:
        return State(x=server.x, c=server.c)

    def origin(self, server: State) -> State:
        return State(x=server.x, c=torch.zeros_like(server.c))  # c: a change of the variate

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        x, c, c_i = down.x, down.c, client.c
        y_i = data.descend(x, pull=lambda _: c - c_i)  # line 10
        if self.option == "I":
            new = data.full_gradient(x)
        else:
            far = data.local_steps * data.lr
            new = torch.where(far > 0, c_i - c + (x - y_i) / far, c_i)  # line 12
        return State(c=new), Upload(State(x=y_i, c=new - c_i), reference=State(x=x))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        mean, before = reduce(uploads), server.clients
        m = before.clamp(min=max(uploads.who) + 1)  # clients that join later begin with c_i = 0
        x = mean.x if self.server_lr == 1 else server.x + self.server_lr * (mean.x - server.x)
        return State(x=x, c=before / m * server.c + len(uploads) / m * mean.c, clients=m)  # lines 16 and 17

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.x, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.x

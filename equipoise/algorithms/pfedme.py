"""pFedMe: Moreau envelopes minimised by gradient steps."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.envelope import Envelope
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count, Positive
from equipoise.state import State, Upload, Uploads


class PFedMe(Envelope):
    """Personal models near a global model, which takes gradient steps towards them (pFedMe).

    theta: the personal model; w_i: the client's copy of the global model w; eta: its learning rate (`global_lr`);
    R: `local_rounds`; K: `inner_steps`.
    """

    paper: ClassVar[str] = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    lam: Positive = 15.0
    "strength of the pull of the personal model towards the client's copy of the global model"
    global_lr: Positive = 0.005
    "learning rate of the client's copy of the global model"
    local_rounds: Count = 20
    "steps of that copy in a round, each after an update of the personal model"
    inner_steps: Annotated[int, Field(ge=0, le=100_000)] = 5
    "steps of the personal model on one batch before each step of the copy; 0: `epochs` passes over all data"
    beta: Positive = 1.0
    "step size of the server from the last global model towards the clients' mean; 1: the mean itself"

    def init_server(self, start: Start) -> State:
        return State(w=self.seen(start.w0, start.seed))

    def init_client(self, start: Start) -> State:
        return State(theta=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i, theta = down.w, client.theta
        for r in range(self.local_rounds):
            theta = self._solve(theta, w_i, data, r)
            w_i = w_i - self.global_lr * self.lam * (w_i - self.seen(theta, data.seed))  # Eq. 8
        return State(theta=theta), Upload(State(w=w_i), reference=down)

    def _solve(self, theta: Tensor, w_i: Tensor, data: LocalData, r: int) -> Tensor:
        """Minimise f(theta) + lam/2 ||theta - w_i||^2 approximately, starting at the last solution (Eq. 7)."""

        def pull(theta: Tensor) -> Tensor:
            return self.pull(theta, w_i, data)

        if self.inner_steps:
            return data.descend(theta, pull=pull, steps=1, repeat=self.inner_steps, stream=r)
        return data.descend(theta, pull=pull, stream=r)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return State(w=(1 - self.beta) * server.w + self.beta * reduce(uploads).w)

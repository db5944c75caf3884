"""Per-FedAvg: a global model from which a gradient step or two lead to a good personal one."""

from typing import ClassVar, Literal

from torch import Tensor

from equipoise.algorithms._plain_sgd import check_plain_sgd
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import BatchGradient, LocalData, Start
from equipoise.optimizers import moved
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class PerFedAvg(Algorithm):
    """Model-agnostic meta-learning: minimises the mean of f_i(w - alpha grad f_i(w)); alpha = 0 is FedAvg.

    w: the global model; w_i: client i's; u: w_i after a step of rate alpha; q: the gradient at u; beta: the rate of
    training, `lr`. Each step takes 2 (FO) or 3 (HF) batches, for as many steps as FedAvg makes. All clients have the
    same weight. Which delta the paper's tables were made with is not certain.
    """

    paper: ClassVar[str] = "Fallah et al., Personalized FL with Theoretical Guarantees, NeurIPS 2020, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    alpha: NonNegative = 0.01
    "rate of the inner step, and of the steps that make a personal model"
    version: Literal["FO", "HF"] = "FO"
    "second derivatives: dropped (FO), or by a difference of two gradients (HF)"
    delta: Positive = 0.001
    "with HF, how far apart the two gradients are, in units of q"
    personal_steps: Count = 1
    "number of steps, on one batch each, that make a personal model"

    def model_post_init(self, _: object) -> None:
        check_plain_sgd(self, "takes gradients after a step of plain SGD")

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        def step(s: State, grad: BatchGradient) -> State:
            u = moved(s.w, grad(s.w, 1), self.alpha)
            q = grad(u)  # on FedAvg's batches: with alpha = 0 its steps are the same
            if self.version == "HF":  # minus alpha times the Hessian times q
                far = self.delta * q
                q = q - self.alpha / (2 * self.delta) * (grad(s.w + far, 2) - grad(s.w - far, 2))
            return State(w=moved(s.w, q, data.lr))

        w_i = data.walk(State(w=down.w), step, batches=2 if self.version == "FO" else 3).w
        return client, Upload(State(w=w_i), reference=down)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.w, lr=self.alpha, steps=self.personal_steps)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self.personal_model(client, down, data)

    def global_model(self, server: State) -> Tensor:
        return server.w

"""FedNova: clients that make different numbers of steps count by the direction of their updates."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms._plain_sgd import check_plain_sgd
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class FedNova(Algorithm):
    """FedAvg with normalised updates; with the same number of steps everywhere it is FedAvg.

    x: the global model; w_i: client i's; K_i: its number of steps; a_i: how far a constant gradient of length one would
    lead in these steps, in units of the rate; d_i: its update, divided by a_i; tau: the mean of K_i, or of a_i. Weight
    decay counts as a part of the loss.
    """

    paper: ClassVar[str] = "Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020, Eq. 6"
    averaged: ClassVar[tuple[str, ...]] = ("x",)

    mu: NonNegative = 0.0
    "strength of a proximal term that pulls clients towards the global model"
    tau_eff: Literal["steps", "norm"] = "steps"
    "tau: the mean of K_i, as printed; or of a_i, as the authors' code without a proximal term; equal for plain sgd"

    def model_post_init(self, _: object) -> None:
        check_plain_sgd(self, "computes how far the steps of SGD lead", momentum=True)
        if self.nesterov or (self.momentum and self.mu):
            other = "algorithm.nesterov = true" if self.nesterov else f"algorithm.mu = {self.mu} with momentum"
            raise EquipoiseError(f"{other} is not possible with FedNova, which has no formula for it; leave it out")

    def _norm(self, K: Tensor, eta: float) -> Tensor:
        """Return a_i: plain, with momentum rho, or with the proximal term."""
        rho, eta_mu = self.momentum, eta * self.mu
        if rho:
            return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
        return (1 - (1 - eta_mu) ** K) / eta_mu if eta_mu else K

    def init_server(self, start: Start) -> State:
        return State(x=start.w0)

    def origin(self, server: State) -> None:
        return None  # numbers of steps are no change of anything

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.x, pull=(lambda w: self.mu * (w - down.x)) if self.mu else None)
        K, a = data.local_steps, self._norm(data.local_steps, data.lr)
        d = torch.where(a > 0, (w_i - down.x) / a, 0.0)
        return client, Upload(State(d=d, tau=K if self.tau_eff == "steps" else a), weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        mean = reduce(uploads)
        return State(x=server.x + mean.tau * mean.d)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.x, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.x

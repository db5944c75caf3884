"""FLAME: Moreau envelopes solved by ADMM."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Reduce, Requirements
from equipoise.algorithms.capabilities import ReportsDiagnostics, UsesLastUploads, agreement
from equipoise.algorithms.envelope import Envelope
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class Flame(ReportsDiagnostics, UsesLastUploads, Envelope):
    """Personal models near copies of a global model, on which all clients agree by ADMM (FLAME).

    theta: the personal model; w_i: the client's copy of the global model w; pi: the dual of w_i = w; u: what is sent;
    alpha: the client's weight; lam: strength of the Moreau envelope; rho: the penalty parameter of ADMM.

    Propositions 2 and 3 compare one round with q = 2 lam alpha / (lam alpha + rho) b / (b + lam), for curvature b, with
    q = 1 (pFedMe, Ditto). Proposition 3, the smaller variance of losses over clients, also assumes true models theta_i
    of equal norms, without saying so; with unequal ones the variance may be larger.
    """

    paper: ClassVar[str] = "FLAME: Moreau envelopes solved by ADMM, Algorithm 1"

    rho: Positive = 0.1
    "strength of the pull of the copies towards the global model"
    alpha: Literal["equal", "samples"] = "equal"
    "a client's weight in the objective: 1 / clients, or its share of all samples"
    anchor: Literal["own", "global"] = "own"
    "what local training is pulled to: the client's own copy w_i (Algorithm 1), or w as received (the published code)"
    epsilon: NonNegative = 0.0
    "squared norm of the local objective's gradient at which local training stops; 0: train for `epochs` passes"
    nu: Annotated[float, Field(gt=0, lt=1)] = 0.9
    "factor by which epsilon shrinks each time a client takes part"
    most_epochs: Count = 50
    "largest number of passes in a round, if epsilon is not reached before"

    @property
    def requires(self) -> Requirements:
        return Requirements(total_samples=self.alpha == "samples")

    def init_server(self, start: Start) -> State:
        return State(w=self.seen(start.w0, start.seed))

    def init_client(self, start: Start) -> State:
        w0 = self.seen(start.w0, start.seed)
        of_all = start.w0.new_tensor([start.clients if self.alpha == "equal" else start.samples])
        state = State(theta=start.w0, w_i=w0, pi=torch.zeros_like(w0), of_all=of_all)
        return State(state, epsilon=start.w0.new_tensor([self.epsilon])) if self.epsilon else state

    def initial_upload(self, start: Start) -> State:
        return State(u=self.seen(start.w0, start.seed))  # line 1: u = w_i + pi / rho, with pi = 0

    def origin(self, server: State) -> State:
        return State(u=server.w)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        lam, rho = self.lam, self.rho
        w, pi = down.w, client.pi
        alpha = (1 if self.alpha == "equal" else data.size) / client.of_all
        anchor = client.w_i if self.anchor == "own" else w

        def pull(theta: Tensor) -> Tensor:
            return self.pull(theta, anchor, data)

        kept = State(client)
        if self.epsilon:
            kept["epsilon"] = self.nu * client.epsilon  # Eq. 18
            theta = self._inexact(client.theta, pull, alpha, kept.epsilon, data)
        else:
            theta = data.descend(client.theta, pull=pull)  # lines 9 to 13
        w_i = (lam * alpha * self.seen(theta, data.seed) + rho * w - pi) / (lam * alpha + rho)  # Eq. 12
        pi = pi + rho * (w_i - w)  # Eq. 13
        u = w_i + pi / rho  # line 16
        return State(kept, theta=theta, w_i=w_i, pi=pi), Upload(
            State(u=u), reference=State(u=client.w_i + client.pi / rho)
        )

    def _inexact(
        self, theta: Tensor, pull: Callable[[Tensor], Tensor], alpha: Tensor, epsilon: Tensor, data: LocalData
    ) -> Tensor:
        """Train until Eq. 17 holds: ||alpha (grad f(theta) + lam (theta - w_i))||^2 <= epsilon, or with w for w_i."""
        active = torch.ones_like(data.size, dtype=torch.bool)
        for k in range(self.most_epochs):
            gradient = alpha * (data.full_gradient(theta, active=active) + pull(theta))
            active = active & (gradient.square().sum(-1, keepdim=True) > epsilon)
            if not active.any():
                break
            theta = data.descend(theta, pull=pull, epochs=1, stream=k, active=active)
        return theta

    def unmet_condition(self, clients: int) -> str | None:
        """Return in a sentence what Theorems 1 to 4 ask of rho and does not hold; None if it does.

        They ask for (lam alpha)^2 (1 + rho) / rho^2 <= (lam alpha + rho) / 2, whence rho >= lam alpha.
        With alpha = "samples", alpha is the clients' mean here; the largest client needs a larger rho. They also
        ask for (lam alpha)^2 (1 - rho^2) / rho^2 > (L alpha + rho) / 2, which is not checked, because the smoothness L
        of the losses is not known.

        Args:
            clients: number of clients.
        """
        rho, pull = self.rho, self.lam / clients
        left, right = pull**2 * (1 + rho) / rho**2, (pull + rho) / 2
        if left <= right:
            return None
        least = max(np.roots([1, pull, -2 * pull**2, -2 * pull**2]).real)  # the only positive root
        return (
            f"algorithm.rho = {rho:g} is below the range of FLAME's convergence theorems, as it is in the paper's own "
            f"experiments: (lam alpha)^2 (1 + rho) / rho^2 = {left:.3g} exceeds (lam alpha + rho) / 2 = {right:.3g} "
            f"(alpha = 1 / {clients}); rho >= {1.005 * least:.3g} is in the range, and a larger rho is often slower"
        )

    def diagnostics(self, client: State, down: State) -> State:
        return agreement(client.w_i, down.w, client.pi)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return State(w=reduce(uploads).u)  # Eq. 14: the mean of all clients' last u, not only of the round's

"""FeDEQ: a shared body, on which clients agree by ADMM, and personal heads."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import HasConsensusModel, ReportsDiagnostics, UsesLastUploads, agreement
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class FeDEQ(HasConsensusModel, ReportsDiagnostics, UsesLastUploads, Algorithm):
    """Clients agree by ADMM on the body, with or without an equilibrium layer, and keep personal heads (FeDEQ).

    theta: the consensus on the body; theta_i: the client's copy of it; lam_i: the dual of theta_i = theta; w_i: the
    client's head; n_i: its number of samples; rho: the penalty parameter. Personal models contain theta_i, consensus
    models theta instead.

    begin = "published" is the rule of the authors' code: theta_i is kept if the client took part in the round before
    and set back to theta if not, the head is fitted to that start, and the plain mean is weighted by n_i.
    """

    paper: ClassVar[str] = "FeDEQ: a shared equilibrium representation learned by ADMM consensus, Algorithm 1"

    rho: NonNegative = 0.01
    'strength of the pull of the copies towards the consensus; above 0 with average = "dual"'
    average: Literal["plain", "dual"] = "plain"
    "plain: mean of the round's theta_i, as in the paper; dual: mean of all clients' last theta_i + lam_i / rho"
    begin: Literal["own", "consensus", "published"] = "own"
    "start of theta_i in a round: its own, as in Algorithm 1; the received theta; or the rule of the published code"
    head_epochs: Count = 3
    "passes that fit the head, before those that train the body"
    head_lr: Positive | None = None
    "learning rate of the head; by default lr"
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 5
    "passes over the client's training data in a round that train the body"

    def model_post_init(self, _: object) -> None:
        if self.average == "dual" and not self.rho:
            raise EquipoiseError(
                'algorithm.rho = 0 is not allowed with algorithm.average = "dual", which divides by it; give rho > 0, '
                'or average = "plain"'
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True)

    def init_server(self, start: Start) -> State:
        return State(theta=start.space.body(start.w0))

    def init_client(self, start: Start) -> State:
        theta = start.space.body(start.w0)
        state = State(theta_i=theta, lam_i=torch.zeros_like(theta), w_i=start.space.head(start.w0))
        # The others do not need it, and their states stay those of earlier versions.
        return State(state, last_round=start.w0.new_zeros(1)) if self.begin == "published" else state

    def initial_upload(self, start: Start) -> State | None:
        return State(theta=start.space.body(start.w0)) if self.average == "dual" else None

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta, rho = down.theta, self.rho
        first = self._start(client, theta, data)
        v = data.descend(  # line 8: w_i on L_i(theta, .), with the received theta fixed
            data.space.join(first if self.begin == "published" else theta, client.w_i),
            part="head",
            epochs=self.head_epochs,
            lr=self.head_lr,
            stream=1,
        )
        w_i = data.space.head(v)
        v = data.descend(  # line 9: theta_i on the augmented Lagrangian
            data.space.join(first, w_i),
            part="body",
            pull=lambda v: client.lam_i + rho * (data.space.body(v) - theta),
        )
        theta_i = data.space.body(v)
        lam_i = client.lam_i + rho * (theta_i - theta)  # line 10
        kept = State(client, theta_i=theta_i, lam_i=lam_i, w_i=w_i)
        if self.begin == "published":
            kept["last_round"] = torch.full_like(client.last_round, data.round)
        if self.average == "plain":
            weight = data.size if self.begin == "published" else None
            return kept, Upload(State(theta=theta_i), reference=down, weight=weight)
        # What the client sent last, wherever this round began; before its first round, `initial_upload`.
        before = State(theta=client.theta_i + client.lam_i / rho)
        return kept, Upload(State(theta=theta_i + lam_i / rho), reference=before)

    def _start(self, client: State, theta: Tensor, data: LocalData) -> Tensor:
        """Return where the training of theta_i begins."""
        if self.begin == "own":
            return client.theta_i
        if self.begin == "consensus":
            return theta
        return torch.where(client.last_round == data.round - 1, client.theta_i, theta)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)  # line 4

    def diagnostics(self, client: State, down: State) -> State:
        return agreement(client.theta_i, down.theta, client.lam_i)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(client.theta_i, client.w_i)

    def consensus_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(down.theta, client.w_i)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = data.space.join(down.theta, client.w_i)
        return data.descend(w, part="head", epochs=self.adapt_epochs, lr=self.head_lr)

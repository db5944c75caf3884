"""FedFomo: every client mixes the models of those others that do well on its validation samples."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class FedFomo(Algorithm):
    """The server sends every client models of others, which it weighs by how much they lower its validation loss.

    theta: a client's last trained model; rho: what it began that training with; w_n: the weight of model n, its gain
    L(rho) - L(theta_n) on validation samples over its distance from rho; A: the server's table of the weights that
    client i (row) has given to n so far, by which it chooses `M` others, the best ones or, with probability epsilon,
    random ones. A client's own model is a candidate as well. Without validation samples a client trains alone.
    """

    paper: ClassVar[str] = "Zhang et al., Personalized FL with First Order Model Optimization, ICLR 2021"

    M: Annotated[int, Field(ge=0, le=10_000)] = 5
    "number of others whose models a client gets; 0 is Local"
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.3
    "probability in the first round that a model is sent at random"
    epsilon_decay: NonNegative = 0.05
    "by how much epsilon falls in every round"
    absent: bool = True
    "whether models of clients that took no part in the last round are sent; the authors' code does not"

    @property
    def requires(self) -> Requirements:
        return Requirements(validation=True)

    def init_server(self, start: Start) -> State:
        m = start.clients
        return State(
            theta=start.w0.expand(m, -1).clone(),
            A=torch.eye(m, dtype=start.w0.dtype, device=start.w0.device),
            heard=start.w0.new_zeros(m),  # the round in which each client's model came; 0 if none has
            round=start.w0.new_zeros(1),
            seed=torch.tensor([start.seed], device=start.w0.device),
        )

    def _chosen(self, server: State, client: int) -> list[int]:
        """Return the clients whose models a client gets next."""
        m, t = len(server.A), int(server.round)
        newcomer = client >= m  # it has given no weights: those are best that all others weigh most
        score = (server.A.sum(0) if newcomer else server.A[client]).tolist()
        last = server.heard.tolist()
        others = [j for j in range(m) if j != client and last[j] and (self.absent or last[j] == t)]
        best = sorted(others, key=lambda j: (-score[j], j))[: self.M]
        if not newcomer:
            rng = randomness.generator(int(server.seed), "fedfomo", t, client)
            kept = [j for j in best if rng.random() >= self.epsilon - self.epsilon_decay * t]
            rest = [int(j) for j in rng.permutation(others) if j not in kept]
            best = kept + rest[: len(best) - len(kept)]
        return best

    def broadcast(self, server: State, client: int) -> State:
        chosen = self._chosen(server, client)
        missing = [0] * (self.M - len(chosen))  # any model in place of those that are not known yet
        known = server.heard.new_tensor([1] * len(chosen) + missing)
        rows = torch.tensor(chosen + missing, dtype=torch.long, device=known.device)
        return State(theta=server.theta[rows], known=known)

    def origin(self, server: State) -> None:
        return None  # what a client begins with is its own

    def init_client(self, start: Start) -> State:
        return State(theta=start.w0, rho=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        rho, w = self._mixed(client, down, data)
        theta = data.descend(rho)
        return State(theta=theta, rho=rho), Upload(State(theta=theta, w=w))

    def _mixed(self, client: State, down: State, data: LocalData) -> tuple[Tensor, Tensor]:
        """Return what the client begins with, and its weights for the models that it got."""
        before, count = data.loss(client.rho, of="validation"), down.known.shape[-1]
        candidates = [(down.theta[..., n, :], down.known[..., n : n + 1]) for n in range(count)]
        candidates.append((client.theta, torch.ones_like(before)))
        weights = []
        for theta_n, known in candidates:
            gain = before - data.loss(theta_n, of="validation")
            w_n = gain / torch.linalg.vector_norm(theta_n - client.rho, dim=-1, keepdim=True)
            weights.append(torch.where((known > 0) & w_n.isfinite(), w_n, 0.0))  # at no distance there is no gain
        w = torch.cat(weights, dim=-1)
        share = w.clamp(min=0)
        total = share.sum(-1, keepdim=True)
        share = share / torch.where(total > 0, total, 1.0)
        mixed = torch.zeros_like(client.theta)
        for n, (theta_n, _) in enumerate(candidates):
            mixed = mixed + share[..., n : n + 1] * theta_n
        return torch.where(total > 0, mixed, client.theta), w[..., :count]

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        theta, A, heard, t = server.theta.clone(), server.A.clone(), server.heard.clone(), server.round + 1
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            if who < len(A):
                theta[who], heard[who] = upload.message.theta, t
                for j, w_j in zip(self._chosen(server, who), upload.message.w, strict=False):
                    A[who, j] += w_j
        return State(server, theta=theta, A=A, heard=heard, round=t)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.theta

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(self._mixed(client, down, data)[0], epochs=self.adapt_epochs)

"""FedPAC: features of a class are aligned across clients, and each head is a combination of the heads that help it."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import ReducesGroups
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.representations.points import HEAD
from equipoise.representations.terms import LossTerm
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class Alignment(LossTerm):
    """R: the squared distance of features from the centre of their class."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        return given.weight[y] * (h[0] - given.c[y]).square().mean(-1)


class FedPAC(ReducesGroups, Algorithm):
    """A common extractor whose features are pulled towards common class centres; heads combine several clients' heads.

    theta: the extractor; phi_i: client i's head; c: the class centres over all clients; mu_i: the client's own, each
    times the class's share of its samples; V_i: the variance of its features; alpha_ij: the weight of phi_j in phi_i.
    """

    paper: ClassVar[str] = "Xu et al., Personalized FL with Feature Alignment and Classifier Collaboration, ICLR 2023"

    lam: NonNegative = 1.0
    "strength of the pull of features towards the centre of their class"
    head_epochs: Count = 1
    "passes that train the head, before those that train the extractor"
    head_lr: Positive | None = None
    "learning rate of the head; by default lr"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True, labels=True)

    def init_server(self, start: Start) -> State:
        classes, width = start.outputs, start.point(HEAD).width
        return State(
            theta=start.space.body(start.w0),
            phi=start.space.head(start.w0).expand(start.clients, -1).clone(),  # head of each client, by its number
            c=start.w0.new_zeros((classes, width)),
            known=start.w0.new_zeros(classes),
        )

    def broadcast(self, server: State, client: int) -> State:
        newcomer = client >= len(server.phi)  # no combination is known for it
        phi = server.phi.mean(0) if newcomer else server.phi[client]
        return State(theta=server.theta, phi=phi, c=server.c, known=server.known)

    def origin(self, server: State) -> None:
        return None  # statistics of a client are not known beforehand

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.space.join(down.theta, down.phi)
        mu, V = self._statistics(w, data)  # with the extractor as received
        w = data.descend(w, part="head", epochs=self.head_epochs, lr=self.head_lr, stream=1)
        pull = Alignment(given=State(c=down.c, weight=self.lam * down.known))
        w = data.descend(w, part="body", term=pull if self.lam else None)
        sums = data.class_sums(w, _with_count)
        message = State(theta=data.space.body(w), phi=data.space.head(w), sums=sums[..., :-1], n=sums[..., -1])
        before = State(theta=down.theta, phi=down.phi)
        return client, Upload(State(message, mu=mu, V=V), reference=before, weight=data.size)

    def _statistics(self, w: Tensor, data: LocalData) -> tuple[Tensor, Tensor]:
        n = data.size
        sums = data.class_sums(w, lambda h: torch.cat([h, h.square().sum(-1, keepdim=True)], dim=1)) / n.unsqueeze(-1)
        mu, squares = sums[..., :-1], sums[..., -1]
        return mu, (squares.sum(-1, keepdim=True) - mu.square().sum((-2, -1)).unsqueeze(-1)) / n

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        theta = reduce(uploads).theta
        seen = reduce(uploads.only("sums", "n"))
        c = torch.where(seen.n[:, None] > 0, seen.sums / seen.n[:, None].clamp(min=1e-12), server.c)
        phi, sent = server.phi.clone(), [upload.message for upload in uploads.uploads]
        heads, alpha = torch.stack([m.phi for m in sent]), combination([m.mu for m in sent], [m.V for m in sent])
        for who, mixed in zip(uploads.who, alpha.to(heads.dtype).to(heads.device) @ heads, strict=True):
            if who < len(phi):
                phi[who] = mixed
        return State(theta=theta, phi=phi, c=c, known=torch.maximum(server.known, (seen.n > 0).to(c.dtype)))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(down.theta, down.phi)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = data.space.join(down.theta, down.phi)
        return data.descend(w, part="head", epochs=self.adapt_epochs, lr=self.head_lr)


def _with_count(h: Tensor) -> Tensor:
    return torch.cat([h, torch.ones_like(h[:, :1])], dim=1)


def combination(mu: Sequence[Tensor], V: Sequence[Tensor]) -> Tensor:
    """Return alpha, one row per client: the weights that minimise the expected error of the combined head.

    Row i minimises sum_j alpha_j^2 V_j + |sum_j alpha_j (mu_i - mu_j)|^2 over non-negative weights that sum to one.
    """
    from scipy.optimize import nnls

    flat = torch.stack([m.flatten() for m in mu]).cpu().double().numpy()
    variance = torch.cat([v.reshape(1) for v in V]).cpu().double().clamp(min=0).numpy()
    found = np.empty((len(mu), len(mu)))
    for i, row in enumerate(found):
        apart = flat[i] - flat
        P = np.diag(variance) + apart @ apart.T
        values, vectors = np.linalg.eigh(P / max(np.trace(P), 1e-300) * len(mu))
        root = np.sqrt(values.clip(min=0))[:, None] * vectors.T
        # For weights of sum t in a fixed direction the form is q t^2, and min over t of q t^2 + (t - 1)^2 grows with
        # q. So least squares with one more row, which asks for the sum one, finds the best direction.
        alpha, _ = nnls(np.vstack([root, np.ones(len(mu))]), np.append(np.zeros(len(mu)), 1.0))
        row[:] = alpha / alpha.sum()
    return torch.from_numpy(found)

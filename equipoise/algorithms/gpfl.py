"""GPFL: features are changed in two ways, to learn from them what is common to all clients and what is personal."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.own_modules import HasOwnModules, OwnHead, OwnTensor
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import HEAD, within_head
from equipoise.representations.terms import BatchTerm, LossTerm
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class Embedding(OwnTensor):
    """GCE, the global category embedding: E, a vector for every class."""

    def forward(self, h: Tensor) -> Tensor:
        """Return the cosines of features with the classes' vectors."""
        return F.normalize(h, dim=-1) @ F.normalize(self.value, dim=-1).mT


class ConditionalValve(nn.Module):
    """CoV: relu((gamma(c) + 1) h + beta(c)) for a condition c."""

    def __init__(self, d: int):
        super().__init__()
        self.gamma, self.beta = (nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d)) for _ in ("gamma", "beta"))

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        """Return the changed features."""
        c = c.unsqueeze(0)
        found: Tensor = ((self.gamma(c) + 1) * h + self.beta(c)).relu()
        return found


class Condition(OwnTensor):
    """A condition, which does not move while a client trains."""

    def forward(self, h: Tensor, valve: ConditionalValve) -> Tensor:
        """Return the features under this condition."""
        found: Tensor = valve(h, self.value)
        return found


class Generic(Condition):
    """g, the mean of the classes' vectors."""


class Personal(Condition):
    """p, their mean by the client's numbers of samples."""


class Conditioned(nn.Module):
    """The model's head, which reads the features under the personal condition."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        d, zero = head.in_features, head.weight.detach().new_zeros(head.in_features)
        self.head, self.embedding = OwnHead(head), Embedding(torch.randn(head.out_features, d))
        self.valve, self.generic, self.personal = ConditionalValve(d), Generic(zero), Personal(zero.clone())

    def forward(self, h: Tensor) -> Tensor:
        """Return the outputs, given what the body makes."""
        self.embedding(self.generic(h, self.valve))  # to be read by the term
        found: Tensor = self.head(self.personal(h, self.valve))
        return found


class Guidance(BatchTerm):
    """The cross-entropy of the cosines of h_G with E, and lam times the Frobenius norm of h_G - E_y, E as received."""

    @staticmethod
    def whole(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, weights: Tensor, given: State) -> Tensor:
        cosines, h_G = h
        angle = (weights * F.cross_entropy(cosines, y, reduction="none")).sum()
        apart = (weights > 0).unsqueeze(-1) * (h_G - given.E[y])
        size: Tensor = given.lam * torch.linalg.vector_norm(apart)
        return angle + size.sum()


class GPFL(HasOwnModules, Algorithm):
    """A valve changes features under a generic and under a personal condition; only the latter reach the own head.

    theta: the common body; E: a vector for every class (GCE); V: the valve (CoV), two small networks; phi: a client's
    head; g, p: the conditions, means of the rows of E as received, equally and by the client's samples of each class;
    h_P, h_G: the features under p and under g. The loss is that of phi(h_P) and a guidance of h_G by E: an angle, and
    lam times a distance, which is not divided by the size of the batch, so that lam goes with its root. g and p are of
    the E just received; published code takes the client's own old one, and zeros in the first round. Some code divides
    p by the number of classes once more, and which of the two the paper prints is not certain; here p is a mean.
    """

    paper: ClassVar[str] = "Zhang et al., GPFL: Learning Generic and Personalized Feature Information, ICCV 2023"
    averaged: ClassVar[tuple[str, ...]] = ("theta", "E", "V")

    lam: NonNegative = 0.01
    "strength of the distance between features and the vector of their class"
    mu: NonNegative = 0.1
    "weight decay of E and V alone"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True, labels=True)

    def around(self, head: nn.Linear) -> nn.Module:
        return Conditioned(head)

    def init_server(self, start: Start) -> State:
        w0, space = start.w0, start.space
        if start.point(HEAD).width != w0[space.span(Generic)].numel():
            raise EquipoiseError("GPFL needs a model whose head reads one vector per sample")
        E = w0[space.span(Embedding)].unflatten(-1, (start.outputs, -1))
        return State(theta=space.body(w0), E=E, V=w0[space.span(ConditionalValve)])

    def init_client(self, start: Start) -> State:
        return State(phi=start.w0[start.space.span(OwnHead)])

    @staticmethod
    def _whole(phi: Tensor, down: State, data: LocalData) -> Tensor:
        share = data.class_counts / data.size.clamp(min=1)
        g, p = down.E.mean(-2), (share.unsqueeze(-1) * down.E).sum(-2)
        return ParameterSpace.join(down.theta, phi, down.E.flatten(-2), down.V, g, p)

    def _term(self, down: State, data: LocalData) -> LossTerm | None:
        given = State(E=down.E, lam=torch.full_like(data.size, self.lam))
        return Guidance((within_head("embedding"), within_head("generic")), given=given)

    def _trained(self, space: ParameterSpace) -> Tensor:
        return ~space.mask(Condition)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        space = data.space
        decayed = self.mu * (space.mask(Embedding) | space.mask(ConditionalValve)).to(down.E.dtype)
        w = data.descend(
            self._whole(client.phi, down, data),
            part=self._trained(space),
            pull=(lambda w: decayed * w) if self.mu else None,
            term=self._term(down, data),
        )
        E = w[..., space.span(Embedding)].unflatten(-1, (data.outputs, -1))
        message = State(theta=space.body(w), E=E, V=w[..., space.span(ConditionalValve)])
        return State(phi=w[..., space.span(OwnHead)]), Upload(message, reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._whole(client.phi, down, data)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = self._whole(client.phi, down, data)
        return data.descend(w, part=data.space.mask(OwnHead), epochs=self.adapt_epochs)

"""FedCP: a small network decides for every sample which features the common head reads, and which the client's own."""

import copy
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.own_modules import HasOwnModules, OwnHead, OwnTensor
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import HEAD
from equipoise.representations.terms import BatchTerm
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads

_WIDTHS = (10.0, 15.0, 20.0, 50.0)  # a in the kernels exp(-|x - y|^2 / (2a))


class PersonalHead(OwnHead):
    """W_p, which stays with the client."""


class GlobalHead(OwnHead):
    """W_g, which does not move while a client trains."""


class Policy(nn.Module):
    """The conditional policy network Theta: from h and the client's context to the fractions r and s = 1 - r."""

    generator: torch.Generator | None = None
    "source of random numbers; by default torch's global one"

    def __init__(self, d: int, noise: bool = False):
        super().__init__()
        self.draws = noise
        self.layers = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and s."""
        scores = self.layers(h).unflatten(-1, (2, -1))
        if self.draws and self.training:
            source = scores.device if self.generator is None else self.generator.device
            drawn = torch.empty(scores.shape, dtype=scores.dtype, device=source).exponential_(generator=self.generator)
            scores = scores - drawn.log().to(scores.device)
        r, s = scores.softmax(-2).unbind(-2)
        return r, s


class Context(OwnTensor):
    """v, which tells the policy whose features it sees."""

    def forward(self, h: Tensor) -> Tensor:
        """Return h times v, coordinate by coordinate."""
        return h * self.value


class Separated(nn.Module):
    """W_p(r h) + W_g(s h), in place of the model's head."""

    def __init__(self, head: nn.Linear, noise: bool = False):
        super().__init__()
        self.own, self.common = PersonalHead(head), GlobalHead(copy.deepcopy(head))
        self.policy = Policy(head.in_features, noise)
        self.context = Context(head.weight.detach().new_zeros(head.in_features))

    def forward(self, h: Tensor) -> Tensor:
        """Return the outputs, given what the body makes."""
        r, s = self.policy(self.context(h))
        found: Tensor = self.own(r * h) + self.common(s * h)
        return found


class Discrepancy(BatchTerm):
    """MMD^2 between the features of a batch and those that the body as received makes of it."""

    @staticmethod
    def whole(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, weights: Tensor, given: State) -> Tensor:
        x, z = h[0], probed[0]
        found = _kernel(x, x) + _kernel(z, z) - 2 * _kernel(x, z)
        return (given.lam * (weights @ found @ weights)).sum()


def _kernel(x: Tensor, z: Tensor) -> Tensor:
    """Return the sum of normal kernels of all pairs."""
    apart = (x.unsqueeze(1) - z.unsqueeze(0)).square().sum(-1)
    return torch.stack([(-apart / (2 * a)).exp() for a in _WIDTHS]).sum(0)


class FedCP(HasOwnModules, Algorithm):
    """A conditional policy divides the features of every sample between the common head and the client's own.

    theta: the body; W_g: the common head; W_p: a client's own; Theta: the policy network; v: the client's context, the
    sum of the rows of its W_p at the start of the round, at length one; r and s = 1 - r: the fractions of each feature
    that W_p and W_g read. The body, W_p and Theta are trained, W_g is not, and (W_p + W_g)/2 is sent. The policy is a
    plain softmax, as we read the paper, which is not certain; published code draws Gumbel noise in it, in evaluation
    too, so that its scores are random. There the first context is random; here it is that of the initial head.
    """

    paper: ClassVar[str] = (
        "Zhang et al., FedCP: Separating Feature Information for PFL via Conditional Policy, KDD 2023"
    )
    averaged: ClassVar[tuple[str, ...]] = ("theta", "W_g", "Theta")

    lam: NonNegative = 5.0
    "strength with which features are kept near those of the received body"
    noise: bool = False
    "whether the policy has Gumbel noise in training, as in published code; clients are then not trained in stacks"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True)

    def around(self, head: nn.Linear) -> nn.Module:
        return Separated(head, self.noise)

    def init_server(self, start: Start) -> State:
        d = start.w0[start.space.span(Context)].numel()
        if start.point(HEAD).width != d:
            raise EquipoiseError("FedCP needs a model whose head reads one vector per sample")
        W_g, Theta = (start.w0[start.space.span(part)] for part in (GlobalHead, Policy))
        return State(theta=start.space.body(start.w0), W_g=W_g, Theta=Theta)

    def init_client(self, start: Start) -> State:
        W_p = start.w0[start.space.span(PersonalHead)]
        return State(W_p=W_p, v=_context(W_p, start.space))

    @staticmethod
    def _whole(down: State, W_p: Tensor, v: Tensor) -> Tensor:
        return ParameterSpace.join(down.theta, W_p, down.W_g, down.Theta, v)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        v = _context(client.W_p, data.space)
        w = self._whole(down, client.W_p, v)
        lam = torch.full_like(data.size, self.lam)
        near = Discrepancy(probes=(w,), given=State(lam=lam)) if self.lam else None
        w = data.descend(w, part=_trained(data.space), term=near)
        W_p, Theta = (w[..., data.space.span(part)] for part in (PersonalHead, Policy))
        message = State(theta=data.space.body(w), W_g=(W_p + down.W_g) / 2, Theta=Theta)
        return State(W_p=W_p, v=v), Upload(message, reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._whole(down, client.W_p, client.v)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = self._whole(down, down.W_g, _context(down.W_g, data.space))
        return data.descend(w, part=_trained(data.space), epochs=self.adapt_epochs)


def _trained(space: ParameterSpace) -> Tensor:
    """Return the mask of what a client trains: all but the common head and the context."""
    return ~(space.mask(GlobalHead) | space.mask(Context))


def _context(W: Tensor, space: ParameterSpace) -> Tensor:
    """Return the sum of the rows of a head's weight, divided by its length."""
    span = space.span(Context)
    d = span.stop - span.start
    total: Tensor = W[..., : W.shape[-1] // d * d].unflatten(-1, (-1, d)).sum(-2)
    length: Tensor = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
    return total / length.clamp(min=1e-12)

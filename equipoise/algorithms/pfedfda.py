"""pFedFDA: heads are made of normal distributions of the features of each class, which clients adapt to their own."""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import ReportsDiagnostics
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.head_moments import Moments
from equipoise.representations.head_problem import HeadProblem
from equipoise.representations.linear_head import LinearHead, linear_head
from equipoise.state import State, Upload, Uploads
from equipoise.torch_device import widened

_FOLDS = 2
_SAME = 1e-9  # losses that differ by less, relatively, are equal
_GRID = tuple(k / 10 for k in range(11))
Share = Annotated[float, Field(ge=0, le=1)]


class Normals(NamedTuple):
    """Normal distributions of features, one for each class, with one covariance."""

    mu: Tensor
    "means, of shape (..., C, d)"
    Sigma: Tensor
    "the covariance, of shape (..., d, d)"

    def head(self, pi: Tensor, eps: float) -> Tensor:
        """Return the linear head of the classes' log densities, as a matrix whose last row is the bias.

        Args:
            pi: the classes' probabilities.
            eps: how far the covariance is drawn towards a multiple of the identity.
        """
        return heads(self.mu.unsqueeze(-3), self.Sigma, pi, eps).squeeze(-3)


def heads(mu: Tensor, Sigma: Tensor, pi: Tensor, eps: float) -> Tensor:
    """Return the heads of several sets of means with one covariance; see `Normals.head`.

    Args:
        mu: the means, of shape (..., K, C, d).
        Sigma: the covariance, of shape (..., d, d).
        pi: the classes' probabilities, of shape (..., C).
        eps: how far the covariance is drawn towards a multiple of the identity.
    """
    K, C, d = mu.shape[-3:]
    level = Sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    drawn = (1 - eps) * Sigma + eps * level * torch.eye(d, dtype=Sigma.dtype, device=Sigma.device)
    solved = torch.linalg.solve_ex(drawn, mu.flatten(-3, -2).mT)[0]  # one factorisation for all means
    weight = solved.unflatten(-1, (K, C)).movedim(-2, -3)
    bias = pi.log().unsqueeze(-2) - (mu.mT * weight).sum(-2) / 2
    return torch.cat([weight, bias.unsqueeze(-2)], dim=-2)


def mixed(own: Tensor, common: Tensor, beta: Tensor | float) -> Tensor:
    """Return beta times a client's own statistic plus 1 - beta times the common one."""
    return beta * own + (1 - beta) * common


class PFedFDA(ReportsDiagnostics, Algorithm):
    """A generative head: class means and one covariance of features, which each client mixes with its own.

    phi: the common body; mu, Sigma: means and covariance of the features of each class; pi: a client's shares of the
    classes; beta: how much of its own mean and covariance a client takes, from 0 to 1 each. A client trains the body
    under the head that mu, Sigma and pi make, then computes its own statistics with the trained body and takes the beta
    of `grid` with the smallest loss on one half of its samples with statistics of the other, and the other way round;
    the authors search by L-BFGS from one half. A class of which it has at most two samples has the common mean.
    Features are those of the trained body; published code collects them in all epochs of training. It also adds `eps`
    to every entry of the covariance and a whole identity to it, where eps times the identity is surely meant; which of
    the two the paper's figures are of is not certain.
    """

    paper: ClassVar[str] = "McLaughlin and Su, Personalized FL via Feature Distribution Adaptation, NeurIPS 2024"
    averaged: ClassVar[tuple[str, ...]] = ("phi",)

    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    "is added to covariances and to shares of classes, and draws covariances towards a multiple of the identity"
    grid: Annotated[tuple[Share, ...], Field(min_length=1)] = _GRID
    "values of beta to choose from, in ascending order; of equal losses the smallest is taken"
    single_beta: bool = False
    "whether means and covariance have the same beta"

    def model_post_init(self, _: Any) -> None:
        if list(self.grid) != sorted(set(self.grid)):
            raise EquipoiseError(f"algorithm.grid = {list(self.grid)} is not allowed; its values must ascend")

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, linear_head=True, labels=True, cross_entropy=True)

    def init_server(self, start: Start) -> State:
        shape = linear_head(start.space)
        if not shape.bias:
            raise EquipoiseError("pFedFDA makes a linear head with a bias, and the model's head has none; give it one")
        d = shape.inputs - 1
        # With means of zero, the body would have no gradient.
        mu = torch.rand(start.outputs, d, generator=randomness.torch_generator(start.seed, "class means"))
        eye = torch.eye(d, dtype=start.w0.dtype, device=start.w0.device)
        return State(phi=start.space.body(start.w0), mu=mu.to(eye), Sigma=eye)

    def init_client(self, start: Start) -> State:
        return State(beta=start.w0.new_zeros(2))

    def origin(self, server: State) -> None:
        return None  # statistics of a client are not known beforehand

    def _head(self, normals: Normals, pi: Tensor, space: ParameterSpace, like: Tensor) -> Tensor:
        return linear_head(space).vector(normals.head(pi, self.eps)).to(like.dtype)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        common = Normals(widened(down.mu), widened(down.Sigma))
        pi = self._shares(widened(data.class_counts))
        w = data.space.join(down.phi, self._head(common, pi, data.space, down.phi))
        w = data.descend(w, part="body")
        adapted, beta = self._adapted(w, common, data)
        mu, Sigma = (t.to(down.phi.dtype) for t in adapted)
        message = State(phi=data.space.body(w), mu=mu, Sigma=Sigma)
        return State(beta=beta.to(down.phi.dtype)), Upload(message, reference=down, weight=data.size)

    def _shares(self, n: Tensor) -> Tensor:
        """Return the classes' shares of the samples, none of them zero."""
        total = n.sum(-1, keepdim=True)
        return (n / total.clamp(min=1) + self.eps) / (total.clamp(max=1) + n.shape[-1] * self.eps)

    def _adapted(self, w: Tensor, common: Normals, data: LocalData) -> tuple[Normals, Tensor]:
        """Return the mixture of the client's statistics and the common ones, and its beta."""
        problem = data.head_problem(w, groups=_FOLDS, order="stratified")
        halves = problem.moments()
        n = halves.xy[..., -1, :].sum(-2)  # numbers of samples by class
        xx, xy, number = (t.sum(-3, keepdim=True) for t in (halves.xx, halves.xy, halves.n))
        every = Moments(xx, xy, number)
        own = _own(every, n > _FOLDS, common, self.eps)
        beta = self._beta(problem, _own(halves, n > _FOLDS, common, self.eps), common, self._shares(n))
        b, c = beta[..., :1].unsqueeze(-1), beta[..., 1:].unsqueeze(-1)
        mu, Sigma = mixed(own.mu.squeeze(-3), common.mu, b), mixed(own.Sigma.squeeze(-3), common.Sigma, c)
        return Normals(mu, Sigma), beta

    def _beta(self, problem: HeadProblem, own: Normals, common: Normals, pi: Tensor) -> Tensor:
        """Return the beta with the smallest loss on each half of the samples, by statistics of the other half.

        Args:
            problem: the client's samples in two halves.
            own: the statistics of each half.
            common: those of all clients.
            pi: the client's shares of the classes.
        """
        members, betas, losses = problem.members, [], []
        for c in self.grid:
            tried = pi.new_tensor([c] if self.single_beta else self.grid)
            mu = mixed(own.mu.unsqueeze(-3), common.mu[..., None, None, :, :], tried[:, None, None])
            Sigma = mixed(own.Sigma, common.Sigma.unsqueeze(-3), c)
            found = heads(mu, Sigma, pi.unsqueeze(-2), self.eps).flip(-4)  # each for the other half
            weights = members.repeat_interleave(len(tried), dim=-2)
            each = problem.losses(found.flatten(-4, -3).to(members.dtype), weights)
            losses.append(each.unflatten(-1, (_FOLDS, -1)).sum(-2))
            betas += [[b, c] for b in tried.tolist()]
        return pi.new_tensor(betas)[_first_smallest(torch.cat(losses, dim=-1))]

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        mean = reduce(uploads)
        return State(mean, Sigma=_positive(mean.Sigma, self.eps))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        common, space = Normals(widened(down.mu), widened(down.Sigma)), data.space
        nothing = down.phi.new_zeros(*down.phi.shape[:-1], space.size - space.body_size)
        adapted, _ = self._adapted(space.join(down.phi, nothing), common, data)
        return space.join(down.phi, self._head(adapted, self._shares(widened(data.class_counts)), space, down.phi))

    def global_model(self, server: State) -> Tensor:
        normals = Normals(widened(server.mu), widened(server.Sigma))
        C, d = server.mu.shape
        head = normals.head(normals.mu.new_full((C,), 1 / C), self.eps)
        return ParameterSpace.join(server.phi, LinearHead(d + 1, C, True).vector(head).to(server.phi.dtype))

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self.personal_model(client, down, data)

    def diagnostics(self, client: State, down: State) -> State:
        return State(beta_mu=client.beta[..., :1], beta_sigma=client.beta[..., 1:])


def _own(moments: Moments, known: Tensor, common: Normals, eps: float) -> Normals:
    """Return a client's own statistics, one for each group of its samples.

    Args:
        moments: the second moments of features and classes.
        known: whether the client has enough samples of a class; otherwise it has the common mean.
        common: the statistics of all clients.
        eps: is added to the diagonal of the covariance.
    """
    n, sums, xx = moments.xy[..., -1, :], moments.xy[..., :-1, :].mT, moments.xx[..., :-1, :-1]
    mean = sums / n.clamp(min=1).unsqueeze(-1)
    mu = torch.where(known[..., None, :, None], mean, common.mu.unsqueeze(-3))
    cross = sums.mT @ mu
    scatter = xx - cross - cross.mT + mu.mT @ (n.unsqueeze(-1) * mu)
    eye = torch.eye(xx.shape[-1], dtype=xx.dtype, device=xx.device)
    return Normals(mu, scatter / (n.sum(-1) - 1).clamp(min=1)[..., None, None] + eps * eye)


def _first_smallest(losses: Tensor) -> Tensor:
    """Return the place of the first of the smallest losses in each row, as far as rounding lets one tell."""
    least = losses.amin(-1, keepdim=True)
    places = torch.arange(losses.shape[-1], device=losses.device)
    found: Tensor = places.where(losses <= least + _SAME * least.abs(), losses.shape[-1]).amin(-1)
    return found.clamp(max=losses.shape[-1] - 1)  # of NaN alone


def _positive(Sigma: Tensor, least: float) -> Tensor:
    """Return a symmetric matrix without eigenvalues below `least`, which noise and attacks may have made."""
    wide = widened(Sigma + Sigma.mT) / 2
    values, vectors = torch.linalg.eigh(wide)
    if bool(values[0] >= least):
        return wide.to(Sigma.dtype)
    raised: Tensor = (vectors * values.clamp(min=least)) @ vectors.mT
    return raised.to(Sigma.dtype)

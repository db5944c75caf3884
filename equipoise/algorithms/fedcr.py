"""FedCR: random representations, with the same distribution of a class at all clients."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import ReducesGroups
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.models.gaussian import ENCODER, normal
from equipoise.representations.terms import LossTerm
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class Divergence(LossTerm):
    """The divergence KL(r(z|y) || p(z|x)) of normal distributions with independent coordinates."""

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        mean, sd = normal(h[0])
        r_mean, r_sd = given.mean[y], given.sd[y]
        terms = (r_sd / sd).square() + ((mean - r_mean) / sd).square() - 1 + 2 * (sd / r_sd).log()
        return given.weight * terms.sum(-1) / 2


class FedCR(ReducesGroups, Algorithm):
    """Random representations, pulled towards one distribution per class that all clients share.

    phi: the common body, which gives mean and standard deviation of the representation z; h: a client's head; p(z|x):
    the normal distribution of z given x; r(z|y): the product of p(z|x) of all clients' samples of class y, and N(0, 1).
    """

    paper: ClassVar[str] = "Zhang et al., FedCR: Across-Client Common Representation, ICML 2023; KL as in its code"

    beta: NonNegative = 1e-4
    "strength of the pull of p(z|x) towards r(z|y)"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, labels=True)

    def _latent(self, of: Start | LocalData) -> int:
        try:
            width = of.point(ENCODER).width
        except EquipoiseError:
            width = 0
        if not width or width % 2:
            raise EquipoiseError(
                "fedcr needs a model whose representation is random: gaussian-lenet or gaussian-mlp, or one with a "
                f"submodule {ENCODER} whose outputs are means and as many spreads"
            )
        return width // 2

    def init_server(self, start: Start) -> State:
        r = start.w0.new_zeros((start.outputs, self._latent(start)))
        return State(phi=start.space.body(start.w0), mean=r, sd=torch.ones_like(r))

    def init_client(self, start: Start) -> State:
        return State(h=start.space.head(start.w0))

    def origin(self, server: State) -> None:
        return None  # statistics of a client are not known beforehand

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        weight = torch.full_like(down.mean[..., 0, :1], self.beta)
        pull = Divergence((ENCODER,), given=State(mean=down.mean, sd=down.sd, weight=weight))
        w = data.descend(data.space.join(down.phi, client.h), term=pull if self.beta else None)
        found = data.class_sums(w, _natural, at=ENCODER)
        precision, shift = found.split(self._latent(data), dim=-1)
        message = State(phi=data.space.body(w), precision=precision, shift=shift)
        return State(h=data.space.head(w)), Upload(message, reference=State(phi=down.phi), weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        # In a product of normal densities natural parameters add up; those of the standard normal one are 1 and 0.
        total = reduce(uploads.only("precision", "shift"))
        precision = 1 + len(uploads) * total.precision.clamp(min=0)  # noise may make it negative
        mean = len(uploads) * total.shift / precision
        return State(phi=reduce(uploads).phi, mean=mean, sd=precision.rsqrt())

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.space.join(down.phi, client.h)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(data.space.join(down.phi, client.h), part="head", epochs=self.adapt_epochs)


def _natural(h: Tensor) -> Tensor:
    """Return the natural parameters of p(z|x): the precision, and the mean times the precision."""
    mean, sd = normal(h)
    precision = sd**-2
    return torch.cat([precision, mean * precision], dim=-1)

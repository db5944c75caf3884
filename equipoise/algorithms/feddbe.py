"""FedDBE: FedAvg without what is peculiar to a client in its representations, which the client keeps and adds again."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from equipoise.algorithms._plain_sgd import check_plain_sgd
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import TrainsOtherModel
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.own_modules import HasOwnModules, OwnHead, OwnTensor
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import HEAD, within_head
from equipoise.representations.terms import BatchTerm, LossTerm
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads


class Shift(OwnTensor):
    """PRBM, the personalised representation bias memory: adds z to every representation."""

    def forward(self, h: Tensor) -> Tensor:
        """Return h + z."""
        return h + self.value


class RunningMean(OwnTensor):
    """r, the running mean of a round's representations, which is part of the vector to be there in the next step."""

    def forward(self, h: Tensor) -> Tensor:
        """Return r, once for each sample."""
        return self.value.expand(len(h), -1)


class Debiased(nn.Module):
    """The model's head, which reads h + z."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        zero = head.weight.detach().new_zeros(head.in_features)
        self.head, self.shift, self.mean = OwnHead(head), Shift(zero), RunningMean(zero.clone())

    def forward(self, h: Tensor) -> Tensor:
        """Return the outputs, given what the body makes."""
        self.mean(h)  # to be read by the term
        found: Tensor = self.head(self.shift(h))
        return found


class MeanRegularisation(BatchTerm):
    """MR: kappa/(2d) |r - z_g|^2, where r becomes (1 - mu) r + mu (the batch's mean representation)."""

    @staticmethod
    def whole(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, weights: Tensor, given: State) -> Tensor:
        mean = weights @ h[0]
        before = h[1][0]
        r = (1 - given.mu) * before.detach() + given.mu * mean
        # With follow = mu / lr, a step of SGD at the rate lr on the second term takes r where it is to be.
        follow = given.follow * (before - mean.detach()).square().sum() / 2
        return (given.kappa * (r - given.z_g).square().mean() / 2 + follow).sum()


class FedDBE(HasOwnModules, TrainsOtherModel, Algorithm):
    """FedAvg whose clients keep the mean z of their representations apart (PRBM), and share one mean (MR).

    w: the global model; z: what a client adds to every representation before the head; r: the running mean of its
    representations in a round; z_g: the consensus of their means, fixed after the first round. The paper finds z_g in
    an exchange with all clients before the first round, and throws away the models trained there; here that is the
    first round, so its clients are those that come, and its models count unless `restart`. Its clients train without
    both parts, as in the paper. mu = 1 is the authors' setting; with a smaller one the mean starts at zero in every
    round, which biases it in the first batches. The d numbers of r are sent in every round, and count in the first.
    """

    paper: ClassVar[str] = "Zhang et al., Eliminating Domain Bias for FL in Representation Space, NeurIPS 2023"
    averaged: ClassVar[tuple[str, ...]] = ("w",)

    kappa: NonNegative = 50.0
    "strength of the pull of a batch's mean representation to the consensus; 0: without MR, and without a consensus"
    prbm: bool = True
    "whether clients learn what they add to their representations"
    momentum_mean: Annotated[float, Field(gt=0, le=1)] = 1.0
    "mu, the weight of a batch in the running mean; below 1, only with plain SGD"
    consensus: Literal["samples", "running"] = "samples"
    "what clients send for the consensus: the mean over all samples, or the running mean, as published code does"
    restart: bool = False
    "whether the models of the first round, which finds the consensus, are thrown away, as in the paper"

    def model_post_init(self, _: object) -> None:
        if self._follows:
            check_plain_sgd(self, "follows a mean by steps of its own")
            if self.weight_decay:
                raise EquipoiseError(
                    f"algorithm.weight_decay = {self.weight_decay} is not possible with FedDBE and a running mean; "
                    "leave it out, or say momentum_mean = 1 and consensus = 'samples'"
                )

    @property
    def _follows(self) -> bool:
        """Tell whether the running mean must be known from step to step."""
        return self.kappa > 0 and (self.momentum_mean < 1 or self.consensus == "running")

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True, labels=self.kappa > 0 and self.consensus == "samples")

    def around(self, head: nn.Linear) -> nn.Module:
        return Debiased(head)

    def init_server(self, start: Start) -> State:
        zero = start.w0[start.space.span(Shift)]
        if start.point(HEAD).width != len(zero):
            raise EquipoiseError("FedDBE needs a model whose head reads one vector per sample")
        return State(w=self._common(start.w0, start.space), z_g=torch.zeros_like(zero), known=start.w0.new_zeros(1))

    def init_client(self, start: Start) -> State:
        return State(z=start.w0[start.space.span(Shift)])

    def broadcast(self, server: State, client: int) -> State:
        return server if self.kappa else State(w=server.w)

    def origin(self, server: State) -> State:
        return State(w=server.w, r=server.z_g)

    @staticmethod
    def _common(v: Tensor, space: ParameterSpace) -> Tensor:
        return v[..., : space.span(Shift).start]

    @staticmethod
    def _whole(w: Tensor, z: Tensor) -> Tensor:
        return ParameterSpace.join(w, z, torch.zeros_like(z))

    def _term(self, down: State, data: LocalData) -> LossTerm | None:
        if not self.kappa or not (self._follows or self._begun(down)):
            return None
        mu = torch.full_like(data.size, self.momentum_mean)
        given = State(
            kappa=self.kappa * down.known, z_g=down.z_g, mu=mu, follow=mu / data.lr if self._follows else 0 * mu
        )
        return MeanRegularisation((HEAD, within_head("mean")), given=given)

    @staticmethod
    def _begun(down: State) -> bool:
        return bool(down.known.all())

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        space, first = data.space, bool(self.kappa) and not self._begun(down)
        moving = torch.ones_like(space.mask(Shift))
        if first or not self.prbm:
            moving &= ~space.mask(Shift)
        if not self._follows:
            moving &= ~space.mask(RunningMean)
        v = data.descend(self._whole(down.w, client.z), part=moving, term=self._term(down, data))
        w, z = self._common(v, space), v[..., space.span(Shift)]
        if not self.kappa:
            return State(z=z), Upload(State(w=w), reference=down, weight=data.size)
        r = self._mean(v, data) if first else down.z_g
        return State(z=z), Upload(State(w=w, r=r), reference=State(w=down.w, r=down.z_g), weight=data.size)

    def _mean(self, v: Tensor, data: LocalData) -> Tensor:
        if self.consensus == "running":
            return v[..., data.space.span(RunningMean)]
        return data.class_sums(v, lambda h: h).sum(-2) / data.size.clamp(min=1)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        mean, first = reduce(uploads), server.known == 0
        if not self.kappa:
            return State(server, w=mean.w)
        w = torch.where(first, server.w, mean.w) if self.restart else mean.w
        return State(w=w, z_g=torch.where(first, mean.r, server.z_g), known=torch.ones_like(server.known))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._whole(down.w, client.z)

    def trained_model(self, client: State, message: State) -> Tensor:
        return self._whole(message.w, client.z)

    def global_model(self, server: State) -> Tensor:
        return self._whole(server.w, torch.zeros_like(server.z_g))

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        v = self._whole(down.w, client.z)
        return data.descend(v, part=data.space.mask(Shift), epochs=self.adapt_epochs) if self.prbm else v

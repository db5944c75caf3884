"""MOON: representations are pulled towards those of the global model, and away from the client's previous model."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.algorithms.base import Requirements
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.representations.terms import LossTerm
from equipoise.settings import NonNegative, Positive
from equipoise.state import State, Upload


class Contrast(LossTerm):
    """The model-contrastive loss: -log(e^(s+ / tau) / (e^(s+ / tau) + e^(s- / tau))), in the form that cannot overflow.

    s+ and s-: the cosines of z with the representations of the first and the second probe.
    """

    @staticmethod
    def each(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, given: State) -> Tensor:
        near, far = (F.cosine_similarity(h[0], other, dim=-1) for other in probed)
        return given.mu * F.softplus((far - near) / given.tau)


class Moon(FedAvg):
    """FedAvg with a contrast between the global model and the client's previous one in every client's loss.

    w: the global model; w_i: client i's; w_prev: its model when it last took part, the initial one before; z: what the
    output layer reads. mu = 0 is FedAvg. The paper's projection (two layers between features and output layer) is part
    of the model, if it is wanted.
    """

    paper: ClassVar[str] = "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, Alg. 1"

    mu: NonNegative = 5.0
    "strength of the contrast; the paper tunes 0.001 to 10"
    tau: Positive = 0.5
    "temperature of the contrast"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True)

    def init_client(self, start: Start) -> State:
        return State(w_prev=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        given = State(mu=torch.full_like(data.size, self.mu), tau=torch.full_like(data.size, self.tau))
        contrast = Contrast(probes=(down.w, client.w_prev), given=given) if self.mu else None
        w_i = data.descend(down.w, term=contrast)
        return State(w_prev=w_i), Upload(State(w=w_i), reference=down, weight=data.size)

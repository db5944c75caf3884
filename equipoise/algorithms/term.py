"""TERM: the tilted mean of the clients' losses, from the best client over the average to the worst."""

from typing import ClassVar

import torch

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.loss_weighted import LossWeighted
from equipoise.settings import Number
from equipoise.state import State, Uploads


class TERM(LossWeighted):
    """Minimises the tilted loss (1/t) ln mean_k e^(t F_k); t = 0 is FedAvg with equal weights.

    w: the global model; w_k: client k's; F_k: its loss at w; a_k: its weight, e^(t F_k) over their sum.
    """

    paper: ClassVar[str] = "Li et al., Tilted Empirical Risk Minimization, ICLR 2021, Section 4"

    t: Number = 1.0
    "tilt: above 0, clients with a higher loss count more; below 0, less, which discounts outliers"

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        a = torch.softmax(self.t * self.losses(uploads), dim=0)
        return State(w=self.weighted_mean(uploads, a, reduce))

"""Lp-Proj-2: clients agree only on a random projection of their models, by gradient steps or by ADMM."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.algorithms._random_projection import Projection, projection
from equipoise.algorithms.flame import Flame
from equipoise.algorithms.local_data import LocalData
from equipoise.algorithms.pfedme import PFedMe
from equipoise.settings import Count, Settings
from equipoise.state import State


class _Projected(Settings):
    """What clients agree on: P theta, with a fixed random matrix P of d_sub rows."""

    d_sub: Count = 1000
    "length of the projected models, which are all that is sent; at most the number of parameters"

    def _projection(self, d: int, seed: int, device: torch.device) -> Projection:
        return projection(d, min(self.d_sub, d), seed, device)

    def seen(self, theta: Tensor, seed: int) -> Tensor:
        return self._projection(theta.shape[-1], seed, theta.device)(theta)

    def back(self, pull: Tensor, data: LocalData) -> Tensor:
        return self._projection(data.space.size, data.seed, pull.device).back(pull)

    def begins(self, client: State, down: State) -> Tensor:
        return client.theta  # the initial model, because w is a projection

    def global_model(self, server: State) -> Tensor | None:
        return None  # a projection cannot predict


class LpProj(_Projected, PFedMe):
    """pFedMe in which clients agree only on a random projection of their models (Lp-Proj-2).

    theta: the personal model; w, w_i: vectors of length d_sub; the pull of the personal step is lam P'(P theta - w_i).
    """

    paper: ClassVar[str] = "Lin et al., Personalized FL towards Communication Efficiency, Robustness, Fairness, 2022"


class FlameLpProj(_Projected, Flame):
    """FLAME in which clients agree only on a random projection of their models (ADMM-based Lp-Proj-2).

    theta: the personal model; w, w_i, pi, u: vectors of length d_sub; Lemma 3 becomes pi = lam alpha (P theta - w_i).
    """

    paper: ClassVar[str] = "FLAME: Moreau envelopes solved by ADMM, Algorithm 2"

    def unmet_condition(self, clients: int) -> None:
        return None  # the theorems are about Algorithm 1

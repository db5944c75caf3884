"""AFL: agnostic federated learning, for the worst mixture of the clients."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.loss_weighted import LossWeighted
from equipoise.settings import NonNegative
from equipoise.state import State, Uploads
from equipoise.torch_device import widened


class AFL(LossWeighted):
    """Minimises the largest loss of any mixture of the clients: the weights of clients climb with their losses.

    w: the global model; w_k: client k's; F_k: its loss at w; lam: the weights of all clients, on the simplex; lam_lr:
    their step. Of lam, the entries of the clients of the round are used. lam_lr = 0 is FedAvg with equal weights. In
    the paper a client takes one full gradient step; with more of them w_k is where they lead.
    """

    paper: ClassVar[str] = "Mohri et al., Agnostic Federated Learning, ICML 2019, Fig. 3"

    lam_lr: NonNegative = 0.1
    "step of the weights of clients towards those with a higher loss"
    average: Literal["last", "mean"] = "last"
    "global model that is reported: the last w, or the mean over all rounds, for which the paper has its guarantee"

    def init_server(self, start: Start) -> State:
        state = State(w=start.w0, lam=start.w0.new_full((start.clients,), 1 / start.clients))
        if self.average == "last":
            return state
        return State(state, w_mean=start.w0, rounds=start.w0.new_zeros(1))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        lam, F = widened(server.lam).clone(), self.losses(uploads)
        known = [k for k, who in enumerate(uploads.who) if who < len(lam)]
        places = [uploads.who[k] for k in known]
        here = torch.full_like(F, 1 / len(lam))  # the weight of newcomers
        here[known] = lam[places]
        # If the clients that count are all absent, the model waits for them.
        w = self.weighted_mean(uploads, here, reduce) if here.any() else server.w
        lam[places] += self.lam_lr * F[known]
        after = State(server, w=w, lam=(projection(lam) if self.lam_lr else lam).to(server.lam.dtype))
        if self.average == "last":
            return after
        rounds = server.rounds + 1
        return State(after, w_mean=server.w_mean + (w - server.w_mean) / rounds, rounds=rounds)

    def global_model(self, server: State) -> Tensor:
        return server.w if self.average == "last" else server.w_mean


def projection(y: Tensor) -> Tensor:
    """Return the point of the simplex (entries at least zero, their sum one) that is nearest to y."""
    u = y.sort(descending=True).values
    taus = (u.cumsum(0) - 1) / torch.arange(1, len(u) + 1, dtype=u.dtype, device=u.device)
    r = int((u > taus).nonzero()[-1])
    return (y - taus[r]).clamp(min=0)

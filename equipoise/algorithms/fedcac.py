"""FedCAC: parameters that matter most to a client are shared with similar clients only, the others with all."""

from math import floor
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.settings import Count
from equipoise.state import State, Upload, Uploads


class FedCAC(Algorithm):
    """Critical parameters begin at a mean over clients for which the same are critical, others at the global model.

    w: the global model; s_i: what client i begins with; w_i: what it has trained; M_i: its critical parameters, of each
    tensor those with the largest |(w_i - s_i) w_i|; O_ij: the share of M_i that is in M_j; u_i: the mean of the models
    of clients with O_ij above a threshold, which rises until, after beta rounds, u_i is the client's own. The server
    knows s_i and w_i and finds M_i itself, so that no masks and no second model are sent: the numbers are the same.
    """

    paper: ClassVar[str] = "Wu et al., Bold but Cautious, ICCV 2023"

    tau: Annotated[float, Field(ge=0, le=1)] = 0.5
    "share of the parameters of every tensor that are critical; 0 is FedAvg"
    beta: Count = 100
    "number of rounds after which critical parameters are the client's own"

    def init_server(self, start: Start) -> State:
        table = start.w0.expand(start.clients, -1)
        ends = torch.tensor([entry.end for entry in start.space.entries], device=start.w0.device)
        M = torch.zeros_like(table, dtype=torch.bool)
        return State(w=start.w0, u=table.clone(), M=M, ends=ends, round=start.w0.new_zeros(1))

    def broadcast(self, server: State, client: int) -> State:
        if client >= len(server.u):  # nothing is known of a newcomer's critical parameters
            return State(s=server.w)
        return State(s=torch.where(server.M[client], server.u[client], server.w))

    def origin(self, server: State) -> None:
        return None  # what a client begins with is its own

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w_i = data.descend(down.s)
        return client, Upload(State(w=w_i), reference=State(w=down.s), weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        M, u, t = server.M.clone(), server.u.clone(), server.round + 1
        sent = {who: upload.message.w for who, upload in zip(uploads.who, uploads.uploads, strict=True) if who < len(u)}
        here = list(sent)
        if here:
            w, s = torch.stack(list(sent.values())), torch.stack([self.broadcast(server, who).s for who in here])
            M[here] = critical(((w - s) * w).abs(), server.ends.tolist(), self.tau)
            together = self._together(M[here], float(t)).to(w.dtype)
            u[here] = together / together.sum(1, keepdim=True) @ w
        return State(server, w=reduce(uploads).w, u=u, M=M, round=t)

    def _together(self, M: Tensor, t: float) -> Tensor:
        """Return a mask of the clients (columns) whose models are in the mean of each client (rows)."""
        own, O_ij = torch.eye(len(M), dtype=torch.bool, device=M.device), overlaps(M)
        pairs = O_ij[~own]
        if not len(pairs):
            return own
        low, mean, high = pairs.min(), pairs.mean(), pairs.max()
        T = high if low == high else mean + t / self.beta * (high - mean)
        return own | (O_ij >= T)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return down.s

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.s, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.w


def overlaps(M: Tensor) -> Tensor:
    """Return O_ij = 1 - |M_i - M_j| / (2 |M_i|) of masks, one per row."""
    both = torch.stack([(M & row).sum(1) for row in M])
    count = both.diagonal()
    return 1 - (count[:, None] + count - 2 * both) / (2 * count[:, None].clamp(min=1))


def critical(c: Tensor, ends: list[int], tau: float) -> Tensor:
    """Return a mask of the largest entries of each tensor, in rows of vectors; with ties, of more than asked for.

    Args:
        c: the sensitivities, not negative; where too few are positive, only those count.
        ends: where each tensor ends in the vector.
        tau: the share of each tensor's entries, rounded down.
    """
    mask = torch.zeros_like(c, dtype=torch.bool)
    for low, high in zip([0, *ends[:-1]], ends, strict=True):
        if count := floor(tau * (high - low) + 1e-9):
            piece = c[:, low:high]
            least = piece.topk(count, dim=1).values[:, -1:]
            mask[:, low:high] = (piece >= least) & (piece > 0)
    return mask

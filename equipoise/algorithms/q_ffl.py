"""q-FFL: clients with a higher loss count more, by a power q of it."""

from typing import ClassVar

from equipoise.algorithms.base import Reduce
from equipoise.algorithms.loss_weighted import LossWeighted
from equipoise.settings import NonNegative
from equipoise.state import State, Uploads
from equipoise.torch_device import widened

_LEAST = 1e-10  # is added to losses, so that F^(q - 1) exists


class QFFL(LossWeighted):
    """Minimises sum_k F_k^(q + 1) / (q + 1) by q-FedAvg; q = 0 is FedAvg with equal weights.

    w: the global model; w_k: client k's; F_k: its loss at w; L = 1 / lr; g_k = L (w - w_k); Delta_k = F_k^q g_k;
    h_k = q F_k^(q - 1) |g_k|^2 + L F_k^q. With a schedule of rates L remains that of lr.
    """

    paper: ClassVar[str] = "Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Alg. 2"

    q: NonNegative = 1.0
    "how much more clients with a higher loss count"

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        w, q, L = server.w, self.q, 1 / self.lr
        F = self.losses(uploads) + _LEAST
        squares = F.new_zeros(len(F))  # |w - w_k|^2
        for low, high in uploads.spans("w"):
            squares += (widened(w[low:high]) - widened(uploads.columns("w", low, high))).square().sum(1)
        h = q * F ** (q - 1) * L**2 * squares + L * F**q
        # w - sum Delta_k / sum h_k is a step of length s towards the mean of w_k with weights F_k^q.
        s = float((L * F**q).sum() / h.sum())
        return State(w=(1 - s) * w + s * self.weighted_mean(uploads, F**q, reduce))

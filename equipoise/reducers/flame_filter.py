"""FLAME, the defence against backdoors: messages in one tight cluster of directions, clipped, averaged and noised.

The algorithm `flame` (Moreau envelopes by ADMM) has the same name in its paper, and nothing else in common.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.reducers.base import ContextReducer
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences, clipping, cosines
from equipoise.reducers.order import median
from equipoise.settings import NonNegative
from equipoise.state import State, Uploads
from equipoise.torch_device import widened

_SAME = 1e-12  # difference of distances that tie: they are at most 2


class FlameFilter(ContextReducer):
    """FLAME (defence): the mean of clipped differences whose directions form the tightest majority, plus noise.

    Its clustering (HDBSCAN with more than half as the smallest cluster) accepts the first group of more than half of
    the clients that forms when pairs are joined by rising cosine distance. S: the median length of all differences.
    """

    paper: ClassVar[str] = "Nguyen et al., FLAME: Taming Backdoors in Federated Learning, USENIX Security 2022"
    needs_origin: ClassVar[bool] = True

    of: Literal["message", "difference"] = "message"
    "directions that are compared: those of the models, as published, or of their differences from the origin"
    noise: NonNegative = 0.001
    "standard deviation of the noise as a multiple of S (lambda)"

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        o = context.origin_for(uploads, self)
        d = Differences(uploads, o)
        if self.of == "difference":
            gram = d.gram()
            norms, cosine = gram.diagonal().sqrt(), cosines(gram)
        else:
            nowhere = State({k: torch.zeros_like(t) for k, t in o.items()})
            norms, cosine = d.norms(), cosines(Differences(uploads, nowhere).gram())
        S = median(norms[:, None])[0]
        accepted = torch.zeros_like(norms)
        accepted[majority_cluster(1 - cosine)] = 1
        message = d.combined(accepted / accepted.sum() * clipping(norms, S))
        if self.noise:
            drawn = {k: context.normal(k, t) for k, t in message.items()}
            message = State({k: (t + self.noise * S * drawn[k]).to(t.dtype) for k, t in message.items()})
        return message, context.memory


def majority_cluster(distances: Tensor) -> list[int]:
    """Return the rows of the first group of more than half that forms when pairs are joined by rising distance.

    All pairs of the same distance are joined at once, so that the order of rows makes no difference.
    """
    n = len(distances)
    if n == 1:
        return [0]
    group = list(range(n))
    rows, columns = torch.triu_indices(n, n, offset=1)
    apart, order = widened(distances).cpu()[rows, columns].sort(stable=True)
    steps, pairs = apart.tolist(), [(int(rows[k]), int(columns[k])) for k in order]
    for k, (i, j) in enumerate(pairs):
        one, other = group[i], group[j]
        if one != other:
            group = [one if g == other else g for g in group]
        if k + 1 < len(pairs) and steps[k + 1] - steps[k] <= _SAME:
            continue
        largest = max(group, key=group.count)
        if group.count(largest) > n // 2:
            return [i for i, g in enumerate(group) if g == largest]
    return list(range(n))

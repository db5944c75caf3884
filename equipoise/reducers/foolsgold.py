"""FoolsGold: clients whose differences have pointed in the same direction for rounds count less."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import ContextReducer
from equipoise.reducers.client_memory import ClientMemory
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.differences import Differences, cosines
from equipoise.state import State, Uploads
from equipoise.torch_device import wide_dtype, widened

_MOST = 0.99  # of a weight before its logit is taken
_LEAST = 1e-5  # of a client's largest similarity
_ALIKE = 1e-10  # largest distance of cosines from 1 that is rounding


class FoolsGold(ContextReducer):
    """A mean of differences in which clients count less the more alike their sums of differences are (sybils).

    H_i: the sum of client i's differences in all rounds, which the server remembers. It does nothing against a single
    attacker, and honest clients with alike data are taken for sybils. If all are, nothing moves.
    """

    paper: ClassVar[str] = "Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020, Alg. 1"
    needs_origin: ClassVar[bool] = True

    features: Literal["all", "head"] = "all"
    "coordinates that are compared: all of them, or the model's head, where messages are models"

    def model_post_init(self, _: Any) -> None:
        if self.before:
            raise EquipoiseError(
                "reducer.before is not possible with FoolsGold, which remembers each client's messages; leave it out"
            )

    @property
    def remembers(self) -> bool:
        return True

    def memory(self, like: State, clients: int) -> State:
        return State()  # which coordinates are compared is known in a round

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        d = Differences(uploads, context.origin_for(uploads, self))
        first = self._first(uploads.like, context)
        H = ClientMemory(
            context.memory
            or ClientMemory.empty({k: uploads.like[k].numel() - low for k, low in first.items()}, uploads.like, 0),
            uploads.senders,
        )
        gram = torch.zeros(len(d), len(d), dtype=wide_dtype(d.device), device=d.device)
        for name, begin in first.items():
            for low, high, rows in d.field(name, begin):
                sums = widened(H.put(name, low - begin, high - begin, H.get(name, low - begin, high - begin) + rows))
                gram += sums @ sums.T
        alpha = weights(cosines(gram))
        return d.combined(alpha / alpha.sum() if alpha.any() else alpha), H.after

    def _first(self, like: State, context: ReductionContext) -> dict[str, int]:
        """Return the first coordinate that is compared, by field."""
        if self.features == "all":
            return dict.fromkeys(like, 0)
        space = context.space
        found = {k: space.body_size for k, t in like.items() if space and t.shape == (space.size,) and space.body_size}
        if not found:
            raise EquipoiseError(
                f"reducer.features = 'head' compares the heads of models, and messages of {context.algorithm} are not "
                "whole models with a body and a head; use 'all'"
            )
        return found


def weights(cosine: Tensor) -> Tensor:
    """Return the weights of clients, from 0 to 1, from the cosines between their sums of differences."""
    cs = cosine.clone().fill_diagonal_(-torch.inf)
    if len(cs) == 1:
        return torch.ones_like(cs[0])
    v = cs.max(dim=1).values.clamp(min=_LEAST)
    # Pardon: a client that is like one with a more suspicious past is not to suffer for it. v is that before.
    cs = torch.where(v > v[:, None], cs * v[:, None] / v, cs)
    alpha = (1 - cs.max(dim=1).values).clamp(0, 1)
    if not alpha.max() > _ALIKE:  # all are alike
        return torch.zeros_like(alpha)
    alpha = (alpha / alpha.max()).clamp(max=_MOST)
    return ((alpha / (1 - alpha)).log() + 0.5).clamp(0, 1)

"""Bulyan: Krum selects messages one after the other, then each coordinate is averaged near its median."""

from typing import ClassVar

from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import ContextReducer, Part
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.distances import products, squared_distances
from equipoise.reducers.order import median
from equipoise.state import State, Uploads
from equipoise.torch_device import widened

_SAME = 1e-9  # relative difference of scores that tie


class Bulyan(ContextReducer):
    """The mean, in every coordinate, of the values nearest to the median of messages that Krum selects.

    f = `malicious` n. Krum is applied n - 2 f times to the messages that are left; of the selected ones the n - 4 f
    values nearest to the median are averaged. It needs n >= 4 f + 3.
    """

    paper: ClassVar[str] = "El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018"

    malicious: Part = 0.2
    "fraction of the clients that may be malicious"

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        n, f = len(uploads), round(self.malicious * uploads.sent)
        if f and n < 4 * f + 3:
            raise EquipoiseError(
                f"reducer.malicious = {self.malicious:g} of {uploads.sent} messages are {f}, and Bulyan needs "
                f"{4 * f + 3} rows for that; with {n} it withstands at most {max((n - 3) // 4, 0)}"
            )
        distances = squared_distances(products(uploads)).cpu()
        chosen = select((distances + distances.T) / 2, f, n - 2 * f, context.names(uploads))
        return uploads.each(lambda rows: near_median(rows[chosen], n - 4 * f)), context.memory


def select(distances: Tensor, f: int, count: int, names: list[str]) -> list[int]:
    """Return the messages that Krum selects one after the other.

    With one neighbour, mutual neighbours always tie: then the sums over one more neighbour decide, and so on, and in
    the end the first name.

    Args:
        distances: the squared distances between messages.
        f: number of messages that may be malicious.
        count: number of messages to select.
        names: the names of the messages' clients.
    """
    left, chosen = sorted(range(len(names)), key=lambda i: names[i]), []
    for _ in range(count):
        among = distances[left][:, left].fill_diagonal_(-1).sort(dim=1).values[:, 1:]
        sums = among.cumsum(1)
        best = list(range(len(left)))
        for k in range(max(len(left) - f - 2, 1), len(left)):
            scores = sums[best, k - 1]
            least = float(scores.min())
            best = [i for i, score in zip(best, scores.tolist(), strict=True) if score <= least * (1 + _SAME)]
            if len(best) == 1:
                break
        chosen.append(left.pop(best[0]))
    return chosen


def near_median(rows: Tensor, count: int) -> Tensor:
    """Return the mean of the values of each column that are nearest to its median; ties share the last places."""
    values = widened(rows)
    apart = (values - median(values)).abs()
    last = apart.sort(dim=0).values[count - 1]
    ties = (apart - last).abs() <= _SAME * last
    below = (apart < last) & ~ties
    shares = widened(below) + widened(ties) * (count - widened(below).sum(0)) / widened(ties).sum(0)
    return ((shares * values).sum(0) / count).to(rows.dtype)

"""kNN-Per: a global model whose predictions every client mixes with those of its nearest own samples."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from equipoise.algorithms._knn import Mixed, Neighbours
from equipoise.algorithms.base import Algorithm, Requirements
from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.local_data import ClientSamples, LocalData
from equipoise.settings import Count, Positive
from equipoise.state import State

Weight = Annotated[float, Field(ge=0, le=1)]


class KnnPer(PredictsFromSamples, FedAvg):
    """FedAvg; a client mixes the global model's predictions with those of its nearest own samples.

    k: the number of neighbours, nearest in what the head reads; mix: their weight, 0 being the global model alone. With
    several values, each client takes those that are best on its validation samples, or the first ones if it has none.
    """

    paper: ClassVar[str] = "Marfoq et al., Personalized FL through Local Memorization, ICML 2022, Eqs. 7 to 9"
    trains_as: ClassVar[type[Algorithm] | None] = FedAvg

    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (10, 5, 20)
    "numbers of neighbours to choose from"
    mix: Annotated[tuple[Weight, ...], Field(min_length=1)] = (0.5, 0.0, 0.25, 0.75, 1.0)
    "weights of the neighbours' predictions to choose from; the global model has weight 1 - mix"
    scale: Positive = 1.0
    "scale of distances; a neighbour at distance d has weight exp(-d / scale)"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, head_module=True)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return down.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return down.w  # its own samples are all that is personal here

    def predictor(self, module: nn.Module, samples: ClientSamples) -> nn.Module:
        neighbours = Neighbours(module, samples.head, *samples.train, scale=self.scale)
        return Mixed(neighbours, *neighbours.best(samples, self.k, self.mix))

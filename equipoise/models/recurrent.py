"""A recurrent network for windows of time series."""

from typing import ClassVar

from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead, ModelSettings
from equipoise.settings import Count, Depth


class _LastState(nn.Module):
    """The hidden state of an LSTM after the last point in time."""

    def __init__(self, features: int, hidden: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x.unsqueeze(-1) if x.ndim == 2 else x)
        last: Tensor = hidden[-1]
        return last


class LSTM(ModelSettings):
    """An LSTM for forecasting, whose last hidden state the head reads."""

    paper: ClassVar[str] = "Hochreiter and Schmidhuber, 1997; the baselines' model in Learn2pFed's forecasting"

    hidden: Count = 32
    "width of the hidden state"
    layers: Depth = 1
    "number of LSTM layers"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) not in (1, 2):
            raise EquipoiseError(
                "model.name = 'lstm' needs one number, or one row of numbers, for each point in time; "
                f"these samples have shape {shape}"
            )
        features = shape[1] if len(shape) == 2 else 1
        return BodyAndHead(_LastState(features, self.hidden, self.layers), nn.Linear(self.hidden, outputs))

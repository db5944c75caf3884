"""A model of time series that answers in the data's own unit."""

from typing import Any

from torch import Tensor, nn

from equipoise.data.series_scale import SeriesScale
from equipoise.quantiles import Pinball


class Unscaled(nn.Module):
    """A client's model, with outputs in the data's own unit; inputs are scaled as in training.

    Outputs are one row of `horizon` numbers per sample or, of a model of quantiles, (sample, step, quantile), sorted.
    """

    def __init__(self, module: nn.Module, scale: SeriesScale, pinball: Pinball | None = None):
        """Wrap a module.

        Args:
            module: the model of one client.
            scale: the scale of that client.
            pinball: the quantiles that it forecasts, if it does.
        """
        super().__init__()
        self.module, self.scale, self.pinball = module, scale, pinball

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x)
        output = output.reshape(len(x), -1) if self.pinball is None else self.pinball.ordered(output)
        unscaled: Tensor = self.scale.unscaled(output)
        return unscaled

    def scaled(self, values: Tensor) -> Tensor:
        """Return values of the series, in the data's own unit, as the model takes them."""
        scaled: Tensor = self.scale.scaled(values)
        return scaled


def described_series(scale: SeriesScale | None, pinball: Pinball | None) -> dict[str, Any]:
    """Return what a model's description says about forecasts: the scale of its client, and the quantiles.

    Args:
        scale: the scale of the client; None for a model of all clients, or of other data.
        pinball: the quantiles that the model forecasts, if it does.
    """
    found: dict[str, Any] = {} if scale is None else {"series": scale.table()}
    return found if pinball is None else {**found, "quantiles": list(pinball.quantiles)}

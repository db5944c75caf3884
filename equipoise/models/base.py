"""A model by name: settings that build a plain module with a body and a head."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings


class BodyAndHead(nn.Module):
    """A body that makes features, and a head that reads them."""

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class ModelSettings(Settings, ABC):
    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """The module for samples of this shape, with a submodule named `head`."""


def image_shape(shape: tuple[int, ...], smallest: int, name: str) -> tuple[int, int, int]:
    """Channels, height and width of the samples, if they are images that the model can take."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise EquipoiseError(
            f"model.name = {name!r} needs images of at least {smallest} by {smallest}; these samples have shape {shape}"
        )
    channels, height, width = shape
    return channels, height, width

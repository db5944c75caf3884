"""The base of named models: settings that build a module with a body and a head."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings


class BodyAndHead(nn.Module):
    """A body that computes features, and a head that reads them."""

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class ModelSettings(Settings, ABC):
    """The settings of a model, which build it."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a module for samples of this shape, with a submodule named `head`."""

    @property
    def head_name(self) -> str | tuple[str, ...]:
        """Return the name of the submodule that is the head, or names of several."""
        return "head"


def image_shape(shape: tuple[int, ...], smallest: int, name: str) -> tuple[int, int, int]:
    """Return the channels, height and width of the samples, or raise an error if the model cannot take them.

    Args:
        shape: the shape of a sample.
        smallest: the smallest height and width that the model can take.
        name: the name of the model.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise EquipoiseError(
            f"model.name = {name!r} needs images of at least {smallest} by {smallest}; these samples have shape {shape}"
        )
    channels, height, width = shape
    return channels, height, width

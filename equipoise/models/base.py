"""A model by name: settings that build a plain module with a body and a head."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from equipoise.settings import Settings


class Split(nn.Module):
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

"""The points of a model where its representations of samples are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HEAD = "(head)"
"""The point right before the head: what the head reads."""

OUTPUT = "(output)"
"""The point at the end of the model: its outputs."""


def within_head(name: str) -> str:
    """Return the point after a submodule of the head, such as one that an algorithm has added, whatever its name is."""
    return f"{HEAD}.{name}"


def submodule_of(point: str, head: str | None) -> str:
    """Return the name of the submodule whose output a point is; "" for the whole model.

    Args:
        point: the name of the point, not HEAD itself.
        head: name of the model's head.
    """
    return "" if point == OUTPUT else point.replace(HEAD, head or "", 1) if point.startswith(HEAD) else point


@dataclass(frozen=True, eq=False)
class RepresentationPoint:
    """A point in a model where its representation of a sample is read."""

    name: str
    """name of the submodule whose output it is (those within the head by `within_head`); HEAD for what the head reads,
    OUTPUT for what the model returns"""
    width: int
    "numbers per sample"
    reach: Tensor
    "mask of the coordinates of the model's vector on which it depends (bool)"


class ForwardHook:
    """Captures a module's representations at some points whenever it is called, until `close`."""

    def __init__(self, module: nn.Module, names: Sequence[str], head: str | None):
        """Attach the hooks.

        Args:
            module: the model.
            names: submodules whose outputs are captured, also by `within_head`; HEAD or OUTPUT.
            head: name of the model's head.
        """
        self.names = tuple(names)
        self.captured: dict[str, Tensor] = {}
        self.handles = [self._attach(module, name, head) for name in dict.fromkeys(names)]

    def _attach(self, module: nn.Module, name: str, head: str | None) -> Any:
        def keep(found: Any) -> None:
            found = found[0] if isinstance(found, tuple) else found
            # In mixed precision, operators return bfloat16, which is too coarse to add up.
            self.captured[name] = (found.float() if found.dtype == torch.bfloat16 else found).flatten(1)

        if name == HEAD:
            return module.get_submodule(head or "").register_forward_pre_hook(lambda _, inputs: keep(inputs))
        layer = module.get_submodule(submodule_of(name, head))
        return layer.register_forward_hook(lambda _, inputs, output: keep(output))

    def take(self) -> tuple[Tensor, ...]:
        """Return and forget the representations of the last call, (batch, width) each, in the order of the names."""
        captured, self.captured = self.captured, {}
        return tuple(captured[name] for name in self.names)

    def silent(self) -> list[str]:
        """Return the points without a representation since the last `take`, because their submodule was not called."""
        return [name for name in self.names if name not in self.captured]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

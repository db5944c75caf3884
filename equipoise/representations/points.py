"""What a model makes of samples on the way to its answer: representations, and terms of the objective that see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

HEAD = "(head)"
"""The place right before the head: what the head reads."""


@dataclass(frozen=True, eq=False)
class RepresentationPoint:
    """A place in a model where its representation of a sample is read."""

    name: str
    "of the submodule whose output it is; HEAD for what the head reads"
    width: int
    "numbers a sample"
    reach: Tensor
    "which coordinates of the model's vector it depends on (bool)"


class ForwardHook:
    """Hears what a module says at some places whenever it is called, until it is closed."""

    def __init__(self, module: nn.Module, names: Sequence[str], head: str | None):
        self.names = tuple(names)
        self.heard: dict[str, Tensor] = {}
        self.handles = [self._listen(module, name, head) for name in dict.fromkeys(names)]

    def _listen(self, module: nn.Module, name: str, head: str | None) -> Any:
        def keep(found: Any) -> None:
            found = found[0] if isinstance(found, tuple) else found
            self.heard[name] = found.flatten(1)

        if name == HEAD:
            return module.get_submodule(head or "").register_forward_pre_hook(lambda _, inputs: keep(inputs))
        return module.get_submodule(name).register_forward_hook(lambda _, inputs, output: keep(output))

    def take(self) -> tuple[Tensor, ...]:
        """The representations of the last call, (batch, width) each, in the order of the names; they are forgotten."""
        heard, self.heard = self.heard, {}
        return tuple(heard[name] for name in self.names)

    def silent(self) -> list[str]:
        """Places that said nothing since they were last asked, as their submodule was not called."""
        return [name for name in self.names if name not in self.heard]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

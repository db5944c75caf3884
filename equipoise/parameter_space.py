"""A module's parameters as one flat vector: body first, head last, so that each part is a slice and never a copy."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError

Part = Literal["all", "body", "head"]


@dataclass(frozen=True)
class ParameterEntry:
    """The place of one parameter in the vector."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return self.shape.numel()

    @property
    def end(self) -> int:
        """Return the offset of the first element after it."""
        return self.offset + self.numel

    def view(self, vector: Tensor) -> Tensor:
        """Return this parameter as a view of `vector`; leading axes (a stack of clients) are kept."""
        piece = vector[..., self.offset : self.end]
        lead = piece.shape[:-1]
        if len(self.shape) != 4:
            return piece.view(*lead, *self.shape)
        # Convolution weights have their channels last in memory, the fastest layout on a CPU.
        o, i, h, w = self.shape
        return piece.view(*lead, o, h, w, i).movedim(-1, len(lead) + 1)


class ParameterSpace:
    """The layout of a module's parameters in a vector of `size` numbers.

    Frozen parameters (`requires_grad = False`) are not part of it: they never change, and are the same for all.
    """

    def __init__(self, module: nn.Module, head: str | Sequence[str] | None = None):
        """Lay out the parameters of a module.

        Args:
            module: the module.
            head: the submodule or submodules that form the head, given by the start of their parameters' names; with
                None, the whole module is body.
        """
        prefixes = [head] if isinstance(head, str) else list(head or [])
        named = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]

        def in_head(name: str) -> bool:
            return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)

        for prefix in prefixes:
            if not any(name == prefix or name.startswith(prefix + ".") for name, _ in named):
                top = sorted({name.rsplit(".", 1)[0] for name, _ in named})
                raise EquipoiseError(f"the model has no parameters under head={prefix!r}; it has {', '.join(top)}")
        ordered = [item for item in named if not in_head(item[0])] + [item for item in named if in_head(item[0])]
        entries, offset = [], 0
        for name, shape in ordered:
            entries.append(ParameterEntry(name, shape, offset))
            offset += shape.numel()
        self.entries = tuple(entries)
        self.size = offset
        self.body_size = sum(e.numel for e in entries if not in_head(e.name))

    def __repr__(self) -> str:
        head = self.size - self.body_size
        return (
            f"ParameterSpace({len(self.entries)} parameters, {self.size} numbers: body {self.body_size}, head {head})"
        )

    def fingerprint(self) -> str:
        """Return a hash of the names and shapes of the parameters, and of the start of the head."""
        layout = repr((self.body_size, [(entry.name, tuple(entry.shape)) for entry in self.entries]))
        return blake2b(layout.encode(), digest_size=8).hexdigest()

    def part(self, part: Part) -> slice:
        """Return the slice of the vector that is this part."""
        return {"all": slice(0, self.size), "body": slice(0, self.body_size), "head": slice(self.body_size, None)}[part]

    def body(self, vector: Tensor) -> Tensor:
        """Return the body's part of a vector, as a view."""
        return vector[..., : self.body_size]

    def head(self, vector: Tensor) -> Tensor:
        """Return the head's part of a vector, as a view."""
        return vector[..., self.body_size :]

    @staticmethod
    def join(body: Tensor, head: Tensor) -> Tensor:
        """Join body and head to a whole vector; either may be one for all clients or one per client."""
        lead = torch.broadcast_shapes(body.shape[:-1], head.shape[:-1])
        return torch.cat([body.expand(*lead, -1), head.expand(*lead, -1)], dim=-1)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return all parameters as views of `vector`, by their names."""
        return {entry.name: entry.view(vector) for entry in self.entries}

    def vector(self, module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Copy the module's parameters into a new vector."""
        parameters = dict(module.named_parameters())
        vector = torch.empty(self.size, dtype=dtype or torch.get_default_dtype())
        for name, view in self.views(vector).items():
            view.copy_(parameters[name].detach())
        return vector

    def bind(self, module: nn.Module, vector: Tensor) -> None:
        """Make the module's parameters views of `vector`, so that loading a client takes one copy."""
        parameters = dict(module.named_parameters())
        for name, view in self.views(vector).items():
            parameters[name].data = view

    def module(self, template: nn.Module, vector: Tensor) -> nn.Module:
        """Return a copy of `template` with the parameters in `vector`, which share no memory with it."""
        module = copy.deepcopy(template).to(vector.dtype)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in self.views(vector).items():
                parameters[name].data = view.clone(memory_format=torch.contiguous_format)
        return module.eval()


def linear_head(space: ParameterSpace) -> tuple[int, int, bool]:
    """Return the shape of a head that is one linear layer, or raise an error if the head is anything else.

    Returns:
        Its number of inputs, including the constant of a bias; its number of outputs; whether it has a bias.
    """
    entries = [entry for entry in space.entries if entry.offset >= space.body_size]
    matrix = next((entry for entry in entries if len(entry.shape) == 2), None)
    biases = [entry for entry in entries if entry is not matrix]
    if matrix is None or len(biases) > 1 or any(entry.shape != matrix.shape[:1] for entry in biases):
        raise EquipoiseError(
            "the algorithm fits the model's head by least squares, so the head must be one linear layer; here "
            f"it is {', '.join(entry.name for entry in entries) or 'nothing (name it with head=)'}"
        )
    outputs, inputs = matrix.shape
    return inputs + len(biases), outputs, bool(biases)

"""A module's parameters as one flat vector: body first, head last, so that each part is a slice and never a copy."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.settings import nearest

Part = Literal["all", "body", "head"]
Selector = str | type[nn.Module]
Selection = Selector | Sequence[Selector]
"""Parameters by name: a submodule, a parameter, a pattern such as "*.lora_B.*", a class of layers, or several."""
_LISTED = 8  # names in an error message


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

    def __init__(self, module: nn.Module, head: Selection | None = None, device: torch.device | None = None):
        """Lay out the parameters of a module.

        Args:
            module: the module.
            head: the parameters that form the head, as for `mask`; with None, the whole module is body.
            device: where masks are made.
        """
        self.device = device
        self._names = _ParameterNames(module)
        in_head = self._names.select(() if head is None else head, "head")
        named = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        ordered = [item for item in named if item[0] not in in_head] + [item for item in named if item[0] in in_head]
        entries, offset = [], 0
        for name, shape in ordered:
            entries.append(ParameterEntry(name, shape, offset))
            offset += shape.numel()
        self.entries = tuple(entries)
        self.size = offset
        self.body_size = sum(e.numel for e in entries if e.name not in in_head)

    def __repr__(self) -> str:
        head = self.size - self.body_size
        return (
            f"ParameterSpace({len(self.entries)} parameters, {self.size} numbers: body {self.body_size}, head {head})"
        )

    def described_head(self) -> str:
        """Return the names of the parameters that form the head, for error messages."""
        names = [entry.name for entry in self.entries if entry.offset >= self.body_size]
        return (
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "nothing"
        )

    def fingerprint(self) -> str:
        """Return a hash of the names and shapes of the parameters, and of the start of the head."""
        layout = repr((self.body_size, [(entry.name, tuple(entry.shape)) for entry in self.entries]))
        return blake2b(layout.encode(), digest_size=8).hexdigest()

    def part(self, part: Part) -> slice:
        """Return the slice of the vector that is this part."""
        return {"all": slice(0, self.size), "body": slice(0, self.body_size), "head": slice(self.body_size, None)}[part]

    def mask(self, which: Selection, optional: bool = False) -> Tensor:
        """Return a mask of the vector: True where a selected parameter lies; a selection of nothing is an error.

        Args:
            which: name of a submodule or of a parameter; a pattern of such names with the wildcards `*` (which also
                matches dots), `?` and `[...]`; a class of layers, such as `nn.LayerNorm`; or a list of these. Names are
                full names; what matches a submodule selects all parameters in it.
            optional: whether it is no error if the model has nothing of that kind.
        """
        chosen = self._names.select(which, "mask", optional)
        mask = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        for entry in self.entries:
            mask[entry.offset : entry.end] = entry.name in chosen
        return mask

    def span(self, which: Selection) -> slice:
        """Return the slice of the vector in which the selected parameters lie, which must be next to each other.

        Args:
            which: the parameters, as for `mask`.
        """
        places = self.mask(which).nonzero().flatten()
        low, high = int(places[0]), int(places[-1]) + 1
        if high - low != len(places):
            raise EquipoiseError(f"the parameters {_shown(which)} are not next to each other; use a mask")
        return slice(low, high)

    def body(self, vector: Tensor) -> Tensor:
        """Return the body's part of a vector, as a view."""
        return vector[..., : self.body_size]

    def head(self, vector: Tensor) -> Tensor:
        """Return the head's part of a vector, as a view."""
        return vector[..., self.body_size :]

    @staticmethod
    def join(*parts: Tensor) -> Tensor:
        """Join body and head, or more parts in their order, to a whole vector; each is for all clients or for one."""
        lead = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
        return torch.cat([part.expand(*lead, -1) for part in parts], dim=-1)

    @staticmethod
    def merge(mask: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
        """Return the whole vector from its numbers inside and outside a mask; either may be one for all clients."""
        lead = torch.broadcast_shapes(inside.shape[:-1], outside.shape[:-1])
        vector = inside.new_empty(*lead, len(mask))
        vector[..., mask], vector[..., ~mask] = inside, outside
        return vector

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

    def shuffled(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        """Return a vector with the entries of every parameter in another order.

        If `vector` is an initial model whose weights were drawn independently, so is the result: it is distributed as
        another initialisation is, whatever the module draws them from.
        """
        order = [torch.randperm(entry.numel, generator=generator) + entry.offset for entry in self.entries]
        return vector.index_select(-1, torch.cat(order).to(vector.device))

    def bind(self, module: nn.Module, vector: Tensor) -> None:
        """Make the module's parameters views of `vector`, so that loading a client takes one copy."""
        parameters = dict(module.named_parameters())
        for name, view in self.views(vector).items():
            parameters[name].data = view

    def module(self, template: nn.Module, vector: Tensor) -> nn.Module:
        """Return a copy of `template` with the parameters in `vector`, on its device; they share no memory with it."""
        module = copy.deepcopy(template).to(vector.device, vector.dtype)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in self.views(vector).items():
                parameters[name].data = view.clone(memory_format=torch.contiguous_format)
        return module.eval()


class _ParameterNames:
    """The names of a module's parameters and submodules, among which parameters are selected."""

    def __init__(self, module: nn.Module):
        self.layers = {name: type(layer) for name, layer in module.named_modules(remove_duplicate=False)}
        self.frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        first: dict[nn.Parameter, str] = {p: name for name, p in module.named_parameters()}
        self.names = {name: first[p] for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        "the first name of every trained parameter by each of its names, of which a tied one has several"

    def select(self, which: Selection, what: str, optional: bool = False) -> set[str]:
        """Return the first names of the selected parameters.

        Args:
            which: the selection.
            what: what is selected, for error messages.
            optional: whether a selector may select nothing.
        """
        found: set[str] = set()
        for selector in selectors(which, what):
            matched = {name for name in self.names if self._matches(selector, name)}
            if not matched and not optional:
                raise EquipoiseError(self._nothing(selector, what))
            found |= matched
        chosen = {self.names[name] for name in found}
        for name, first in self.names.items():
            if first in chosen and name not in found:
                other = next(each for each in found if self.names[each] == first)
                raise EquipoiseError(
                    f"{what}={_shown(which)} matches {other} but not {name}, and these are one tied parameter; "
                    "name both or none"
                )
        return chosen

    def _matches(self, selector: Selector, name: str) -> bool:
        if isinstance(selector, type):
            parts = name.split(".")
            return any(issubclass(self.layers[".".join(parts[:depth])], selector) for depth in range(len(parts)))
        # A name that exists is itself, whatever is in it.
        if selector in self.layers or selector in self.names or selector in self.frozen:
            return name == selector or name.startswith(selector + ".")
        return fnmatchcase(name, selector) or fnmatchcase(name, selector + ".*")

    def _nothing(self, selector: Selector, what: str) -> str:
        """Return a sentence about a selector that selects nothing."""
        sentence = f"{what}={_shown(selector)} matches no parameter of the model"
        if any(self._matches(selector, name) for name in self.frozen):
            return f"{what}={_shown(selector)} matches only frozen parameters, which are neither trained nor sent"
        if isinstance(selector, type):
            kinds = sorted({self.layers[name.rpartition(".")[0]].__name__ for name in self.names})
            return f"{sentence}; its parameters are in layers of the kinds {_some(kinds)}"
        for deeper in (f"*.{selector}", f"*{selector}*"):
            if any(self._matches(deeper, name) for name in self.names):
                return f"{sentence}; did you mean {deeper!r}?"
        close = nearest(selector, filter(None, {*self.layers, *self.names}))
        top = list(dict.fromkeys(name.split(".")[0] for name in self.names))
        return sentence + (close if "did you mean" in close else f"; its parts are {_some(top)}")


def selectors(which: Selection, what: str) -> tuple[Selector, ...]:
    """Return a selection as a list of names, patterns and classes.

    Args:
        which: the selection.
        what: what is selected, for error messages.
    """
    if isinstance(which, (str, type)):
        which = (which,)
    if not isinstance(which, (list, tuple)) or not all(
        (isinstance(each, str) and each) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in which
    ):
        raise EquipoiseError(
            f"{what}={_shown(which)} is not allowed; it must be the name of a submodule or a parameter, a pattern such "
            "as '*.lora_B.*', a class of layers, or a list of these"
        )
    return tuple(which)


def _shown(which: Any) -> str:
    if isinstance(which, (list, tuple)):
        return f"[{', '.join(map(_shown, which))}]" if len(which) != 1 else _shown(which[0])
    if isinstance(which, nn.Module):
        return f"a {type(which).__name__}"
    return which.__name__ if isinstance(which, type) else repr(which)


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *([f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else [])])

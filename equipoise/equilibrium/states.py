"""States of several tensors: tuples, lists and dictionaries of tensors, kept as one row of numbers per sample."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError

State = Any
"""A tensor, or a tuple, list or dictionary of states."""


class StateLayout:
    """Converts a state of several tensors, each with one row per sample, to rows of numbers and back."""

    def __init__(self, like: State):
        """Learn the layout of a state, which must have tensors of one kind and as many rows in each."""
        parts = list(_tensors(like, "the guess z"))
        if not parts:
            raise EquipoiseError("the guess z has no tensors; a state needs at least one")
        first = parts[0]
        for part in parts:
            if not part.is_floating_point() or part.ndim == 0:
                raise EquipoiseError(
                    "every tensor of the guess z must be a floating-point tensor with one row per sample, "
                    f"not {part.dtype} of shape {tuple(part.shape)}"
                )
            if (len(part), part.dtype, part.device) != (len(first), first.dtype, first.device):
                raise EquipoiseError(
                    "the tensors of the guess z must have the same number of rows, dtype and device; "
                    f"there are {_kind(first)} and {_kind(part)}"
                )
        self.like = _map(like, lambda _: None)
        self.shapes = [part.shape[1:] for part in parts]
        self.sizes = [shape.numel() for shape in self.shapes]

    def rows(self, state: State, what: str = "f(z)") -> Tensor:
        """Return a state of this layout as a tensor of shape (samples, numbers per sample)."""
        if not _same(state, self.like):
            raise EquipoiseError(f"{what} must have the structure of z; z is {_show(self.like)}, {what} {_show(state)}")
        parts = list(_tensors(state, what))
        rows = {tuple(part.shape[:1]) for part in parts}
        if len(rows) > 1 or () in rows:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise EquipoiseError(f"the tensors of {what} must have one row per sample each; their shapes are {shapes}")
        for part, shape in zip(parts, self.shapes, strict=True):
            if part.shape[1:] != shape:
                raise EquipoiseError(
                    f"{what} must have the shapes of z; a tensor of z has {tuple(shape)} per sample, "
                    f"that of {what} has {tuple(part.shape[1:])}"
                )
        return torch.cat([p.reshape(len(p), size) for p, size in zip(parts, self.sizes, strict=True)], dim=1)

    def state(self, rows: Tensor, copy: bool = False) -> State:
        """Return rows of numbers as a state of this layout.

        Args:
            rows: the numbers, one row per sample.
            copy: whether the state's tensors are copies, which may be changed in place.
        """
        pieces = iter(zip(rows.split(self.sizes, dim=1), self.shapes, strict=True))

        def next_part(_: None) -> Tensor:
            piece, shape = next(pieces)
            part: Tensor = (piece.clone() if copy else piece).reshape(len(rows), *shape)
            return part

        return _map(self.like, next_part)

    def of_rows(self, f: Callable[..., State]) -> Callable[..., Tensor]:
        """Return f as a function from rows to rows."""
        return lambda rows, *inputs: self.rows(f(self.state(rows), *inputs))


def _tensors(state: State, what: str) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple | list | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors(part, what)
    else:
        raise EquipoiseError(f"{what} must consist of tensors, but has a {type(state).__name__}")


def _map(state: State, change: Callable[[Any], Any]) -> State:
    if isinstance(state, dict):
        return {key: _map(part, change) for key, part in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):  # a named tuple
        return type(state)(*(_map(part, change) for part in state))
    if isinstance(state, tuple | list):
        return type(state)(_map(part, change) for part in state)
    return change(state)


def _same(state: State, like: State) -> bool:
    if isinstance(like, dict):
        return isinstance(state, dict) and list(state) == list(like) and all(_same(state[k], like[k]) for k in like)
    if isinstance(like, tuple | list):
        return type(state) is type(like) and len(state) == len(like) and all(map(_same, state, like))
    return not isinstance(state, tuple | list | dict)


def _show(state: State) -> str:
    if isinstance(state, dict):
        return f"a dictionary of {', '.join(map(repr, state))}"
    return f"a {type(state).__name__} of {len(state)}" if isinstance(state, tuple | list) else "a single tensor"


def _kind(part: Tensor) -> str:
    return f"{len(part)} rows of {part.dtype} on {part.device}"

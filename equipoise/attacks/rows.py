"""Messages as rows of numbers, some coordinates at a time, from which attackers make messages."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from equipoise.state import RoundUploads, State, Upload
from equipoise.torch_device import widened


def zeros(message: State) -> State:
    """Return a message of zeros."""
    return State({name: torch.zeros_like(t) for name, t in message.items()})


def blocks(messages: Sequence[State], centre: State) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield blocks of coordinates of all messages.

    Args:
        messages: the messages, all of the same shapes.
        centre: what is subtracted from each; its fields are those that are yielded.

    Yields:
        The field, the centre's coordinates, and one row per message: its difference from the centre, in float64.
    """
    uploads = RoundUploads(tuple(range(len(messages))), tuple(map(Upload, messages)))
    for name, middle in centre.items():
        low, flat = 0, widened(middle.flatten())
        for rows in uploads.blocks(name):
            part = flat[low : low + rows.shape[1]]
            low += rows.shape[1]
            yield name, part, widened(rows) - part


def forge(messages: Sequence[State], centre: State, function: Callable[[Tensor], Tensor]) -> State:
    """Return the centre plus what a function makes of the messages' differences from it.

    Args:
        messages: the messages.
        centre: what differences are taken from; its fields are those of the result.
        function: makes one row of a block of rows.
    """
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name, middle, rows in blocks(messages, centre):
        parts[name].append(middle + function(rows))
    return State({name: torch.cat(parts[name]).to(t.dtype).reshape(t.shape) for name, t in centre.items()})


def completed(forged: State, own: State) -> State:
    """Return a forged message whose other fields (such as statistics of BatchNorm) are the honest ones."""
    return State({name: forged.get(name, t) for name, t in own.items()})


def gram(messages: Sequence[State], centre: State) -> Tensor:
    """Return the inner products of the messages' differences from the centre, in float64."""
    total: Tensor | float = 0.0
    for _, _, rows in blocks(messages, centre):
        total = total + rows @ rows.T
    assert isinstance(total, Tensor)
    return total

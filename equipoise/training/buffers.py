"""A module's buffers (BatchNorm statistics) as one vector, and which of them belong to which model of a client."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.state import State
from equipoise.torch_device import CPU

BUFFERS = "buffers"
"""Name of buffers in saved states and in messages: a client's own in its state; the average, where statistics are
averaged, in the server's state and in both messages."""
_REMEMBERED = 8  # results of `descend` whose buffers are known; algorithms use the newest two or three


def load_buffers(module: nn.Module, names: Sequence[str], vector: Tensor) -> None:
    """Copy a vector into the buffers with these names."""
    offset, buffers = 0, dict(module.named_buffers())
    for name in names:
        size = buffers[name].numel()
        buffers[name].copy_(vector[offset : offset + size].view(buffers[name].shape))
        offset += size


def read_buffers(module: nn.Module, names: Sequence[str], like: Tensor) -> Tensor:
    """Return the buffers with these names as one vector, in the number format and on the device of another."""
    buffers = dict(module.named_buffers())
    return torch.cat([like.new_empty(0), *(buffers[name].detach().flatten().to(like.dtype) for name in names)])


class BufferLayout:
    """Which numbers in the vector of a module's buffers can be averaged, and which of them are variances."""

    def __init__(self, module: nn.Module, names: Sequence[str], device: torch.device = CPU):
        """Lay out the buffers with these names.

        Args:
            module: the module.
            names: the buffers that training changes.
            device: where the vectors are.
        """
        buffers, kinds = dict(module.named_buffers()), dict(module.named_modules())

        def marked(chosen: Iterable[bool]) -> Tensor:
            pieces = [torch.full((buffers[n].numel(),), c) for n, c in zip(names, chosen, strict=True)]
            return torch.cat([torch.empty(0, dtype=torch.bool), *pieces])

        def is_variance(name: str) -> bool:
            owner, _, last = name.rpartition(".")
            return last == "running_var" and isinstance(kinds[owner], nn.modules.batchnorm._NormBase)

        # Counters (num_batches_tracked) stay with the client: their average means nothing.
        averaged = marked(buffers[name].is_floating_point() for name in names)
        self.any_averaged = bool(averaged.any())
        # Places instead of masks: to find out how many numbers a mask selects, the host would wait for the device.
        self.averaged = averaged.nonzero().flatten().to(device)
        self.variances = marked(map(is_variance, names))[averaged].to(device)

    def shared(self, buffers: Tensor) -> Tensor:
        """Return the part of the buffers that is averaged."""
        return buffers[self.averaged]

    def merged(self, shared: Tensor, own: Tensor) -> Tensor:
        """Return buffers with averaged numbers from `shared` and all others from `own`."""
        merged = own.clone()
        merged[self.averaged] = shared.to(own.dtype)
        return merged

    def valid(self, shared: Tensor) -> Tensor:
        """Return averaged buffers whose variances are not negative, which an attack can make them."""
        return torch.where(self.variances, shared.clamp(min=0), shared)


class BufferTracker:
    """The buffers of a client's models in a round in which statistics are averaged.

    A model that comes from the server has the averaged buffers, one from the client's state has the client's own, and
    the result of training has those that training left. Models are recognised by their memory; any other vector, such
    as one joined of two, counts as one from the server.
    """

    def __init__(self, shared: Tensor, own: Tensor, client: State):
        """Begin a client's work.

        Args:
            shared: the averaged buffers.
            own: the client's own buffers.
            client: the client's state, whose models have its own buffers.
        """
        self.shared, self.own, self.kept = shared, own, tuple(client.values())
        self.results: deque[tuple[Tensor, Tensor]] = deque(maxlen=_REMEMBERED)

    def record(self, result: Tensor, buffers: Tensor) -> None:
        """Remember the buffers that belong to a result of training."""
        self.results.append((result, buffers))

    def of(self, vector: Tensor) -> Tensor:
        """Return the buffers that belong to a model."""
        for result, buffers in reversed(self.results):
            if _same_memory(result, vector):
                return buffers
        return self.own if any(_same_memory(t, vector) for t in self.kept) else self.shared

    def of_state(self, state: State) -> Tensor:
        """Return the buffers that belong to a state or message: those of the newest trained model in it.

        If there is none, because a paper sends something computed from a model, they are those of the last training; a
        client that did not train at all keeps its own.
        """
        for result, buffers in reversed(self.results):
            if any(_same_memory(result, t) for t in state.values()):
                return buffers
        return self.results[-1][1] if self.results else self.own


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def broadcast(algorithm: Algorithm, server: State, number: int) -> State:
    """Return the message that the server sends to a client, with the averaged buffers if there are any.

    Args:
        algorithm: the algorithm.
        server: the server's state.
        number: the number of the client.
    """
    down = algorithm.broadcast(without_buffers(server), number)
    return State(down, **{BUFFERS: server[BUFFERS]}) if BUFFERS in server else down


def without_buffers(state: State) -> State:
    """Return a server's state or a message as the algorithm knows it."""
    return State({k: t for k, t in state.items() if k != BUFFERS}) if BUFFERS in state else state

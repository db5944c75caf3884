"""Communication between the processes of a run, on torch.distributed.

Every process of a run does the same steps in the same order and calls these functions at the same places. Messages are
JSON or safetensors, which cannot contain code. They go through the host's memory, over gloo.
"""

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from equipoise.distributed import environment
from equipoise.errors import EquipoiseError, ProcessLost

_PATIENCE = timedelta(hours=6)  # the longest time that a process waits for another one in a round


class Ranks:
    """This process as one of those that do a run together; this class is that of a run in one process."""

    rank = 0
    "number of this process, from 0"
    size = 1
    "number of processes"

    @property
    def leader(self) -> bool:
        """Tell whether this process writes files and reports to the user."""
        return self.rank == 0

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        return [value]

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors of all processes, in their order, in the host's memory."""
        return [dict(tensors)]

    def any(self, flag: bool) -> bool:
        """Tell whether a flag is set in any process."""
        return any(self.gather_json(flag))

    def check_equal(self, what: str, value: Any) -> None:
        """Raise an error unless a value is the same in all processes.

        Args:
            what: name of the value, for the error.
            value: the value in this process.
        """
        found = self.gather_json(value)
        if different := [rank for rank, other in enumerate(found) if other != found[0]]:
            raise EquipoiseError(
                f"process {different[0]} has other {what} than process 0; all processes of a run need the same files, "
                "versions and kind of processor"
            )

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.gather_json(None)

    def close(self) -> None:
        """End the communication."""


class TorchRanks(Ranks):
    """The processes of a run that torchrun or `equipoise run --processes` started."""

    def __init__(self, rank: int, size: int, address: str | None = None):
        """Join the other processes.

        Args:
            rank: number of this process.
            size: number of processes.
            address: where they meet, in the form of torch's `init_method`; without it, where torchrun says.
        """
        self.rank, self.size = rank, size
        try:
            store, _, _ = next(iter(rendezvous(address or "env://", rank, size, timeout=_PATIENCE)))
            # When torchrun restarts the processes, the store still has the addresses of those before.
            store = PrefixStore(f"equipoise {environment.restarts()}", store)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise EquipoiseError(
                f"process {rank} cannot join the others of its run ({text}); GLOO_SOCKET_IFNAME names the network "
                "interface to use"
            ) from error
        # Otherwise its threads may still be at work when the interpreter is taken down, and abort the process.
        atexit.register(self.close)

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(content) for content in self._gather_bytes(json.dumps(value).encode())]

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        # A copy, because tensors that share memory are refused, such as the messages of clients that did not train.
        content = save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()})
        # In the order of names, because a file of tensors has none, and a state must be the same in all processes.
        return [dict(sorted(load(found).items())) for found in self._gather_bytes(content)]

    def _gather_bytes(self, content: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _sentences():
            torch.distributed.all_gather(sizes, torch.tensor([len(content)]))
        lengths = [int(size) for size in sizes]
        room = torch.zeros(max(lengths), dtype=torch.uint8)
        room[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = [torch.empty_like(room) for _ in range(self.size)]
        with _sentences():
            torch.distributed.all_gather(found, room)
        return [t[:length].numpy().tobytes() for t, length in zip(found, lengths, strict=True)]

    def close(self) -> None:
        if torch.distributed.is_initialized():
            with suppress(RuntimeError):  # the others may be gone
                torch.distributed.destroy_process_group()


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn the error of a connection that ended into one sentence."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises then
        raise ProcessLost(
            "another process of this run has ended, so the run stops; resume it with --resume, with any number of "
            "processes"
        ) from error


_current: list[Ranks] = []


def current_ranks() -> Ranks:
    """Return this process as one of a run's; at the first call it joins the others, if there are any."""
    if not _current:
        size, address = environment.world_size(), os.environ.get(environment.LAUNCHED)
        _current.append(TorchRanks(environment.rank(), size, address) if size > 1 else Ranks())
    return _current[0]

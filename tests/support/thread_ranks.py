"""The processes of a run, played by threads, for tests of what they exchange."""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equipoise.distributed.ranks import Ranks
from equipoise.errors import EquipoiseError

_PATIENCE = 60.0  # seconds that a thread waits for one that has failed


class Thread(Ranks):
    """A process of a run, played by a thread."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: dict[int, Any]):
        self.rank, self.size, self.meeting, self.table = rank, size, meeting, table

    def gather_json(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.meeting.wait()
        found = [self.table[rank] for rank in range(self.size)]
        self.meeting.wait()
        return found

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return self.gather_json(dict(tensors))


def in_threads(size: int, work: Any) -> list[Any]:
    """Call `work(ranks)` in as many threads, and return what each returns, or the error that it raises."""
    meeting, table, found = threading.Barrier(size, timeout=_PATIENCE), {}, {}
    broken: list[Exception] = []

    def call(rank: int) -> None:
        try:
            found[rank] = work(Thread(rank, size, meeting, table))
        except EquipoiseError as error:
            found[rank] = error
        except Exception as error:  # the others must not wait for this one
            broken.append(error)
            meeting.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return [found[rank] for rank in range(size)]

"""Shards: a division of the clients that is fixed for a run, whatever number of processes or threads it uses.

Floating-point sums depend on the order of their terms, and matrix products on what else is in the same call. So
uploads are summed shard by shard, and clients are stacked and scored only with clients of their own shard. A process
owns whole shards; therefore results have the same bytes with one process and with many.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

MOST = 64
"""The largest number of shards, and so of processes that can have clients."""
T = TypeVar("T")


@dataclass(frozen=True)
class ClientShards:
    """A division of clients into shards of consecutive numbers and almost equal size."""

    clients: int
    "number of clients that train"
    unseen: int = 0
    "number of clients that only adapt the result; their numbers follow"
    count: int = MOST
    "number of shards, a power of two; some are empty if there are fewer clients"

    @staticmethod
    def of_stacks(clients: int, unseen: int, cohort: int, size: int) -> "ClientShards":
        """Return shards of which each has about `size` clients of a cohort, so that it is worth stacking them."""
        count = 1
        while 2 * count <= min(MOST, cohort / size):
            count *= 2
        return ClientShards(clients, unseen, count)

    def __call__(self, number: int) -> int:
        """Return the shard of the client with this number; newcomers that nobody announced are in the last one."""
        if number >= self.clients and self.unseen:
            return min((number - self.clients) * self.count // self.unseen, self.count - 1)
        return min(number * self.count // self.clients, self.count - 1)

    @property
    def used(self) -> int:
        """Return the number of shards that have clients."""
        return min(self.count, self.clients)

    def group(self, items: Iterable[T], number: Callable[[T], int]) -> dict[int, list[T]]:
        """Return items by shard, in the order of the shards; within a shard they keep their order.

        Args:
            items: anything that belongs to a client.
            number: returns the number of an item's client.
        """
        found: dict[int, list[T]] = {}
        for item in items:
            found.setdefault(self(number(item)), []).append(item)
        return dict(sorted(found.items()))

    def portions(
        self, items: Iterable[T], number: Callable[[T], int], limit: int, size: Callable[[T], int] = lambda item: 1
    ) -> list[list[T]]:
        """Divide items into portions that are not too large, in the order of the shards.

        Where a shard is cut does not depend on what is in other shards.

        Args:
            items: anything that belongs to a client.
            number: returns the number of an item's client.
            limit: the largest size of a portion; only a single item may be larger.
            size: returns the size of an item.
        """
        cuts = [cut for shard in self.group(items, number).values() for cut in _cut(shard, limit, size)]
        together = _cut(cuts, limit, lambda cut: sum(map(size, cut)))
        return [[item for cut in some for item in cut] for some in together]

    def owner(self, number: int, processes: int) -> int:
        """Return the process that owns the client with this number."""
        return self(number) * processes // self.count


def _cut(items: Iterable[T], limit: int, size: Callable[[T], int]) -> list[list[T]]:
    """Cut a list into parts whose sizes are at most the limit, or that are single items."""
    parts: list[list[T]] = []
    room = 0
    for item in items:
        if not parts or size(item) > room:
            parts.append([])
            room = limit
        parts[-1].append(item)
        room -= size(item)
    return parts

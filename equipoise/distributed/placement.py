"""Which clients belong to this process, and sums over the clients of all processes.

A sum has a fixed order: within a shard client by client, then shards along a binary tree. A process sums the largest
parts of that tree that lie within its own shards, and only these are exchanged: one vector per process if the number
of processes is a power of two, and a few otherwise. So the bytes of a sum do not depend on the number of processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.distributed.ranks import Ranks
from equipoise.distributed.shards import ClientShards

Tensors = Mapping[str, Tensor]
Leaf = Callable[[int], dict[str, Tensor] | None]
"""Returns the sum over one shard; None if no client in it counts."""


@dataclass(frozen=True)
class Placement:
    """The shards of a run, and the processes that own them."""

    shards: ClientShards
    ranks: Ranks = field(default_factory=Ranks)

    def owns(self, number: int) -> bool:
        """Tell whether the client with this number belongs to this process."""
        return self.shards.owner(number, self.ranks.size) == self.ranks.rank

    def owner(self, number: int) -> int:
        """Return the process that the client with this number belongs to."""
        return self.shards.owner(number, self.ranks.size)

    def total(self, items: Iterable[tuple[int, Tensors, float]], device: torch.device) -> dict[str, Tensor] | None:
        """Return the weighted sum over clients of all processes; None if there is no client at all.

        Args:
            items: number, tensors and weight of clients; those of other processes are skipped.
            device: where the result is to be.
        """
        leaves: dict[int, dict[str, Tensor]] = {}
        for number, tensors, weight in items:
            if not self.owns(number):
                continue
            leaf = leaves.setdefault(self.shards(number), {})
            for name, t in tensors.items():
                leaf[name] = leaf[name].add_(t, alpha=weight) if name in leaf else t * weight
        if self.ranks.size == 1:
            return _subtree(leaves.get, 0, self.shards.count)
        own = [shard for shard in range(self.shards.count) if self._shard_owner(shard) == self.ranks.rank]
        nodes = _largest_subtrees(leaves.get, 0, self.shards.count, own)
        sent = {f"{low} {high} {name}": t for (low, high), node in nodes.items() for name, t in node.items()}
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for tensors in self.ranks.gather(sent):
            for key, t in tensors.items():
                low, high, name = key.split(" ", 2)
                # A copy, aligned as any tensor is: the last digits of products may depend on that.
                found.setdefault((int(low), int(high)), {})[name] = t.to(device, copy=True)
        return _from_subtrees(found, 0, self.shards.count)

    def _shard_owner(self, shard: int) -> int:
        return shard * self.ranks.size // self.shards.count

    def rows(self, own: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return one row per client, of all processes in their order, as a matrix.

        Args:
            own: the rows of this process's clients, in the order of their numbers.
            like: has the dtype, the device and the length of a row.
        """
        if self.ranks.size == 1:
            return torch.stack(list(own))
        mine = torch.stack(list(own)) if own else like.new_empty((0, *like.shape))
        return torch.cat([part["rows"].to(like.device) for part in self.ranks.gather({"rows": mine})])


def _plus(one: dict[str, Tensor] | None, other: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    if one is None or other is None:
        return other if one is None else one
    return {name: t + other[name] for name, t in one.items()}


def _subtree(leaf: Leaf, low: int, high: int) -> dict[str, Tensor] | None:
    """Return the sum over the shards from low to high - 1."""
    if high - low == 1:
        return leaf(low)
    middle = (low + high) // 2
    return _plus(_subtree(leaf, low, middle), _subtree(leaf, middle, high))


def _largest_subtrees(leaf: Leaf, low: int, high: int, own: Sequence[int]) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Return the sums over the largest subtrees that contain own shards only."""
    if not own or high <= own[0] or low > own[-1]:
        return {}
    if own[0] <= low and high <= own[-1] + 1:
        found = _subtree(leaf, low, high)
        return {} if found is None else {(low, high): found}
    middle = (low + high) // 2
    return _largest_subtrees(leaf, low, middle, own) | _largest_subtrees(leaf, middle, high, own)


def _from_subtrees(nodes: Mapping[tuple[int, int], dict[str, Tensor]], low: int, high: int) -> dict[str, Tensor] | None:
    """Return the sum over the shards from low to high - 1, given the sums over subtrees."""
    if (low, high) in nodes:
        return nodes[low, high]
    if high - low == 1:
        return None
    middle = (low + high) // 2
    return _plus(_from_subtrees(nodes, low, middle), _from_subtrees(nodes, middle, high))

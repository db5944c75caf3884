"""Shards: a division of the clients that depends on nothing but their number."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.distributed.shards import ClientShards

COUNTS = st.sampled_from([1, 2, 4, 8])


@given(st.lists(st.integers(1, 9), max_size=30), COUNTS, st.integers(1, 20))
def test_portions_hold_everything_and_cut_a_shard_whatever_is_in_others(
    sizes: list[int], count: int, limit: int
) -> None:
    shards = ClientShards(max(1, len(sizes)), count)
    items = list(range(len(sizes)))

    def divide(some: list[int]) -> list[list[int]]:
        return shards.portions(some, lambda i: i, limit, lambda i: sizes[i])

    found = divide(items)
    assert [i for portion in found for i in portion] == items
    assert all(len(portion) == 1 or sum(sizes[i] for i in portion) <= limit for portion in found)
    for k in range(count):
        within = [[i for i in portion if shards(i) == k] for portion in found]
        assert [part for part in within if part] == divide([i for i in items if shards(i) == k])

"""Sums over clients of several processes."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.distributed.placement import Placement
from equipoise.distributed.ranks import Ranks
from equipoise.distributed.shards import MOST, ClientShards
from tests.support.thread_ranks import in_threads

counts = st.sampled_from([1, 2, 4, 8, 64])


@given(clients=st.integers(1, 40), count=counts, size=st.integers(1, 7), seed=st.integers(0, 9), data=st.data())
def test_a_sum_has_the_same_bytes_in_every_process_whatever_their_number(
    clients: int, count: int, size: int, seed: int, data: st.DataObject
) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=1)))
    shards = ClientShards(clients, count=count)
    rng = torch.Generator().manual_seed(seed)
    vectors = {who: {"w": torch.randn(7, generator=rng) * 10.0 ** (who % 5)} for who in range(clients)}
    items = [(who, vectors[who], 0.1 * who + 1) for who in chosen]
    alone = Placement(shards).total(items, torch.device("cpu"))
    for found in in_threads(size, lambda ranks: Placement(shards, ranks).total(items, torch.device("cpu"))):
        assert torch.equal(found["w"], alone["w"])
    exact = sum(vectors[who]["w"].double() * weight for who, _, weight in items)
    torch.testing.assert_close(alone["w"].double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@given(clients=st.integers(1, 200), unseen=st.integers(0, 50), count=counts, size=st.integers(1, MOST))
def test_every_client_has_one_owner_and_owners_are_in_the_order_of_numbers(
    clients: int, unseen: int, count: int, size: int
) -> None:
    shards = ClientShards(clients, unseen, count)
    for numbers in (range(clients), range(clients, clients + unseen)):
        owners = [shards.owner(number, size) for number in numbers]
        assert owners == sorted(owners)
        assert all(0 <= owner < size for owner in owners)


@given(clients=st.integers(8, 200), size=st.integers(1, 8))
def test_processes_own_almost_equally_many_clients(clients: int, size: int) -> None:
    shards = ClientShards(clients)
    owned = [sum(shards.owner(number, size) == rank for number in range(clients)) for rank in range(size)]
    in_shard = -(-clients // MOST)  # a process owns whole shards
    assert max(owned) - min(owned) <= 2 * in_shard


def test_a_sum_over_nobody_is_nothing() -> None:
    assert Placement(ClientShards(4)).total([], torch.device("cpu")) is None


def test_rows_of_all_processes_come_in_the_order_of_numbers() -> None:
    shards, vectors = ClientShards(10), torch.arange(30.0).view(10, 3)

    def rows(ranks: Ranks) -> Tensor:
        placement = Placement(shards, ranks)
        return placement.rows([vectors[who] for who in range(10) if placement.owns(who)], vectors[0])

    for found in in_threads(16, rows):  # six of them own nobody
        assert torch.equal(found, vectors)


def test_processes_that_differ_stop_with_a_sentence() -> None:
    for found in in_threads(3, lambda ranks: ranks.check_equal("settings", ranks.rank == 2)):
        assert str(found).startswith("process 2 has other settings than process 0")
    assert in_threads(3, lambda ranks: ranks.check_equal("settings", "the same")) == [None] * 3
    assert in_threads(2, lambda ranks: ranks.any(ranks.rank == 1)) == [True, True]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_power_of_two_of_processes_sends_one_vector_each(size: int) -> None:
    shards, sent = ClientShards(64), []

    class Counted(Ranks):
        rank, size = 0, 1

        def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
            sent.append(len(tensors))
            return [dict(tensors)]

    ranks = Counted()
    ranks.size = size
    Placement(shards, ranks).total([(who, {"w": torch.ones(2)}, 1.0) for who in range(64)], torch.device("cpu"))
    assert sent == ([] if size == 1 else [1])

"""Checkpoints that several processes write together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.distributed.placement import Placement
from equipoise.distributed.ranks import Ranks
from equipoise.distributed.shards import ClientShards
from equipoise.engine.checkpoint import CheckpointFolder
from equipoise.engine.client_store import ClientStore
from equipoise.state import State
from tests.support.thread_ranks import in_threads

CLIENTS = 12
MEMORY = 300  # bytes: a few states, so that others are written between checkpoints, too


def state(who: int, version: int) -> State:
    return State(v=torch.full((8,), 100.0 * version + who))


def life(folder: Path, ranks: Ranks, puts: list[int], version: int, save: bool) -> dict[int, float]:
    """Restore, change some clients and save; return the first number of each client's state as this process sees it."""
    placement, checkpoints = Placement(ClientShards(CLIENTS), ranks), CheckpointFolder(folder, ranks)
    store = ClientStore(CLIENTS, state(0, 0), folder, MEMORY, part=(ranks.rank, ranks.size))
    store.own = np.array([placement.owns(who) for who in range(CLIENTS)])
    checkpoints.load({"store": store})
    for who in filter(placement.owns, puts):
        store.put(who, state(who, version))
    if save:
        checkpoints.save(version, 0, State(w=torch.zeros(1)), {"store": store}, {}, {})
    return {who: float(store.get(who)["v"][0]) for who in range(CLIENTS) if save or placement.owns(who)}


lives = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(0, CLIENTS - 1), max_size=30), st.booleans()),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=lives)
def test_any_number_of_processes_reads_what_others_have_saved(
    lives: list[tuple[int, list[int], bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a process wrote without a checkpoint, because memory was short, does not count after it has ended."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    saved = dict.fromkeys(range(CLIENTS), 0.0)
    for version, (size, puts, save) in enumerate(lives, 1):
        now = saved | {who: 100.0 * version + who for who in puts}
        for seen in in_threads(size, lambda ranks, p=puts, v=version, s=save: life(folder, ranks, p, v, s)):
            assert seen == {who: now[who] for who in seen}
        saved = now if save else saved
    for seen in in_threads(3, lambda ranks: life(folder, ranks, [], len(lives) + 1, True)):
        assert seen == saved

"""The client store and the checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import Ditto
from equipoise.engine.checkpoint import CheckpointFolder
from equipoise.engine.client_store import ClientStore
from equipoise.state import State
from tests.support.problems import simulation


def state(value: float, size: int = 8) -> State:
    return State(v=torch.full((size,), float(value)), n=torch.tensor([value]))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), st.integers(1, 1000)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(actions, st.sampled_from([1, 200, 10**6]))
@settings(max_examples=60)
def test_the_store_is_a_dictionary_however_little_memory_it_has(tmp_path_factory, steps: list, memory: int) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = ClientStore(10, state(0), folder, memory)
    checkpoints = CheckpointFolder(folder)
    expected: dict[int, float] = {}
    saved: dict[int, float] = {}
    for count, (what, who, value) in enumerate(steps, 1):
        if what == "put":
            store.put(who, state(value))
            expected[who] = value
        elif what == "flush":
            checkpoints.save(count, 0, State(), {"store": store}, {}, {})
            saved = dict(expected)
        else:  # as after a crash: back to what was last saved
            store = ClientStore(10, state(0), folder, memory)
            checkpoints = CheckpointFolder(folder)
            checkpoints.load({"store": store})
            expected = dict(saved)
        for client in range(10):
            found = store.get(client)
            assert found.v.tolist() == [expected.get(client, 0)] * 8
            assert found.n.tolist() == [expected.get(client, 0)]
        assert store.kept.bytes <= max(memory, state(0).nbytes)


def test_superseded_files_go(tmp_path: Path) -> None:
    store = ClientStore(4, state(0), tmp_path)
    checkpoints = CheckpointFolder(tmp_path)
    for round in range(1, 30):
        for who in range(4):
            store.put(who, state(round * 10 + who))
        checkpoints.save(round, 0, State(), {"store": store}, {}, {})
    assert len(list(tmp_path.glob("clients-*"))) == 3  # the last three checkpoints'
    assert len(list(tmp_path.glob("round-*"))) == 3
    assert store.get(3).n.item() == 293


def test_a_file_that_is_mostly_superseded_gives_up_its_rest(tmp_path: Path) -> None:
    store = ClientStore(100, state(0), tmp_path)
    checkpoints = CheckpointFolder(tmp_path)
    for who in range(100):
        store.put(who, state(who))
    checkpoints.save(1, 0, State(), {"store": store}, {}, {})
    for round in range(2, 40):
        for who in range(round, 100):  # client 0 and those passed never change again
            store.put(who, state(1000 * round + who))
        checkpoints.save(round, 0, State(), {"store": store}, {}, {})
    assert len(list(tmp_path.glob("clients-*"))) <= 6
    assert store.get(0).n.item() == 0
    assert store.get(99).n.item() == 39099


def test_a_row_of_a_stack_does_not_keep_the_stack(tmp_path: Path) -> None:
    store = ClientStore(2, state(0), None)
    stacked = torch.zeros(1000, 8)
    store.put(0, State(v=stacked[3], n=stacked[3, :1]))
    assert store.get(0).v.untyped_storage().nbytes() == 8 * 4


def finished(folder: Path):
    run = simulation(Ditto(lr=0.05, batch=4), folder=folder, rounds=6, checkpoint_every=2)
    run.run()
    return run


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished(tmp_path / "whole")
    before = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    folder = tmp_path / "whole" / "checkpoint"
    server = folder / "server-000006.safetensors"
    if damage == "cut":
        server.write_bytes(server.read_bytes()[:-7])
    elif damage == "flip":
        content = bytearray(server.read_bytes())
        content[-1] ^= 1
        server.write_bytes(content)
    elif damage == "missing":
        server.unlink()
    else:
        (folder / "round-000006.json").write_text('{"round": 6, "fil')
    run = simulation(Ditto(lr=0.05, batch=4), folder=tmp_path / "whole", rounds=6, checkpoint_every=2, new=False)
    told: list[str] = []
    monkeypatch.setattr(run.callbacks, "on_message", told.append)
    run.resume()
    assert run.done == 4
    assert len(told) == 1
    assert "round-000006.json cannot be used" in told[0]
    assert "the one before is used" in told[0]
    run.run()
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == before
    for who in range(6):
        assert torch.equal(run.store.get(who).v, whole.store.get(who).v)


def test_without_any_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    run = simulation(Ditto(lr=0.05, batch=4), folder=tmp_path / "run", rounds=6, checkpoint_every=2, new=False)
    run.resume()
    assert run.done == 0
    run.run()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.part"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert not {"seconds", "time"} & set(json.loads(line))


def test_clients_without_a_state_take_no_room_in_a_checkpoint(tmp_path: Path) -> None:
    store = ClientStore(1000, state(0), tmp_path)
    store.put(700, state(7))
    store.flush()
    table = store.table()
    assert {name: column.tolist() for name, column in table.items()} == {"who": [700], "segment": [0], "row": [0]}
    everyone = {"segment": torch.full((1000,), -1), "row": torch.zeros(1000, dtype=torch.int64)}  # as in version 0.1
    everyone["segment"][700] = 0
    for saved in (table, everyone):
        again = ClientStore(1000, state(0), tmp_path)
        again.restore(saved, 1, {0: 1})
        assert again.segments() == store.segments()
        assert [again.get(who).n.item() for who in (0, 700, 999)] == [0, 7, 0]


def test_what_was_not_scored_is_not_in_a_checkpoint(tmp_path: Path) -> None:
    run = simulation(Ditto(lr=0.1), rounds=4, evaluate_every=3, folder=tmp_path / "run")
    sizes = []
    for _ in range(3):
        run.advance()
        sizes.append(len(run.scores.tensors()))
    run.close()
    assert sizes[:2] == [0, 0]
    assert sizes[2] > 0

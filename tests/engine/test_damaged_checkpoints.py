"""Whatever happens to its files, a checkpoint is used as it was saved, or not at all."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import Ditto
from equipoise.engine.checkpoint import CheckpointFolder
from equipoise.engine.checkpoint_manifest import digest_of, find_manifests
from equipoise.engine.client_store import ClientStore
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.state import State
from tests.support.checkpoint_mutations import mutate
from tests.support.problems import simulation

CLIENTS = 5
SEEDS = st.integers(0, 2**32 - 1)


def state(value: float) -> State:
    return State(v=torch.full((4,), float(value)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, of rounds 2, 4 and 6: then client k has the state 10 * round + k."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    checkpoints, store = CheckpointFolder(folder), ClientStore(CLIENTS, state(0), folder)
    for round in (2, 4, 6):
        for who in range(CLIENTS):
            store.put(who, state(10 * round + who))
        facts = {"logs": {"metrics.jsonl": 3}, "log_digests": {"metrics.jsonl": "0" * 32}, "counters": {"a": [1, {}]}}
        checkpoints.save(round, 0, State(w=torch.full((3,), float(round))), {"store": store}, {"k": state(1).v}, facts)
    return folder


def load(folder: Path) -> tuple[Any, list[str], ClientStore]:
    store = ClientStore(CLIENTS, state(0), folder)
    return *CheckpointFolder(folder).load({"store": store}), store


def is_as_saved(found: Any, store: ClientStore) -> bool:
    states = [store.get(who).v.tolist() for who in range(CLIENTS)]
    return found.server.w.tolist() == [found.round] * 3 and states == [
        [10 * found.round + who] * 4 for who in range(CLIENTS)
    ]


@settings(max_examples=150)
@given(seed=SEEDS)
def test_damage_by_chance_is_found(seed: int, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "checkpoint"
    shutil.copytree(saved, folder)
    what = mutate(random.Random(seed), folder, forge=False)
    found, complaints, store = load(folder)
    assert found is not None, what
    assert is_as_saved(found, store), what
    assert found.round == 6 or len(complaints) == 1 or not (folder / "round-000006.json").is_file(), what
    shutil.rmtree(folder)


@settings(max_examples=200)
@given(seed=SEEDS)
def test_forgeries_are_used_in_part_of_their_numbers_or_not_at_all(
    seed: int, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With digests that fit, numbers may be others; but every client has a state, and nothing else is raised."""
    folder = tmp_path_factory.mktemp("forged") / "checkpoint"
    shutil.copytree(saved, folder)
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 4)):
        mutate(rng, folder)
        if not find_manifests(folder):
            break
    found, complaints, store = load(folder)
    if found is not None:
        assert found.round in (2, 4, 6)
        for who in range(CLIENTS):
            store.get(who)
    assert all("\n" not in complaint and len(complaint) < 400 for complaint in complaints)
    shutil.rmtree(folder)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda m: [m],
    "round": lambda m: {**m, "round": -6},
    "another round": lambda m: {**m, "round": 5},
    "no number": lambda m: {**m, "round": float("nan")},
    "a huge number": lambda m: {**m, "store": {**m["store"], "written": 10**40}},
    "files as a list": lambda m: {**m, "files": list(m["files"])},
    "a file elsewhere": lambda m: {**m, "files": {**m["files"], "../outside": "0" * 32}},
    "an absolute path": lambda m: {**m, "files": {**m["files"], "/etc/hostname": "0" * 32}},
    "a server elsewhere": lambda m: {**m, "server": "../outside"},
    "a server without a digest": lambda m: {**m, "files": {k: v for k, v in m["files"].items() if k != m["server"]}},
    "facts as text": lambda m: {**m, "facts": "x"},
    "an unknown table": lambda m: {**m, "stores": {"written": 0, "rows": {}}},
    "rows of nothing": lambda m: {**m, "store": {**m["store"], "rows": {"²": 3}}},
    "too few rows": lambda m: {**m, "store": {**m["store"], "rows": dict.fromkeys(m["store"]["rows"], 1)}},
    "too many rows": lambda m: {**m, "store": {**m["store"], "rows": dict.fromkeys(m["store"]["rows"], 10**6)}},
    "a negative length": lambda m: {**m, "facts": {"logs": {"metrics.jsonl": -1}}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_no_run_writes_is_passed_over(change: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    (tmp_path / "outside").write_bytes((folder / "server-000006.safetensors").read_bytes())
    path = folder / "round-000006.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    content = CHANGES[change](content)
    path.write_text(json.dumps({**content, "digest": digest_of(content)} if isinstance(content, dict) else content))
    found, complaints, store = load(folder)
    assert found.round == 4
    assert is_as_saved(found, store)
    assert len(complaints) == 1
    assert complaints[0].startswith("the checkpoint round-000006.json cannot be used: ")


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, "9" * 5000, "NaN", '"x"', "\x00"])
def test_a_manifest_that_cannot_be_parsed_is_passed_over(content: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    (folder / "round-000006.json").write_text(content)
    found, complaints, _ = load(folder)
    assert found.round == 4
    assert complaints == ["the checkpoint round-000006.json cannot be used: it is damaged"]


def test_a_damaged_checkpoint_leaves_no_trace_in_the_store(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    for path in folder.glob("server-*"):
        path.unlink()
    found, complaints, store = load(folder)
    assert found is None
    assert len(complaints) == 3
    assert all(store.get(who).v.tolist() == [0] * 4 for who in range(CLIENTS))


def test_a_crash_while_a_checkpoint_is_written_again_loses_nothing(saved: Path, tmp_path: Path) -> None:
    """A server's state that no manifest lists yet may be there; what the manifest lists is not overwritten."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    before = (folder / "server-000006.safetensors").read_bytes()
    (folder / "server-000006b.safetensors").write_bytes(b"half of it")
    store, checkpoints = ClientStore(CLIENTS, state(0), folder), CheckpointFolder(folder)
    checkpoints.load({"store": store})
    checkpoints._remove_old = lambda stores, newest: []  # type: ignore[method-assign]
    checkpoints.save(6, 0, State(w=torch.zeros(3)), {"store": store}, {}, {})
    assert (folder / "server-000006.safetensors").read_bytes() == before


def run_in(folder: Path, new: bool = False) -> Simulation:
    return simulation(Ditto(lr=0.05, batch=4), folder=folder, rounds=6, checkpoint_every=2, new=new, mode="stacked")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_in(folder, new=True).run()
    return folder


@settings(max_examples=12, derandomize=True)
@given(seed=SEEDS)
def test_a_run_with_damaged_checkpoints_ends_as_it_should(
    seed: int, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(finished, folder)
    rng = random.Random(seed)
    what = mutate(rng, folder / "checkpoint", forge=False)
    run = run_in(folder)
    run.resume()
    if any(path.is_dir() for path in (folder / "checkpoint").iterdir()):  # one was put in the place of a file
        with suppress(EquipoiseError):
            run.run()
        return
    run.run()
    for name in ("metrics.jsonl", "clients.csv"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), what
    shutil.rmtree(folder)


@settings(max_examples=25, derandomize=True)
@given(seed=SEEDS)
def test_a_run_with_forged_checkpoints_resumes_or_says_why_not(
    seed: int, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(finished, folder)
    mutate(random.Random(seed), folder / "checkpoint")
    run = run_in(folder)
    with suppress(EquipoiseError):
        run.resume()
    run.close()
    shutil.rmtree(folder)

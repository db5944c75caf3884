"""The stacked executor: results have the same bytes with any number of threads."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.algorithms import Ditto, FedAvg, FedRep, KnnPer
from equipoise.data.federation import Federation, from_clients
from equipoise.distributed.shards import ClientShards
from equipoise.engine.simulation import Simulation
from equipoise.executors.base import ClientJob
from equipoise.executors.build import stack_size
from equipoise.executors.stacked import StackedExecutor
from equipoise.state import State
from tests.support.problems import classification, simulation

WORKERS = (1, 2, 3)


def wide(clients: int = 24, features: int = 40) -> Federation:
    """Ragged clients that are enough for several stacks, with samples that are not aligned in memory."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 40, clients)
    return from_clients([(rng.normal(size=(n, features)), rng.integers(0, 3, n)) for n in sizes])


FEDERATION = wide()


def module(features: int = 40) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(features, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def finished(algorithm: Any, workers: int, **settings: Any) -> Simulation:
    settings = {"mode": "stacked", "dtype": "float32", "rounds": 3, "participation": 0.75, **settings}
    run = simulation(algorithm, wide(), module(), head="2", workers=workers, **settings)
    run.run()
    return run


def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FEWEST", "_MOST"):
        monkeypatch.setattr(f"equipoise.executors.build.{name}", 2)


@pytest.mark.parametrize("algorithm", [FedAvg, Ditto, FedRep, KnnPer])
def test_results_have_the_same_bytes_with_any_number_of_threads(algorithm: Any) -> None:
    one, *others = (finished(algorithm(lr=0.1, batch=5), workers) for workers in WORKERS)
    assert one.executor.shards.count == 1
    for run in others:
        same(one, run)


def test_many_stacks_have_the_same_bytes_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    small_stacks(monkeypatch)
    one, *others = (finished(Ditto(lr=0.1, batch=5), workers) for workers in WORKERS)
    assert one.executor.shards.count == 8
    for run in others:
        same(one, run)


def same(one: Simulation, other: Simulation) -> None:
    assert one.lines
    for ours, theirs in zip(one.lines, other.lines, strict=True):
        assert ours == theirs
    for name, tensor in one.server.items():
        assert torch.equal(tensor, other.server[name]), name
    for who in range(len(one.federation)):
        for name, tensor in one.store.get(who).items():
            assert torch.equal(tensor, other.store.get(who)[name]), (who, name)
    for kind, table in one.scores.training.tables.items():
        assert table.scores.tobytes() == other.scores.training.tables[kind].scores.tobytes()


def executor(run: Simulation) -> StackedExecutor:
    assert isinstance(run.executor, StackedExecutor)
    return run.executor


def test_stacks_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    small_stacks(monkeypatch)
    found = []
    for workers in WORKERS:
        run = simulation(FedAvg(batch=4), wide(), module(), head="2", mode="stacked", workers=workers)
        stacks = executor(run)._stacks_of_jobs([run.job(who) for who in range(0, 24, 2)])
        found.append([[job.who for job in group] for group in stacks])
        run.close()
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 2


@given(st.sets(st.integers(0, 23), min_size=1), st.integers(1, 7), st.sampled_from([1, 2, 4, 8]))
def test_a_stack_has_clients_of_one_shard_and_does_not_depend_on_other_shards(
    cohort: set[int], size: int, count: int
) -> None:
    numbers, lengths = FEDERATION.numbers, FEDERATION.train.lengths
    stacked = object.__new__(StackedExecutor)
    stacked.federation, stacked.shards, stacked.size = FEDERATION, ClientShards(len(FEDERATION), count=count), size

    def divide(who: set[int]) -> list[list[int]]:
        return stacked.stacks(who, lambda i: i, lambda i: int(lengths[i]))

    found = divide(cohort)
    assert sorted(i for part in found for i in part) == sorted(cohort)
    assert all(0 < len(part) <= size for part in found)
    assert all(len({stacked.shards(numbers[i]) for i in part}) == 1 for part in found)
    alone = [divide({i for i in cohort if stacked.shards(numbers[i]) == k}) for k in range(count)]
    assert found == [part for parts in alone for part in parts]


def test_large_batches_make_small_stacks() -> None:
    def images(pixels: int) -> Federation:
        return from_clients([(np.zeros((200, pixels), np.float32), np.arange(200) % 2) for _ in range(2)])

    assert stack_size(images(784), FedAvg(batch=100)) == 5
    assert stack_size(images(3072), FedAvg(batch=100)) == 5
    assert stack_size(images(784), FedAvg(batch=10)) == 10
    assert stack_size(images(500), FedAvg(batch=100)) == 8
    assert stack_size(images(784), FedAvg(batch=10**6)) == stack_size(images(784), FedAvg(batch=140))


def test_a_run_that_is_stopped_trains_no_further_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_stacks(monkeypatch)
    run = simulation(FedAvg(lr=0.1, batch=4), wide(), module(), head="2", mode="stacked", participation=1.0)
    jobs = [run.job(who) for who in range(24)]
    answers = iter([False, True])
    results = list(run.executor.train(1, jobs, lambda: next(answers)))
    first = executor(run)._stacks_of_jobs(jobs)[0]
    run.close()
    assert sorted(result.who for result in results) == sorted(job.who for job in first)


def test_errors_in_a_stack_reach_the_caller() -> None:
    run = simulation(FedAvg(lr=0.1, batch=4), mode="stacked")
    with pytest.raises(AttributeError):
        list(run.executor.train(1, [ClientJob(0, State(), State())], lambda: False))
    run.close()


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_scores_of_pieces_are_those_of_all_samples(mode: str) -> None:
    federation = classification()
    run = simulation(FedAvg(lr=0.1, batch=4), federation, mode=mode)
    rows = np.arange(len(federation.y))
    (whole,) = run.executor.score_pieces(run.task.w0, [rows])
    pieces = [rows[:0], *np.array_split(rows, 5), rows[:0]]
    found = list(run.executor.score_pieces(run.task.w0, pieces))
    run.close()
    assert [each.values.shape[1] for each in found] == [len(piece) for piece in pieces]
    np.testing.assert_allclose(np.concatenate([each.values for each in found], axis=1), whole.values, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_steps_are_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads need the same compiled step, and one of them makes it."""
    small_stacks(monkeypatch)
    rng = np.random.default_rng(0)
    clients = [{"train": (rng.normal(size=(10, 40)), rng.integers(0, 3, 10))} for _ in range(4)]
    found = []
    for compiled in (False, True):
        settings: Any = {"mode": "stacked", "workers": 2, "participation": 1.0, "rounds": 2}
        run = simulation(FedAvg(lr=0.1, batch=5), from_clients(clients), module(), head="2", **settings)
        executor(run).module.compiled = compiled
        run.run()
        found.append(run.server.w)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)

"""The inner loop against torch's own optimisers, and the plan of its batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from equipoise.algorithms import Ditto, FedAvgFT, Local
from equipoise.engine.simulation import Simulation
from equipoise.executors.base import ClientJob
from equipoise.executors.build import build_executor
from equipoise.executors.stacked_trainer import StackWorker
from equipoise.randomness import torch_generator
from equipoise.state import State
from equipoise.training.batches import batch_indices, batch_order, steps_in_epoch
from equipoise.training.local_trainer import LocalTrainer
from tests.support.marks import slow_except
from tests.support.problems import classification, simulation, small_mlp


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 30)))
def test_every_sample_comes_once_an_epoch(n: int, batch: int, epochs: int, steps: int | None) -> None:
    order = batch_indices(n, batch, epochs, steps, torch_generator(0, "test"))
    in_epoch = -(-n // batch)
    assert len(order) == (0 if n == 0 else epochs * in_epoch if steps is None else steps)
    for first in range(0, len(order), max(in_epoch, 1)):
        seen = order[first : first + in_epoch]
        seen = seen[seen >= 0]
        assert len(set(seen.tolist())) == len(seen)
        if first + in_epoch <= len(order):
            assert sorted(seen.tolist()) == list(range(n))
    assert all((row >= 0).any() for row in order)


def test_orders_differ_by_all_that_names_them() -> None:
    orders = {
        tuple(batch_indices(20, 20, 1, None, batch_order(*key))[0].tolist())
        for key in [
            (0, 1, "a", "batches", 0),
            (1, 1, "a", "batches", 0),
            (0, 2, "a", "batches", 0),
            (0, 1, "b", "batches", 0),
            (0, 1, "a", "adapt", 0),
            (0, 1, "a", "batches", 1),
        ]
    }
    assert len(orders) == 6


RULES = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1)),
    "clip": ({"clip": 0.05}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "decay": ({"weight_decay": 0.2}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
    ),
    "adam decay": (
        {"optimizer": "adam", "weight_decay": 0.2},
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.2},
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    ),
    "clip decay": ({"clip": 0.05, "weight_decay": 0.2}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
}


# Four rules have between them all that rules are made of: these with every part and pull, the others by turns.
THROUGHOUT = ("sgd", "nesterov", "adam decay", "clip decay")
DESCENTS = [
    (rule, part, pulled)
    for r, rule in enumerate(RULES)
    for p, part in enumerate(("all", "body", "head"))
    for pulled in (False, True)
    if rule in THROUGHOUT or (r + p + pulled) % 3 == 0
]


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize(
    ("rule", "part", "pulled"), slow_except(DESCENTS, *(case for case in DESCENTS if case[2]), several=True)
)
def test_descend_is_torchs_optimiser(rule: str, part: str, pulled: bool, mode: str) -> None:
    settings, optimiser = RULES[rule]
    algorithm = Local(lr=0.1, epochs=3, batch=4, **settings)
    federation = classification()
    run = simulation(algorithm, federation, mode=mode)
    anchor = torch.ones(run.task.space.size, dtype=torch.float64)
    pull = (lambda v: 0.3 * (v - anchor)) if pulled else None

    found = {}
    for who in (0, 5):  # fewer samples than a batch, and several ragged batches
        if mode == "threads":
            work = lambda data: data.descend(run.task.w0, part=part, pull=pull)  # noqa: E731
            [found[who]] = trained(run, work, [who])
    if mode == "stacked":
        with torch.no_grad():
            work = run.executor._trainer(
                StackWorker(run.executor.module), 1, [ClientJob(who, State(), State()) for who in (0, 5)], "batches"
            )
            both = work.descend(run.task.w0.expand(2, -1), part=part, pull=pull)
        found = {0: both[0], 5: both[1]}
    run.close()

    for who, vector in found.items():
        module = small_mlp().double()
        moving = {"all": module, "body": module.body, "head": module.head}[part]
        parameters = list(moving.parameters())
        optimizer = optimiser(parameters)
        indices = federation.train[who]
        order = batch_indices(
            len(indices), min(4, len(indices)), 3, None, batch_order(0, 1, federation.names[who], "batches", 0)
        )
        for row in order:
            batch = torch.from_numpy(indices[row[row >= 0]])
            optimizer.zero_grad()
            loss = F.cross_entropy(module(federation.x[batch]), federation.y[batch])
            if pulled:
                loss = loss + 0.15 * sum((p - 1).square().sum() for p in parameters)
            loss.backward()
            if "clip" in rule:
                torch.nn.utils.clip_grad_norm_(parameters, 0.05)
            optimizer.step()
        expected = run.task.space.vector(module, torch.float64)
        torch.testing.assert_close(vector, expected, rtol=1e-8, atol=1e-6 if "clip" in rule else 1e-9)


def at_work_of(done: torch.Tensor | None, clients: int) -> torch.Tensor:
    """1 for each client that trains in a step, 0 for those that are done."""
    at_work = torch.ones(clients, dtype=torch.float64)
    if done is not None:
        at_work[done] = 0
    return at_work


def test_ragged_plans_of_a_cohort_are_those_of_its_clients() -> None:
    run = simulation(Local(lr=0.1, epochs=2, batch=4), mode="stacked")
    work = run.executor._trainer(
        StackWorker(run.executor.module), 1, [ClientJob(i, State(), State()) for i in range(6)], "batches"
    )
    steps = list(work.batches(2, None, 0, None))
    run.close()
    lengths = run.federation.train.lengths
    assert work.samples.tolist() == (2 * lengths).tolist()
    for (_, _, weights, *_), done in steps:
        totals = weights.sum(1)
        expected = at_work_of(done, 6)
        torch.testing.assert_close(totals, expected)  # each client at work takes a mean, the others nothing
    at_work = np.sum([at_work_of(done, 6).numpy() for _, done in steps], axis=0)
    assert at_work.tolist() == (2 * -(-lengths // 4)).tolist()


def trained(run: Simulation, work: Callable[[LocalTrainer], torch.Tensor], who: Sequence[int]) -> list[torch.Tensor]:
    """What `work` makes of the trainers of these clients, in either mode."""
    jobs = [ClientJob(i, State(), State()) for i in who]
    if run.mode == "threads":
        return list(run.executor.pool.each(lambda own, job: work(run.executor._work(own, 1, job, "batches")), jobs))
    with torch.no_grad():
        return list(work(run.executor._trainer(StackWorker(run.executor.module), 1, jobs, "batches")))


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"optimizer": "adamw", "weight_decay": 0.1}])
def test_a_rate_of_each_client_is_that_rate(mode: str, settings: dict[str, Any]) -> None:
    run = simulation(Local(lr=0.1, epochs=2, batch=4, **settings), mode=mode)
    rates = {0: 0.03, 5: 0.2}

    def own(data: LocalTrainer) -> torch.Tensor:
        sizes = {int(run.federation.train.lengths[i]): rate for i, rate in rates.items()}
        lr = torch.tensor([[sizes[int(n)]] for n in data.size.flatten()], dtype=torch.float64).reshape(data.size.shape)
        start = run.task.w0.expand(*data.size.shape[:-1], -1)
        return data.descend(start, lr=lr, pull=lambda v: 0.3 * v)

    found = trained(run, own, list(rates))
    for vector, (who, rate) in zip(found, rates.items(), strict=True):
        start = run.task.w0 if mode == "threads" else run.task.w0[None]
        alone = trained(run, lambda data, r=rate, s=start: data.descend(s, lr=r, pull=lambda v: 0.3 * v), [who])[0]
        torch.testing.assert_close(vector, alone, rtol=1e-12, atol=1e-14)
    run.close()


@pytest.mark.parametrize("settings", [{"steps": 7}, {"epochs": 3}, {"epochs": 3, "drop_last": True}])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_local_steps_are_those_that_are_taken(mode: str, settings: dict[str, Any]) -> None:
    run = simulation(Local(lr=0.1, batch=4, **settings), mode=mode)
    who = list(range(len(run.federation)))

    def counted(data: LocalTrainer) -> torch.Tensor:
        taken = torch.zeros_like(data.size)
        for _, done in data.batches(data.algorithm.epochs, data.algorithm.steps, 0, None):
            taken += at_work_of(done, len(taken)).view_as(taken)
        facts = [torch.full_like(taken, data.round), torch.full_like(taken, data.lr)]
        return torch.cat([data.local_steps, taken, *facts], dim=-1)

    for said, taken, round, lr in trained(run, counted, who):
        assert said == taken
        assert (round, lr) == (1, 0.1)
    run.close()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 12))
def test_only_a_last_batch_that_is_too_small_is_dropped(n: int, batch: int, epochs: int, least: int) -> None:
    order = batch_indices(n, batch, epochs, None, torch_generator(0, "test"), least)
    sizes = (order >= 0).sum(1).tolist()
    full, rest = divmod(n, batch)
    kept = [batch] * full + ([rest] if rest and (rest >= least or not full) else [])
    assert sizes == kept * epochs
    assert steps_in_epoch(n, batch, least) == len(kept)


def test_a_schedule_needs_no_further_traces() -> None:
    """The traces of a run are those of its shapes, whatever the rates are."""
    traces = []
    for schedule in ("constant", "cosine"):
        run = simulation(Ditto(lr=0.1, batch=4, schedule=schedule), mode="stacked", rounds=6, participation=1.0)
        run.run()
        traces.append(len(run.executor.module.traced))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_factor_of_a_schedule_is_a_factor_of_the_rate(mode: str) -> None:
    """One round at half the rate by a schedule is one round at half the rate; models for evaluation are not slowed."""
    settings = {"mode": mode, "rounds": 1, "participation": 1.0}
    halved = simulation(FedAvgFT(lr=0.2, batch=4, schedule=lambda round, rounds: 0.5), **settings)
    plain = simulation(FedAvgFT(lr=0.1, batch=4), **settings)
    for run in (halved, plain):
        run.run()
    torch.testing.assert_close(halved.server.w, plain.server.w, rtol=1e-12, atol=1e-14)
    assert halved.lines[0]["lr"] == plain.lines[0]["lr"] == 0.1
    full = simulation(FedAvgFT(lr=0.2, batch=4), **settings)
    full.server = halved.server
    tuned = [next(iter(run.executor.models(1, [run.job(0)], "personal")))[0] for run in map(reopened, (halved, full))]
    torch.testing.assert_close(tuned[0].vector, tuned[1].vector, rtol=1e-12, atol=1e-14)


def reopened(run: Simulation) -> Simulation:
    run.executor = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule)
    return run

"""What every registered algorithm promises, whatever it does."""

import json
import signal
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import exchanges_of
from equipoise.algorithms.schema import infer_schema
from equipoise.data.federation import RaggedIndices
from equipoise.distributed.placement import Placement
from equipoise.engine.round_facts import RoundFacts, share_facts
from equipoise.engine.simulation import Simulation
from equipoise.state import State
from tests.support.forked import Forked
from tests.support.problems import KINDS, VARIANTS, classification, metrics, registered, simulation
from tests.support.waiting import until

ROUNDS = 3
"""From the third one on, all clients that take part may have taken part before."""


@dataclass(frozen=True)
class Observed:
    """A finished run, with all that was sent and kept in it."""

    run: Simulation
    bytes_up: int
    bytes_down: int
    shapes: list[tuple[Any, ...]]
    "those of the message down, of the upload, of the client's state and of the server's, for every client and exchange"
    start_before: torch.Tensor
    "a copy of the common start that was taken before the first round"
    moved_apart: list[tuple[int, int]]
    "the rounds, and the clients that took no part in them, whose state changed all the same"


@cache
def observed(algorithm: Algorithm, mode: str) -> Observed:
    """Run an algorithm once for all tests that only look at what it did."""
    sent, shapes, moved_apart = {"up": 0, "down": 0}, [], []

    def look(placement: Placement, jobs: list, results: list, interrupted: bool) -> RoundFacts:
        for job, result in zip(jobs, results, strict=True):
            upload = result.upload
            sent["down"] += sum(t.numpy().nbytes for t in job.down.values())
            sent["up"] += sum(t.contiguous().numpy().nbytes for t in upload.message.values())
            sent["up"] += 0 if upload.weight is None else upload.weight.numpy().nbytes
            shapes.append((job.down.shapes(), upload.wire.shapes(), result.client.shapes(), run.server.shapes()))
        return share_facts(placement, jobs, results, interrupted)

    def advance() -> bool:
        round, clients = run.done + 1, range(len(run.federation))
        before = {who: State({k: t.clone() for k, t in run.store.get(who).items()}) for who in clients}
        going = advance_run()
        apart = set(clients) - set(run.sample(round))
        moved_apart.extend((round, who) for who in apart if not same_state(run.store.get(who), before[who]))
        return going

    with mock.patch("equipoise.engine.simulation.share_facts", look):
        run = simulation(algorithm, mode=mode, rounds=ROUNDS)
        before = run.task.w0.clone()
        advance_run, run.advance = run.advance, advance  # type: ignore[method-assign]
        run.run()
    return Observed(run, sent["up"], sent["down"], shapes, before, moved_apart)


def same_state(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_same_seed_gives_the_same_bytes_with_one_or_two_workers(algorithm: Algorithm, tmp_path: Path) -> None:
    again = simulation(algorithm, folder=tmp_path / "again", workers=2, rounds=ROUNDS)
    again.run()
    same_bytes(observed(algorithm, "threads").run, again)
    assert metrics(tmp_path / "again").count(b"\n") == ROUNDS


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_stacked(one_of_a_kind: Algorithm) -> None:
    again = simulation(one_of_a_kind, mode="stacked", rounds=ROUNDS)
    again.run()
    same_bytes(observed(one_of_a_kind, "stacked").run, again)


def same_bytes(one: Simulation, other: Simulation) -> None:
    """Check that two runs wrote the same lines and ended in the same states, to the last bit."""
    assert json.dumps(one.lines) == json.dumps(other.lines)
    assert len(one.lines) == ROUNDS
    assert same_state(one.server, other.server)
    assert all(same_state(one.store.get(who), other.store.get(who)) for who in range(len(one.federation)))


def test_another_seed_gives_something_else(algorithm: Algorithm) -> None:
    other = simulation(algorithm, seed=1, rounds=1)
    other.run()
    kinds = ("personal", "consensus", "global", "hybrid")
    ours, theirs = (
        {kind: line[kind] for kind in kinds if kind in line}
        for line in (other.lines[0], observed(algorithm, "threads").run.lines[0])
    )
    assert ours.keys() == theirs.keys() != set()
    assert ours != theirs


def comparable(state: State) -> State:
    """An eigenbasis may turn; what is made of it may not."""
    if "UXY" not in state:
        return state
    rest = State({k: t for k, t in state.items() if k not in ("U", "d", "UXY")})
    return State(rest, xx=state.U @ (state.d * state.U.mT), xy=state.U @ state.UXY)


def test_stacked_equals_threaded(algorithm: Algorithm) -> None:
    same_stacked(algorithm)


# Two rules at a time: what one of them got wrong, the other would not put right.
@pytest.mark.parametrize("how", [{"momentum": 0.5, "clip": 0.1}, {"optimizer": "adam", "steps": 3}], ids=" ".join)
def test_stacked_equals_threaded_by_every_rule_of_steps(one_of_a_kind: Algorithm, how: dict[str, object]) -> None:
    same_stacked(one_of_a_kind.model_copy(update=how))


def same_stacked(algorithm: Algorithm) -> None:
    threaded, stacked = observed(algorithm, "threads").run, observed(algorithm, "stacked").run
    assert threaded.mode == "threads"
    assert stacked.mode == "stacked"
    for name, value in threaded.server.items():
        torch.testing.assert_close(stacked.server[name], value, rtol=1e-9, atol=1e-11)
    for who in range(len(threaded.federation)):
        for name, value in comparable(threaded.store.get(who)).items():
            torch.testing.assert_close(comparable(stacked.store.get(who))[name], value, rtol=1e-9, atol=1e-11)
    assert stacked.counters.gradient_samples == threaded.counters.gradient_samples
    for kind, table in threaded.scores.training.board().tables().items():
        np.testing.assert_allclose(stacked.scores.training.board().tables()[kind], table, rtol=1e-9, atol=1e-11)


KILLS = [(name, *(("threads", 3, 0.0), ("stacked", 4, 0.012))[k % 2]) for k, name in enumerate([*KINDS, *VARIANTS])]


def run_until_killed(name: str, folder: Path, mode: str, after: int) -> None:
    """Run, and wait to be killed two rounds after the given one."""
    run = simulation(registered(name), folder=folder, mode=mode, rounds=9, checkpoint_every=2)
    log = run.log

    def told(line: dict[str, Any], timing: Any) -> None:
        log(line, timing)
        print(line["round"], flush=True)
        if line["round"] == after + 2:  # the blow falls here, or anywhere in the two rounds before
            signal.pause()

    run.log = told  # type: ignore[method-assign]
    run.run()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "after", "delay"), KILLS)
def test_killed_and_resumed_ends_with_the_same_bytes(
    name: str, mode: str, after: int, delay: float, tmp_path: Path
) -> None:
    """What a kill can break is the engine's, not the method's: one of each kind, in one of the two modes by turns."""
    algorithm = registered(name)
    whole = simulation(algorithm, folder=tmp_path / "whole", mode=mode, rounds=9, checkpoint_every=2)
    whole.run()
    with Forked(tmp_path / "log", run_until_killed, name, tmp_path / "killed", mode, after) as child:
        until(lambda: str(after) in child.said().splitlines() or not child.process.is_alive())
        assert child.process.is_alive(), child.said()
        time.sleep(delay)  # not to wait for anything, but to kill at another moment
        child.process.kill()
        assert child.wait() == -signal.SIGKILL
    resumed = simulation(algorithm, folder=tmp_path / "killed", mode=mode, rounds=9, checkpoint_every=2, new=False)
    resumed.resume()
    assert after - 2 <= resumed.done < after + 2
    resumed.run()
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert (tmp_path / "killed" / "clients.csv").read_bytes() == (tmp_path / "whole" / "clients.csv").read_bytes()
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("killed", "whole")]
    for summary in summaries:
        for clock in ("seconds", "samples_per_second", "peak_memory_mb"):
            del summary[clock]
    assert summaries[0] == summaries[1]


def test_the_order_of_clients_does_not_matter(in_mode: tuple[Algorithm, str]) -> None:
    algorithm, mode = in_mode
    ordered = classification()
    order = [4, 0, 5, 2, 1, 3]

    def permuted(lists: object) -> object:
        return RaggedIndices([lists[i] for i in order])  # type: ignore[index]

    mixed = replace(
        ordered,
        names=tuple(ordered.names[i] for i in order),
        **{split: permuted(getattr(ordered, split)) for split in ("train", "validation", "test")},
    )
    one, two = observed(algorithm, mode).run, simulation(algorithm, mixed, mode=mode, rounds=ROUNDS)
    two.run()
    assert same_state(one.server, two.server)
    for position, who in enumerate(order):
        assert same_state(one.store.get(who), two.store.get(position))
    for kind, table in one.scores.training.board().tables().items():
        np.testing.assert_array_equal(two.scores.training.board().tables()[kind], table[order])


def test_a_client_that_takes_no_part_keeps_its_state(in_mode: tuple[Algorithm, str]) -> None:
    found = observed(*in_mode)
    assert found.moved_apart == []
    assert all(len(found.run.sample(round)) == 3 for round in range(1, ROUNDS + 1))  # of six clients


def test_bytes_counted_are_the_sizes_of_the_messages(in_mode: tuple[Algorithm, str]) -> None:
    algorithm, mode = in_mode
    found = observed(algorithm, mode)
    counters = found.run.counters
    assert (counters.bytes_up, counters.bytes_down) == (found.bytes_up, found.bytes_down)
    announced = infer_schema(algorithm, found.run.start)
    size = 8
    up = size * sum(int(np.prod(shape)) for shape, _ in announced.up.values())
    assert counters.bytes_up == up * 3 * ROUNDS * exchanges_of(algorithm)  # three of six clients


def test_every_message_and_state_has_the_shape_that_was_announced(in_mode: tuple[Algorithm, str]) -> None:
    algorithm, mode = in_mode
    found = observed(algorithm, mode)
    announced = infer_schema(algorithm, found.run.start)
    expected = (announced.down, announced.up, announced.client, announced.server)
    assert found.shapes == [expected] * 3 * ROUNDS * exchanges_of(algorithm)


def test_the_common_start_is_left_alone(algorithm: Algorithm) -> None:
    for mode in ("threads", "stacked"):
        found = observed(algorithm, mode)
        assert torch.equal(found.run.task.w0, found.start_before)


def test_a_bad_update_is_left_out_and_changes_nothing(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = classification()
    x = federation.x.clone()
    x[federation.train[2]] = float("nan")
    run = simulation(algorithm, replace(federation, x=x), participation=1.0, rounds=2)
    told: list[str] = []
    monkeypatch.setattr(run.callbacks, "on_message", told.append)
    before = run.store.get(2)
    run.run()
    assert [line["left_out"] for line in run.lines] == [1, 1]
    assert run.counters.left_out == 2
    assert len(told) == 2
    assert "client-2" in told[0]
    assert same_state(run.store.get(2), before)
    assert run.server.finite()
    assert all(run.store.get(who).finite() for who in range(6))

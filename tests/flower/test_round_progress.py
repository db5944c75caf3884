"""What belongs to a round survives a restart of the server within it."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from equipoise.equilibrium import Solves, SolveStats
from equipoise.errors import RunFailed
from equipoise.flower import server
from equipoise.flower.round_progress import RoundProgress
from equipoise.state import State
from tests.support.flower_memory import Killed, deployed, run, table
from tests.support.flower_problem import METHOD
from tests.support.problems import classification, small_mlp

COUNTS = st.integers(0, 10**12)
SECONDS = st.floats(0, 1e9)
NAMES = st.text(max_size=8)
STATS = st.builds(SolveStats, COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0, 1e300))
STATES = st.dictionaries(NAMES, st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3)).map(
    lambda drawn: State({name: torch.tensor(values) for name, values in drawn.items()})
)
PROGRESS = st.builds(
    RoundProgress,
    participants=st.lists(NAMES, max_size=4).map(tuple),
    asked=COUNTS,
    restarts=COUNTS,
    seconds=SECONDS,
    solves=st.builds(Solves, STATS, STATS),
    server_before=STATES,
)


@given(PROGRESS, st.dictionaries(NAMES, SECONDS))
def test_a_checkpoint_keeps_everything(progress: RoundProgress, client_seconds: dict[str, float]) -> None:
    saved = json.loads(json.dumps(progress.facts(client_seconds)))
    restored = RoundProgress()
    assert restored.restore(saved, progress.tensors(begun=True)) == client_seconds
    for field in fields(RoundProgress):
        before, after = getattr(progress, field.name), getattr(restored, field.name)
        if field.name == "server_before":
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
        else:
            assert before == after, field.name


@given(PROGRESS)
def test_the_state_before_a_round_is_kept_only_within_it(progress: RoundProgress) -> None:
    assert progress.tensors(begun=False) == {}


@given(PROGRESS)
def test_a_checkpoint_of_version_0_1_can_be_read(progress: RoundProgress) -> None:
    saved = json.loads(json.dumps(progress.facts({})))
    del saved["round"]
    restored = RoundProgress()
    assert restored.restore(saved, {}) == {}
    assert restored == RoundProgress(progress.participants, progress.asked)


def lose_a_client(folder: Path, killed: bool, monkeypatch: pytest.MonkeyPatch) -> server.Deployment:
    """A round whose first exchange is slow and the last of one client; the server may then be killed and resumed."""
    app, grid = deployed(
        folder / "app",
        classification(3, names=["a", "b", "c"]),
        None,
        table(METHOD),
        model={"name": "deq-mlp", "width": 6, "hidden": 5},
        rounds=1,
        deploy={"minimum": 2, "wait": 1.0},
    )
    clock, orders, empty = [0.0], 0, 0
    pull = grid.pull_messages

    def on_push(message: Message) -> None:
        nonlocal orders, empty
        orders += message.metadata.message_type == "train"
        empty = 2 if 1 <= orders <= 3 else 0
        if killed and orders == 4:
            raise Killed

    def slow_pull(message_ids: Any) -> list[Message]:
        nonlocal empty
        if empty:
            empty -= 1
            clock[0] += 10.0
            return []
        return pull(message_ids)

    def leave(order: Message, reply: Message) -> list[Message]:
        grid.nodes[102].online = order.metadata.message_type != "train"
        return [reply]

    grid.on_push = on_push
    grid.nodes[102].tamper = leave
    with monkeypatch.context() as patches:
        patches.setattr(grid, "pull_messages", slow_pull)
        patches.setattr(server, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        if not killed:
            return run(app, grid, folder / "out")
        with pytest.raises(Killed):
            run(app, grid, folder / "out")
        grid.mailbox.clear()
        grid.on_push = lambda message: None
        return run(app, grid, folder / "out", resume=True)


@pytest.mark.slow
def test_a_server_that_is_killed_between_exchanges_keeps_seconds_and_solves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it knows of the client that left before the kill can come from the checkpoint only."""
    whole = lose_a_client(tmp_path / "whole", False, monkeypatch)
    resumed = lose_a_client(tmp_path / "killed", True, monkeypatch)
    for deployment, folder in ((whole, "whole"), (resumed, "killed")):
        assert deployment.lines[0]["left_out"] == 1
        (timing,) = map(json.loads, (tmp_path / folder / "out" / "timings.jsonl").read_text().splitlines())
        assert timing["train"] == 20.0  # all of it before the kill
        assert timing["slowest"].keys() == {"a", "b", "c"}
        assert min(timing["slowest"].values()) >= 0.5
    assert whole.counters.solves.forward.solves > 0
    assert whole.counters.solves == resumed.counters.solves
    assert whole.lines == resumed.lines


def test_a_server_that_is_killed_does_not_start_a_round_again_more_often(tmp_path: Path) -> None:
    deploy = {"deadline": 0.5, "attempts": 1, "wait": 1.0}
    app, grid = deployed(
        tmp_path / "app", classification(3), small_mlp(), table(METHOD), rounds=1, participation=1, deploy=deploy
    )

    def leave(order: Message, reply: Message) -> list[Message]:
        grid.nodes[order.metadata.dst_node_id].online = order.metadata.message_type != "train"
        return [reply]

    def abandoned() -> int:
        lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines].count("abandoned")

    def on_push(message: Message) -> None:
        if abandoned() and message.metadata.message_type == "train":
            raise Killed

    for node in grid.nodes.values():
        node.tamper = leave
    grid.on_push = on_push
    with pytest.raises(Killed):
        run(app, grid, tmp_path / "out")
    assert abandoned() == 1
    grid.on_push = lambda message: None
    with pytest.raises(RunFailed, match="round 1: too few updates, 1 times"):
        run(app, grid, tmp_path / "out", resume=True)
    assert abandoned() == 1

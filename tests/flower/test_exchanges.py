"""Rounds of several exchanges over real messages: killed, left and begun anew, they end as they should."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from equipoise.executors.threaded import ThreadedExecutor
from equipoise.flower.client_state import ClientStateFile
from equipoise.flower.server import Deployment
from tests.support.flower_memory import Killed, MemoryGrid, Node, deployed, run, table
from tests.support.flower_problem import METHOD
from tests.support.problems import classification, simulation, small_mlp

EXCHANGES = METHOD.exchanges


def state_of(grid: MemoryGrid, who: int, deployment: Deployment) -> Any:
    settings = grid.nodes[100 + who].settings
    kept = ClientStateFile(Path(settings["state"]), deployment.id, settings["name"]).read()
    return kept.settled(deployment.roster.members[settings["name"]].accepted).state


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 6, 9, 14, 17])
def test_killed_between_exchanges_and_resumed(at: int, tmp_path: Path) -> None:
    """3 greetings, then 3 orders an exchange, 4 exchanges a round: killed in the first round, and in the second."""
    federation = classification(3)
    app, grid = deployed(tmp_path / "whole", federation, small_mlp(), table(METHOD), rounds=2)
    whole = run(app, grid, tmp_path / "whole-out")
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), table(METHOD), rounds=2)
    pushes = 0

    def on_push(message: Message) -> None:
        nonlocal pushes
        pushes += 1
        if pushes == at:
            raise Killed

    grid.on_push = on_push
    with pytest.raises(Killed):
        run(app, grid, tmp_path / "out")
    grid.mailbox.clear()
    resumed = run(app, grid, tmp_path / "out", resume=True)
    lines = [(tmp_path / out / "metrics.jsonl").read_bytes() for out in ("whole-out", "out")]
    assert lines[0] == lines[1]
    assert resumed.transport.refused == {}
    assert all(whole.server[k].equal(resumed.server[k]) for k in whole.server)


def test_a_newcomer_at_a_resume_within_the_first_round_moves_nobodys_number(tmp_path: Path) -> None:
    federation = classification(4, names=["b", "c", "d", "a"])
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), table(METHOD), rounds=2, deploy={"clients": 3})
    grid.nodes[103].online = False
    pushes = 0

    def on_push(message: Message) -> None:
        nonlocal pushes
        pushes += 1
        if pushes == 8:  # in the second exchange
            raise Killed

    grid.on_push = on_push
    with pytest.raises(Killed):
        run(app, grid, tmp_path / "out")
    grid.mailbox.clear()
    grid.nodes[103].online = True
    resumed = run(app, grid, tmp_path / "out", resume=True)
    assert {name: member.index for name, member in resumed.roster.members.items()} == {"b": 0, "c": 1, "d": 2, "a": 3}
    assert resumed.lines[0]["clients"] == 3
    assert resumed.done == 2


def failing(who: int, round: int, exchange: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulator, a client whose update cannot be used in this exchange."""
    inner, calls = ThreadedExecutor.train, [0]

    def train(self: ThreadedExecutor, now: int, jobs: Any, stopped: Any) -> Any:
        for done in inner(self, now, jobs, stopped):
            if done.who == who and now == round:
                calls[0] += 1
            bad = done.who == who and now == round and calls[0] == exchange
            yield type(done)(done.who, done.held, done.upload, done.gradient_samples, not bad, done.solves)

    monkeypatch.setattr(ThreadedExecutor, "train", train)


def test_who_drops_out_within_a_round_goes_back_to_before_it_in_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = classification(3)
    app, grid = deployed(
        tmp_path / "app", federation, small_mlp(), table(METHOD), rounds=3, deploy={"deadline": 1.0, "minimum": 2}
    )
    orders = 0

    def lost(order: Message, reply: Message) -> list[Message]:
        nonlocal orders
        orders += order.metadata.message_type == "train"
        return [] if orders == EXCHANGES + 2 else [reply]  # the second exchange of the second round

    grid.nodes[101].tamper = lost
    over_flower = run(app, grid, tmp_path / "out")
    with monkeypatch.context() as patched:
        failing(1, 2, 2, patched)
        simulated = simulation(METHOD, federation, small_mlp(), rounds=3, participation=1.0)
        simulated.run()
    assert over_flower.lines[1]["left_out"] == simulated.lines[1]["left_out"] == 1
    assert over_flower.counters.left_out == 1
    for name, value in simulated.server.items():
        torch.testing.assert_close(over_flower.server[name], value, rtol=1e-9, atol=1e-11)
    for who in range(3):
        ours, theirs = state_of(grid, who, over_flower), simulated.store.get(who)
        torch.testing.assert_close(ours.x, theirs.x, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(ours.raw, theirs.raw, rtol=1e-9, atol=1e-11)


def test_a_round_whose_clients_have_left_is_begun_anew_with_others(tmp_path: Path) -> None:
    app, grid = deployed(
        tmp_path / "app",
        classification(3),
        small_mlp(),
        table(METHOD),
        rounds=2,
        participation=1,
        deploy={"deadline": 0.5, "attempts": 2},
    )
    asked: list[Node] = []

    def leave(order: Message, reply: Message) -> list[Message]:
        node = grid.nodes[order.metadata.dst_node_id]
        if order.metadata.message_type == "train":
            asked.append(node)
            if len(asked) == 2:
                node.online = False
        return [reply]

    for node in grid.nodes.values():
        node.tamper = leave
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.done == 2
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("abandoned") == 1
    assert int(deployment.server.phase) == 0

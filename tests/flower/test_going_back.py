"""A deployment that has gone wrong goes back, and its clients go back with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from equipoise.errors import EquipoiseError, RunFailed
from equipoise.flower.client_state import ClientStateFile, StoredState
from equipoise.flower.protocol import Order, answer_shapes, open_message, order_shapes
from equipoise.flower.server import Deployment
from tests.support.flower_memory import SUPERLINK, Killed, MemoryGrid, deployed, run, speaking_as, table
from tests.support.flower_problem import METHOD, OPTIONS, PROBLEM
from tests.support.problems import classification, small_mlp
from tests.support.tampering import ORDERS, SHAPES, agrees, announced, changed, problem

pytestmark = pytest.mark.usefixtures("remember")
REMEMBER = {"name": "remember"}


def orders(app: Any, grid: MemoryGrid) -> list[Order]:
    """All orders that clients have received, greetings left out, in the order in which they came."""
    plan = app.plan
    task = plan.task()
    allowed = order_shapes(announced(app), task.start(1), len(task.buffers))
    found = [open_message(m, Order, allowed)[0] for node in grid.nodes.values() for m in node.received]
    return [order for order in found if not order.hello]


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.stem.removeprefix("round-") for path in (out / "checkpoint").glob("round-*.json"))


@pytest.mark.parametrize("back", [1, 2])
def test_a_finished_run_does_its_last_rounds_again_to_the_same_bytes(back: int, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=REMEMBER, rounds=4, participation=3)
    first = run(app, grid, tmp_path / "out")
    files = {name: (tmp_path / "out" / name).read_bytes() for name in ("metrics.jsonl", "clients.csv")}
    again = run(app, grid, tmp_path / "out", resume=True, back=back)
    assert again.transport.refused == {}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert all(first.server[k].equal(again.server[k]) for k in first.server)
    agrees(app, grid, again)
    texts = [event.get("text", "") for event in events(tmp_path / "out")]
    assert f"the run goes back to its checkpoint of round {4 - back}" in texts
    for node in grid.nodes.values():
        numbers = [order.number for order in orders(app, MemoryGrid(app, {0: node}))]
        assert numbers == sorted(set(numbers))  # never one twice


def test_server_with_last_uploads_and_malicious_clients(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", *PROBLEM, **OPTIONS)
    first = run(app, grid, tmp_path / "out")
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    again = run(app, grid, tmp_path / "out", resume=True, back=2)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before
    assert again.transport.refused == {}
    assert all(first.server[k].equal(again.server[k]) for k in first.server)


def test_a_model_that_has_gone_bad(tmp_path: Path) -> None:
    """The message names the round and the option; with the option the run ends as if nothing had happened."""
    app, grid = problem(tmp_path / "whole", algorithm=REMEMBER, rounds=5)
    run(app, grid, tmp_path / "whole-out")
    app, grid = problem(tmp_path / "app", algorithm=REMEMBER, rounds=5)
    SHAPES["now"] = answer_shapes(announced(app), app.plan.task().metrics)
    bad = [True]

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        if bad[0] and order.metadata.group_id == "4":
            return [changed(reply, status="not-finite", trained=0, evaluated=0, tensors=lambda tensors: {})]
        return [reply]

    for node in grid.nodes.values():
        node.tamper = tamper
    with pytest.raises(RunFailed) as caught:
        run(app, grid, tmp_path / "out")
    text = str(caught.value)
    assert text.startswith("round 4: too few updates, 3 times, so the run stops; the last checkpoint is in ")
    assert "the suspect is round 3, the last that changed it, and --resume --back 1 " in text
    assert text.endswith('(or --run-config "resume=true back=1") continues from round 2')
    bad[0] = False
    again = run(app, grid, tmp_path / "out", resume=True, back=1)
    agrees(app, grid, again)
    assert again.transport.refused == {}
    lines = [(tmp_path / out / "metrics.jsonl").read_bytes() for out in ("whole-out", "out")]
    assert lines[0] == lines[1]


def test_who_joined_later_joins_again_and_begins_again(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=REMEMBER, rounds=5, keep_checkpoints=5, deploy={"clients": 3})
    grid.nodes[103].online = False

    def at_exchange(message: Message) -> None:
        if message.metadata.group_id == "3":
            grid.nodes[103].online = True

    grid.on_push = at_exchange
    run(app, grid, tmp_path / "out")
    again = run(app, grid, tmp_path / "out", resume=True, back=3)
    assert again.transport.refused == {}
    assert [line["clients"] for line in again.lines] == [3, 3, 3, 4, 4]
    assert state_file(grid, 3, again).read().settled(again.roster.members["c3"].accepted).accepted
    joined = [event["text"] for event in events(tmp_path / "out") if event["event"] == "joined"]
    assert joined.count("c3 joined") == 2
    agrees(app, grid, again)


def state_file(grid: MemoryGrid, who: int, deployment: Deployment) -> ClientStateFile:
    settings = grid.nodes[100 + who].settings
    return ClientStateFile(Path(settings["state"]), deployment.id, settings["name"])


def test_clients_keep_as_many_states_as_the_server_keeps_checkpoints(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", 2, algorithm=REMEMBER, rounds=6, keep_checkpoints=4)
    deployment = run(app, grid, tmp_path / "out")
    assert checkpoints(tmp_path / "out") == ["000003", "000004", "000005", "000006"]
    file = state_file(grid, 0, deployment)
    stored = file.read()
    assert [number & 0xFFFFFFFF for number in (stored.accepted, *(n for n, _ in stored.earlier))] == [6, 5, 4, 3]
    file.write(StoredState(stored.accepted, stored.state, newest=stored.newest, earlier=stored.earlier[:1]))
    again = run(app, grid, tmp_path / "out", resume=True, back=3)
    assert again.transport.refused == {"out-of-step": 4}  # three rounds and the last scores: its state is gone
    with pytest.raises(EquipoiseError, match="so the most is --back 3"):
        run(app, grid, tmp_path / "out", resume=True, back=4)


def test_clients_without_a_state_keep_none(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", 2, algorithm={"name": "fedavg"}, rounds=3)
    deployment = run(app, grid, tmp_path / "out")
    assert state_file(grid, 0, deployment).read().earlier == ()
    assert run(app, grid, tmp_path / "out", resume=True, back=2).transport.refused == {}


@pytest.mark.parametrize(("back", "done"), [(1, 2), (2, 1)])
def test_within_a_round_of_several_exchanges_complete_rounds_count(back: int, done: int, tmp_path: Path) -> None:
    """Killed in the third exchange of the third round."""
    federation = classification(3)
    app, grid = deployed(tmp_path / "whole", federation, small_mlp(), table(METHOD), rounds=3)
    run(app, grid, tmp_path / "whole-out")
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), table(METHOD), rounds=3)
    pushes = 0

    def on_push(message: Message) -> None:
        nonlocal pushes
        pushes += message.metadata.message_type == "train"
        if pushes == 3 * (2 * METHOD.exchanges + 2) + 2:
            raise Killed

    grid.on_push = on_push
    with pytest.raises(Killed):
        run(app, grid, tmp_path / "out")
    grid.mailbox.clear()
    assert checkpoints(tmp_path / "out") == ["000000", "000001", "000002", "000002s001", "000002s002"]
    again = run(app, grid, tmp_path / "out", resume=True, back=back)
    assert f"the run goes back to its checkpoint of round {done}" in [
        event.get("text") for event in events(tmp_path / "out")
    ]
    assert again.transport.refused == {}
    lines = [(tmp_path / out / "metrics.jsonl").read_bytes() for out in ("whole-out", "out")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("where", ["local", "central"])
def test_releases_are_not_taken_back(where: str, tmp_path: Path) -> None:
    privacy = {"clip": 1.0, "sigma": 0.1, "where": where}
    app, grid = deployed(
        tmp_path / "app", classification(3), small_mlp(), {"name": "fedavg", "batch": 4}, rounds=4, privacy=privacy
    )
    for node in grid.nodes.values():
        node.settings["max_releases"] = 6  # with fresh noise on the sum, the rounds after it ask other questions
    first = run(app, grid, tmp_path / "out").pipeline.ledger
    assert set(first.released.values()) == {4}
    again = run(app, grid, tmp_path / "out", resume=True, back=2).pipeline.ledger
    assert set(again.released.values()) == {6}
    assert again.sums == (6 if where == "central" else 0)


def test_numbers_of_orders_are_not_used_again_after_damage(tmp_path: Path) -> None:
    """The newest checkpoint is the only one that knows of the last start of the server."""
    app, grid = problem(tmp_path / "app", 2, algorithm=REMEMBER, rounds=3)
    for start in (1, 2):
        count = 0

        def on_push(message: Message, start: int = start) -> None:
            nonlocal count
            count += message.metadata.message_type == "train"
            if count == (5 if start == 1 else 2):
                raise Killed

        grid.on_push = on_push
        with pytest.raises(Killed):
            run(app, grid, tmp_path / "out", resume=start > 1)
        grid.mailbox.clear()
    assert checkpoints(tmp_path / "out")[-1] == "000002"
    (tmp_path / "out" / "checkpoint" / "round-000002.json").write_text("{}")
    grid.on_push = lambda message: None
    deployment = run(app, grid, tmp_path / "out", resume=True)
    assert deployment.starts == 3
    assert deployment.transport.refused == {}
    agrees(app, grid, deployment)


def test_by_the_run_config(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", 2, rounds=2)
    run(app, grid, tmp_path / "out")
    for config, words in (
        ({"back": 1}, "add --resume"),
        ({"back": "1", "resume": True}, "the number of checkpoints to go back"),
        ({"back": 9, "resume": True}, "so the most is --back 2"),
    ):
        context = Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "out"), **config})
        with speaking_as(SUPERLINK), pytest.raises(EquipoiseError, match=words):
            app._serve(grid, context)

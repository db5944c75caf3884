"""Whatever happens, server and clients agree on what was accepted."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.errors import RunFailed
from equipoise.flower.client_data import write_client
from equipoise.flower.protocol import Answer, answer_shapes, open_message
from tests.support.flower_memory import Killed, over_the_wire, run, speaking_as
from tests.support.problems import classification
from tests.support.tampering import ORDERS, agrees, announced, problem, raw

pytestmark = pytest.mark.usefixtures("remember")


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_server_and_clients_agree_on_what_was_accepted(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Orders lost, answers lost, spoilt or late, the server killed anywhere: s stays the sum of the clients' states."""
    folder = tmp_path_factory.mktemp("fault")
    rng = random.Random(seed)
    app, grid = problem(
        folder / "app", 3, {"name": "remember"}, rounds=5, participation=2, deploy={"deadline": 0.4, "attempts": 20}
    )

    held: list[tuple[str, Message]] = []

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.message_type == "query":
            return [reply]
        ORDERS[id(reply)] = order
        kind = rng.random()
        if kind < 0.15:
            return []
        if kind < 0.3:
            return [raw(reply, b"spoilt")]
        grid.mailbox.update({identity: [late] for identity, late in held})
        held.clear()
        if kind < 0.45:
            held.append((order.metadata.message_id, reply))
            return []
        return [reply]

    def on_push(message: Message) -> None:
        if rng.random() < 0.05:
            raise Killed

    for node in grid.nodes.values():
        node.tamper = tamper
    grid.on_push = on_push
    deployment, resume = None, False
    while deployment is None:
        try:
            deployment = run(app, grid, folder / "out", resume)
        except Killed:
            grid.mailbox.clear()
        except RunFailed as error:  # all of the last answers spoilt at once
            if "no client could be asked for its last scores" not in str(error):
                raise
        resume = (folder / "out" / "run.toml").exists()
    assert deployment.done == 5
    agrees(app, grid, deployment)


def test_an_older_order_that_runs_last_changes_nothing(tmp_path: Path) -> None:
    """A client may work on orders in another order than they were sent; what the server took stays its state."""
    app, grid = problem(tmp_path / "app", algorithm={"name": "remember"}, rounds=3)
    overtaken: list[Message] = []

    def on_push(message: Message) -> None:
        if message.metadata.dst_node_id == 101 and message.metadata.message_type != "query":
            if overtaken:  # the order of the round before, once more, after this client has moved on
                context = Context(1, 101, grid.nodes[101].settings, RecordDict(), {})
                with speaking_as(101):
                    reply = app.client(overtaken[-1], context)
                assert (
                    open_message(reply, Answer, answer_shapes(announced(app), app.plan.task().metrics))[0].status
                    == "stale"
                )
            overtaken.append(over_the_wire(message))

    grid.on_push = on_push
    deployment = run(app, grid, tmp_path / "out")
    assert len(overtaken) == 4
    agrees(app, grid, deployment)


def test_an_answer_to_an_earlier_attempt_does_not_count_for_the_next(tmp_path: Path) -> None:
    """Even if the client's data changed in between, both sides agree on which update was taken."""
    app, grid = problem(
        tmp_path / "app", algorithm={"name": "remember"}, rounds=2, deploy={"minimum": 3, "deadline": 0.5}
    )
    held: list[tuple[str, Message]] = []
    attempts = {"c1": 0, "c2": 0}
    other = classification(4, seed=5)

    def tamper(name: str) -> Callable[[Message, Message], list[Message]]:
        def bend(order: Message, reply: Message) -> list[Message]:
            attempts[name] += order.metadata.message_type == "train"
            if attempts[name] == 1 and order.metadata.message_type == "train":
                held.append((order.metadata.message_id, reply))
                write_client(Path(grid.nodes[100 + int(name[1])].settings["data"]), other, int(name[1]))
                return []
            grid.mailbox.update({identity: [late] for identity, late in held})
            return [reply]

        return bend

    for node in (101, 102):
        grid.nodes[node].tamper = tamper(f"c{node - 100}")
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"late": 2}
    agrees(app, grid, deployment)


def test_scores_of_a_round_are_not_lost_when_it_is_asked_again(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"deadline": 0.5})
    silent = [True]

    def tamper(order: Message, reply: Message) -> list[Message]:
        return [] if order.metadata.group_id == "2" and silent[0] else [reply]

    for node in grid.nodes.values():
        node.tamper = tamper
    grid.on_push = lambda message: silent.__setitem__(0, message.metadata.dst_node_id != 103 and silent[0])
    deployment = run(app, grid, tmp_path / "out")
    assert all("accuracy" in line["personal"] for line in deployment.lines)


def test_the_last_scores_are_asked_for_again(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"deadline": 0.5})
    times = dict.fromkeys(grid.nodes, 0)

    def tamper(order: Message, reply: Message) -> list[Message]:
        node = reply.metadata.src_node_id
        if order.metadata.group_id != "4":
            return [reply]
        times[node] += 1
        return [reply] if times[node] == 2 or node == 100 else []

    for node in grid.nodes.values():
        node.tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert sorted(deployment.scores.rows) == ["c0", "c1", "c2", "c3"]
    assert times == {100: 1, 101: 2, 102: 2, 103: 2}


def test_methods_without_a_state_do_not_mind_a_server_that_fell_back(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"}, rounds=3)
    run(app, grid, tmp_path / "out")
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"}, rounds=5)
    newest = max((tmp_path / "out" / "checkpoint").glob("round-*.json"))
    newest.write_text("damaged")
    deployment = run(app, grid, tmp_path / "out", resume=True)
    assert deployment.done == 5
    assert deployment.transport.refused == {}

"""Clients that die, come back, join, are set up wrongly or are not who they say."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from equipoise.errors import EquipoiseError, RunFailed
from tests.support.flower_memory import Node, run
from tests.support.problems import classification
from tests.support.tampering import agrees, kept, problem

pytestmark = pytest.mark.usefixtures("remember")


def test_a_client_that_dies_and_comes_back_goes_on_from_where_it_was(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "remember"}, rounds=6, deploy={"deadline": 1.0})

    def at_exchange(message: Message) -> None:
        grid.nodes[101].online = message.metadata.group_id not in ("3", "4")

    grid.on_push = at_exchange
    deployment = run(app, grid, tmp_path / "out")
    assert [line["clients"] - line["left_out"] for line in deployment.lines] == [4, 4, 3, 3, 3, 4]
    agrees(app, grid, deployment)


def test_a_new_client_joins_between_rounds(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", rounds=4, deploy={"clients": 3})
    grid.nodes[103].online = False

    def at_exchange(message: Message) -> None:
        if message.metadata.group_id == "2":
            grid.nodes[103].online = True

    grid.on_push = at_exchange
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.lines[0]["clients"] == 3
    assert deployment.lines[-1]["clients"] == 4
    assert kept(app, grid, deployment, "c3").accepted == deployment.roster.members["c3"].accepted == 1 << 32 | 4


def test_too_few_answers_ask_again_then_stop_and_resume(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "remember"}, deploy={"minimum": 3, "deadline": 0.5})
    dead = {"2"}
    for node in (101, 102):
        grid.nodes[node].tamper = lambda order, reply: [] if order.metadata.group_id in dead else [reply]
    with pytest.raises(RunFailed, match=r"round 2: too few updates, 3 times.*last checkpoint"):
        run(app, grid, tmp_path / "out")
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert events.count("2 of 4 updates could be used, and 3 are needed; asking again") == 2
    dead.clear()
    deployment = run(app, grid, tmp_path / "out", resume=True)
    assert deployment.done == 3
    agrees(app, grid, deployment)


def test_a_client_that_lost_its_state_is_told_apart(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")

    def at_exchange(message: Message) -> None:
        if message.metadata.group_id == "2" and message.metadata.dst_node_id == 102:
            shutil.rmtree(grid.nodes[102].settings["state"])

    grid.on_push = at_exchange
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"out-of-step": 3}  # rounds 2 and 3, and the last scoring
    assert deployment.roster.members["c2"].accepted == 1 << 32 | 1


def test_clients_without_a_state_may_lose_it(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"})
    grid.on_push = lambda message: shutil.rmtree(tmp_path / "app" / "state-2", ignore_errors=True)
    assert run(app, grid, tmp_path / "out").transport.refused == {}


def test_nobody_comes(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"wait": 0.3})
    for node in grid.nodes.values():
        node.online = False
    with pytest.raises(RunFailed, match=r"0 clients came within 0\.3 seconds"):
        run(app, grid, tmp_path / "out")


def test_names(tmp_path: Path) -> None:
    """A registered name binds; a name is held by one node at a time; a list of names is a list."""
    app, grid = problem(tmp_path / "app", deploy={"clients": 2, "names": ["c0", "c1"], "wait": 5.0})
    grid.nodes[100].registered = "c0"
    grid.nodes[101].registered = "c1"
    grid.nodes[102].registered = "c0"  # says c2
    grid.nodes[104] = Node(grid.nodes[100].settings)  # says c0 too
    deployment = run(app, grid, tmp_path / "out")
    assert sorted(deployment.roster.members) == ["c0", "c1"]
    assert {name: m.node for name, m in deployment.roster.members.items()} == {"c0": 100, "c1": 101}
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert "the node registered as 'c0' says that it is 'c2'" in events
    assert "'c3' is not among deploy.names" in events
    assert "the name 'c0' is registered with another key" in events


def test_a_client_without_usable_data_is_turned_away(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"clients": 3})
    Path(grid.nodes[101].settings["data"]).unlink()
    deployment = run(app, grid, tmp_path / "out")
    assert "c1" not in deployment.roster.members
    assert deployment.transport.refused == {"no-data": 1}


def test_two_clients_cannot_share_a_state_folder(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[102].settings["state"] = grid.nodes[101].settings["state"]
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"failed": 4}
    assert deployment.roster.members["c2"].accepted == 0


def test_a_name_that_is_registered_cannot_be_taken_by_another_key(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"clients": 4})
    for node in grid.nodes.values():
        node.registered = node.settings["name"]
    grid.nodes = {99: Node({**grid.nodes[102].settings, "state": str(tmp_path / "forged")}), **grid.nodes}
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.roster.members["c2"].node == 102
    assert "the name 'c2' is registered with another key" in (tmp_path / "out" / "events.jsonl").read_text()


@pytest.mark.parametrize("wrong", [{"evalute": False}, {"state": 3}, {"name": "a\nb"}, {"name": "\x1b[2J"}])
def test_wrong_settings_of_a_client_are_refused_once(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Every greeting starts a process on the client's machine: who cannot answer is not greeted again at once."""
    app, grid = problem(tmp_path / "app", deploy={"clients": 4, "wait": 2.0})
    grid.nodes[101].settings |= wrong
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"failed": 1}
    assert len(grid.nodes[101].received) == 1
    assert sorted(deployment.roster.members) == ["c0", "c2", "c3"]


def test_a_data_function_may_have_settings_of_its_own(tmp_path: Path) -> None:
    federation = classification(3)
    app, grid = problem(tmp_path / "app", 3)

    def data(settings: Any) -> Any:
        assert settings["table"] == "records"
        who = int(settings["name"][1])
        return federation.x[federation.train[who]].numpy(), federation.y[federation.train[who]].numpy()

    app.data = data
    for node in grid.nodes.values():
        node.settings["table"] = "records"
    assert run(app, grid, tmp_path / "out").transport.refused == {}


def test_two_nodes_without_registered_names_cannot_be_one_client(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[104] = Node({**grid.nodes[100].settings, "state": str(tmp_path / "twin")})
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.roster.members["c0"].node == 100
    assert "another node says that it is 'c0', which is here already" in (tmp_path / "out" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"deploy": {"minimum": 5}}, r"deploy\.minimum = 5 is more than the 4 clients of a round"),
        ({"deploy": {"minimum": 3}, "participation": 2}, r"deploy\.minimum = 3 is more than the 2 clients"),
        ({"deploy": {"names": ["a"]}}, r"deploy\.names has 1 names, but deploy\.clients = 4"),
        ({"deploy": {"shape": [-1]}}, r"deploy\.shape = .* is not allowed"),
    ],
)
def test_what_can_never_be_is_said_before_anybody_waits(tables: Any, sentence: str, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", **tables)
    with pytest.raises(EquipoiseError, match=sentence):
        run(app, grid, tmp_path / "out")

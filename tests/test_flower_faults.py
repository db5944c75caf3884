"""Clients that err, die, lie, come late or come back: the round goes on, and everybody's state stays right."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.algorithm import Algorithm, LocalData, Reduce, Start
from equipoise.algorithms import ALGORITHMS
from equipoise.errors import EquipoiseError, RunFailed
from equipoise.flower.clientdata import write_client
from equipoise.flower.home import Home
from equipoise.flower.messages import Answer, answer_shapes, content, opened
from equipoise.flower.server import Deployment
from equipoise.flower.wire import group, named, pack
from equipoise.state import State, Upload, Uploads
from tests.conftest import classification, small_mlp
from tests.flower_memory import MemoryGrid, Node, deployed, over_the_wire, run, speaking_as

DITTO = {"name": "ditto", "lr": 0.05, "batch": 4}


class Remember(Algorithm):
    """The server's s is the sum of what all clients hold: true only while both sides agree on what was accepted."""

    def server(self, start: Start) -> State:
        return State(w=start.w0, s=torch.zeros_like(start.w0))

    def client(self, start: Start) -> State:
        return State(m=torch.zeros_like(start.w0))

    def down(self, server: State, who: int) -> State:
        return State(w=server.w)

    def local(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        m = data.descend(down.w) - down.w + 0.5 * client.m
        return State(m=m), Upload(State(d=m - client.m))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        s = server.s + uploads.stacked("d").sum(0)
        return State(w=server.w + 0.1 * s, s=s)

    def shared(self, server: State) -> Tensor:
        return server.w


@pytest.fixture(autouse=True)
def remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "remember", Remember)


def problem(folder: Path, clients: int = 4, algorithm: dict[str, Any] | None = None, **tables: Any) -> Any:
    names = [f"c{i}" for i in range(clients)]
    return deployed(folder, classification(clients, names=names), small_mlp(), algorithm or DITTO, **tables)


def kept(app: Any, grid: MemoryGrid, deployment: Deployment, name: str) -> Any:
    """What is on that client's disk, settled with what the server last took from it."""
    node = next(n for n in grid.nodes.values() if n.settings["name"] == name)
    state = Home(Path(node.settings["state"]), deployment.id, name).read()
    return state.settled(deployment.roster.members[name].accepted)


def agrees(app: Any, grid: MemoryGrid, deployment: Deployment) -> None:
    """Remember's server holds exactly the sum of the clients' states."""
    total = torch.zeros_like(deployment.server.s)
    for name, member in deployment.roster.members.items():
        if member.accepted:
            total += kept(app, grid, deployment, name).state.m
    torch.testing.assert_close(deployment.server.s, total, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- answers that are not what they should be
def changed(reply: Message, **facts: Any) -> Message:
    """The same answer with other facts or, under `tensors`, other tensors."""
    tensors = facts.pop("tensors", None)
    shapes = SHAPES["now"]
    answer, given = opened(reply, Answer, shapes)
    new = answer.model_copy(update=facts)
    return Message(content(new, tensors(given) if tensors else dict(given)), reply_to=_order(reply))


SHAPES: dict[str, Any] = {}
ORDERS: dict[int, Message] = {}


def _order(reply: Message) -> Message:
    return ORDERS[id(reply)]


def raw(reply: Message, blob: Any) -> Message:
    return Message(RecordDict({"equipoise": ConfigRecord({"message": blob})}), reply_to=_order(reply))


def bent(tensors: State, bend: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {**tensors, "up.w": bend(tensors["up.w"].clone())}


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def put(t: Tensor) -> Tensor:
        t[3] = value
        return t

    return put


LIES: dict[str, tuple[str, Callable[[Message], list[Message]]]] = {
    "wrong shape": ("shape", lambda r: [changed(r, tensors=lambda t: bent(t, lambda w: w[:-1]))]),
    "wrong dtype": ("shape", lambda r: [changed(r, tensors=lambda t: bent(t, Tensor.float))]),
    "not announced": ("shape", lambda r: [changed(r, tensors=lambda t: {**t, "up.data": torch.ones(3)})]),
    "no update": ("shape", lambda r: [changed(r, tensors=lambda t: named(group(t, "scores"), "scores"), trained=0)]),
    "NaN": ("not-finite", lambda r: [changed(r, tensors=lambda t: bent(t, _with(float("nan"))))]),
    "infinity": ("not-finite", lambda r: [changed(r, tensors=lambda t: bent(t, _with(float("inf"))))]),
    "weight": ("weight", lambda r: [changed(r, tensors=lambda t: {**t, "up.weight": -t["up.weight"]})]),
    "oversize": ("oversize", lambda r: [raw(r, b"\0" * 10_000_000)]),
    "garbage": ("malformed", lambda r: [raw(r, b"nonsense")]),
    "pickle": ("malformed", lambda r: [raw(r, pickle.dumps({"w": 1}))]),
    "not bytes": ("malformed", lambda r: [raw(r, "words")]),
    "other records": ("malformed", lambda r: [Message(RecordDict({"x": ConfigRecord({})}), reply_to=_order(r))]),
    "another round": ("another-round", lambda r: [changed(r, number=1 << 32 | 1)]),
    "another run": ("another-round", lambda r: [changed(r, run="f" * 32)]),
    "another's name": ("unknown", lambda r: [changed(r, client="c0")]),
    "an error": ("error", lambda r: [Message(Error(2, "secret"), reply_to=_order(r))]),
    "a failure": ("failed", lambda r: [changed(r, tensors=lambda t: {}, status="failed")]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_refused_counted_and_logged_and_the_round_goes_on(lie: str, tmp_path: Path) -> None:
    reason, bend = LIES[lie]
    app, grid = problem(tmp_path / "app")

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        return bend(reply) if order.metadata.group_id == "2" else [reply]

    grid.nodes[102].tamper = tamper
    SHAPES["now"] = answer_shapes(announced(app))
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {reason: 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]
    assert [line["clients"] for line in deployment.lines] == [4, 4, 4]
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert f"c2: refused ({reason})" in events
    assert "secret" not in events
    for name, member in deployment.roster.members.items():
        assert kept(app, grid, deployment, name).accepted == member.accepted == 1 << 32 | 3


def announced(app: Any) -> Any:
    from equipoise.algorithm import announce

    task = app.plan.task()
    return announce(app.plan.experiment.algorithm, Start(task.space, task.w0, 1))


def test_a_second_answer_is_refused(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[101].tamper = lambda order, reply: [reply, reply] if order.metadata.group_id == "2" else [reply]
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"unknown": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 0, 0]


def test_an_answer_from_another_node_is_refused(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.group_id == "2":
            reply.metadata.__dict__["_src_node_id"] = 100
        return [reply]

    grid.nodes[101].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"unknown": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]


def test_a_late_answer_is_refused_and_does_not_count_later(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "remember"}, rounds=4, deploy={"deadline": 0.6})
    held: list[tuple[str, Message]] = []

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.group_id == "2":
            held.append((order.metadata.message_id, reply))
            return []
        if held:
            identity, late = held.pop()
            grid.mailbox[identity] = [late]
        return [reply]

    grid.nodes[103].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"late": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0, 0]
    assert "no answer from c3" in (tmp_path / "out" / "events.jsonl").read_text()
    agrees(app, grid, deployment)


# ---------------------------------------------------------------- clients that come and go
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
    assert deployment.post.refused == {"out-of-step": 3}  # rounds 2 and 3, and the last scoring
    assert deployment.roster.members["c2"].accepted == 1 << 32 | 1


def test_clients_without_a_state_may_lose_it(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"})
    grid.on_push = lambda message: shutil.rmtree(tmp_path / "app" / "state-2", ignore_errors=True)
    assert run(app, grid, tmp_path / "out").post.refused == {}


def test_nobody_comes(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", deploy={"wait": 0.3})
    for node in grid.nodes.values():
        node.online = False
    with pytest.raises(RunFailed, match=r"0 clients came within 0\.3 seconds"):
        run(app, grid, tmp_path / "out")


# ---------------------------------------------------------------- who may take part
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
    assert deployment.post.refused == {"no-data": 1}


# ---------------------------------------------------------------- whatever happens
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_server_and_clients_agree_on_what_was_accepted(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Orders lost, answers lost, spoilt or late, the server killed anywhere: s stays the sum of the clients' states."""
    folder = tmp_path_factory.mktemp("fault")
    rng = random.Random(seed)
    app, grid = problem(
        folder / "app", 3, {"name": "remember"}, rounds=5, participation=2, deploy={"deadline": 0.4, "attempts": 20}
    )

    held: list[tuple[str, Message]] = []

    class Killed(BaseException):
        pass

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
        resume = (folder / "out" / "run.toml").exists()
    assert deployment.done == 5
    agrees(app, grid, deployment)


# ---------------------------------------------------------------- attempts at one round, and orders that overtake
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
                assert opened(reply, Answer, answer_shapes(announced(app)))[0].status == "stale"
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
    assert deployment.post.refused == {"late": 2}
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
    assert sorted(deployment.tally.rows) == ["c0", "c1", "c2", "c3"]
    assert times == {100: 1, 101: 2, 102: 2, 103: 2}


# ---------------------------------------------------------------- scores and settings that cannot be
NONSENSE: dict[str, Callable[[State], dict[str, Tensor]]] = {
    "NaN": lambda t: {**t, "scores.personal": t["scores.personal"] * float("nan")},
    "infinity": lambda t: {**t, "scores.personal": t["scores.personal"] + float("inf")},
    "above one": lambda t: {**t, "scores.personal": t["scores.personal"] + 1e300},
    "sizes": lambda t: {**t, "scores.sizes": -t["scores.sizes"]},
    "huge sizes": lambda t: {**t, "scores.sizes": t["scores.sizes"] + 2**62},
    "no sizes": lambda t: {k: v for k, v in t.items() if k != "scores.sizes"},
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_scores_that_cannot_be_do_not_spoil_those_of_others(nonsense: str, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    SHAPES["now"] = answer_shapes(announced(app))

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        last = order.metadata.message_type == "evaluate"
        return [changed(reply, tensors=NONSENSE[nonsense])] if last else [reply]

    grid.nodes[102].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"scores": 1}
    assert sorted(deployment.tally.rows) == ["c0", "c1", "c3"]
    assert 0 <= deployment.summary()["personal"]["accuracy"] <= 1


def test_weights_whose_sum_is_infinite_are_still_weights() -> None:
    huge = torch.tensor([1e308], dtype=torch.float64)
    uploads = Uploads((0, 1), tuple(Upload(State(w=torch.ones(2)), weight=huge) for _ in range(2)))
    torch.testing.assert_close(uploads.weights(), torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"deploy": {"minimum": 5}}, r"deploy\.minimum = 5 is more than the 4 clients of a round"),
        ({"deploy": {"minimum": 3}, "participation": 2}, r"deploy\.minimum = 3 is more than the 2 clients"),
        ({"deploy": {"names": ["a"]}}, r"deploy\.names has 1 names, and deploy\.clients = 4"),
        ({"deploy": {"shape": [-1]}}, r"deploy\.shape = .* is not allowed"),
    ],
)
def test_what_can_never_be_is_said_before_anybody_waits(tables: Any, sentence: str, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", **tables)
    with pytest.raises(EquipoiseError, match=sentence):
        run(app, grid, tmp_path / "out")


# ---------------------------------------------------------------- clients that are set up wrongly
def test_two_clients_cannot_share_a_state_folder(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[102].settings["state"] = grid.nodes[101].settings["state"]
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"failed": 4}
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
    assert deployment.post.refused == {"failed": 1}
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
    assert run(app, grid, tmp_path / "out").post.refused == {}


def test_methods_without_a_state_do_not_mind_a_server_that_fell_back(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"}, rounds=3)
    run(app, grid, tmp_path / "out")
    app, grid = problem(tmp_path / "app", algorithm={"name": "fedavg"}, rounds=5)
    newest = max((tmp_path / "out" / "checkpoint").glob("round-*.json"))
    newest.write_text("damaged")
    deployment = run(app, grid, tmp_path / "out", resume=True)
    assert deployment.done == 5
    assert deployment.post.refused == {}


def test_two_nodes_without_registered_names_cannot_be_one_client(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[104] = Node({**grid.nodes[100].settings, "state": str(tmp_path / "twin")})
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.roster.members["c0"].node == 100
    assert "another node says that it is 'c0', which is here already" in (tmp_path / "out" / "events.jsonl").read_text()


@pytest.mark.parametrize("key", ["\ud800", "a\nequipoise: round 9 done\x1b[2J", "data"])
def test_a_fact_that_nobody_asked_for_is_refused_and_forges_no_log(key: str, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.group_id != "2":
            return [reply]
        ORDERS[id(reply)] = order
        return [raw(reply, pack({}, {"run": "0" * 32, "number": 1, "client": "c2", key: 1}))]

    grid.nodes[102].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.post.refused == {"malformed": 1}
    told = [json.loads(line).get("text", "") for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert all(text.isprintable() for text in told)

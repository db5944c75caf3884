"""Answers that are not what they should be are refused, counted and logged, and the round goes on."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from torch import Tensor

from equipoise.flower.codec import group, named, pack
from equipoise.flower.protocol import answer_shapes
from equipoise.state import RoundUploads, State, Upload
from tests.support.flower_memory import run
from tests.support.marks import slow_except
from tests.support.tampering import ORDERS, SHAPES, agrees, announced, changed, kept, order_of, problem, raw

pytestmark = pytest.mark.usefixtures("remember")


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
    "other records": ("malformed", lambda r: [Message(RecordDict({"x": ConfigRecord({})}), reply_to=order_of(r))]),
    "another round": ("another-round", lambda r: [changed(r, number=1 << 32 | 1)]),
    "another run": ("another-round", lambda r: [changed(r, run="f" * 32)]),
    "another's name": ("unknown", lambda r: [changed(r, client="c0")]),
    "an error": ("error", lambda r: [Message(Error(2, "secret"), reply_to=order_of(r))]),
    "a failure": ("failed", lambda r: [changed(r, tensors=lambda t: {}, status="failed")]),
}


@pytest.mark.parametrize("lie", slow_except(LIES, "wrong shape", "NaN", "garbage", "another round", "a failure"))
def test_a_wrong_answer_is_refused_counted_and_logged_and_the_round_goes_on(lie: str, tmp_path: Path) -> None:
    reason, bend = LIES[lie]
    app, grid = problem(tmp_path / "app")

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        return bend(reply) if order.metadata.group_id == "2" else [reply]

    grid.nodes[102].tamper = tamper
    SHAPES["now"] = answer_shapes(announced(app), app.plan.task().metrics)
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {reason: 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]
    assert [line["clients"] for line in deployment.lines] == [4, 4, 4]
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert f"c2: refused ({reason})" in events
    assert "secret" not in events
    for name, member in deployment.roster.members.items():
        assert kept(app, grid, deployment, name).accepted == member.accepted == 1 << 32 | 3


def test_a_second_answer_is_refused(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    grid.nodes[101].tamper = lambda order, reply: [reply, reply] if order.metadata.group_id == "2" else [reply]
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"unknown": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 0, 0]


def test_an_answer_from_another_node_is_refused(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.group_id == "2":
            reply.metadata.__dict__["_src_node_id"] = 100
        return [reply]

    grid.nodes[101].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"unknown": 1}
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
    assert deployment.transport.refused == {"late": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0, 0]
    assert "no answer from c3" in (tmp_path / "out" / "events.jsonl").read_text()
    agrees(app, grid, deployment)


NONSENSE: dict[str, Callable[[State], dict[str, Tensor]]] = {
    "NaN": lambda t: {**t, "scores.personal": t["scores.personal"] * float("nan")},
    "infinity": lambda t: {**t, "scores.personal": t["scores.personal"] + float("inf")},
    "above one": lambda t: {**t, "scores.personal": t["scores.personal"] + 1e300},
    "sizes": lambda t: {**t, "scores.sizes": -t["scores.sizes"]},
    "huge sizes": lambda t: {**t, "scores.sizes": t["scores.sizes"] + 2**62},
    "no sizes": lambda t: {k: v for k, v in t.items() if k != "scores.sizes"},
}


@pytest.mark.parametrize("nonsense", slow_except(NONSENSE, "NaN"))
def test_scores_that_cannot_be_do_not_spoil_those_of_others(nonsense: str, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app")
    SHAPES["now"] = answer_shapes(announced(app), app.plan.task().metrics)

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        last = order.metadata.message_type == "evaluate"
        return [changed(reply, tensors=NONSENSE[nonsense])] if last else [reply]

    grid.nodes[102].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"scores": 1}
    assert sorted(deployment.scores.rows) == ["c0", "c1", "c3"]
    assert 0 <= deployment.summary()["personal"]["accuracy"] <= 1


def test_weights_whose_sum_is_infinite_are_still_weights() -> None:
    huge = torch.tensor([1e308], dtype=torch.float64)
    uploads = RoundUploads((0, 1), tuple(Upload(State(w=torch.ones(2)), weight=huge) for _ in range(2)))
    torch.testing.assert_close(uploads.weights(), torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.slow
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
    assert deployment.transport.refused == {"malformed": 1}
    told = [json.loads(line).get("text", "") for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert all(text.isprintable() for text in told)

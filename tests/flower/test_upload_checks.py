"""What one client can do to a run with a single message is bounded: its weight, its size, its length."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.schema import infer_schema
from equipoise.equilibrium import Equilibrium
from equipoise.flower.protocol import Answer, Order, answer_shapes, content, open_message
from equipoise.flower.transport import PendingOrder, Reply
from equipoise.flower.upload_norms import UploadNorms, difference_norm
from equipoise.models.base import BodyAndHead
from equipoise.privacy.mechanisms import secure_noise
from equipoise.state import State
from tests.support.flower_memory import SUPERLINK, deployed, run, speaking_as
from tests.support.messages import examples
from tests.support.problems import classification, registered
from tests.support.tampering import ORDERS, SHAPES, announced, changed, problem

FEDAVG = {"name": "fedavg", "lr": 0.05, "batch": 4}
PRIVATE = {"clip": 0.1, "sigma": 0.01}
Bend = Callable[[State], dict[str, Tensor]]


def lying(app: Any, grid: Any, bend: Bend, node: int = 102, private: bool = False) -> None:
    """Let a client's answer of the second round be changed on its way."""
    shapes = answer_shapes(announced(app), app.plan.task().metrics)
    SHAPES["now"] = {k: v for k, v in shapes.items() if not (private and k == "up.weight")}

    def tamper(order: Message, reply: Message) -> list[Message]:
        ORDERS[id(reply)] = order
        return [changed(reply, tensors=bend)] if order.metadata.group_id == "2" else [reply]

    grid.nodes[node].tamper = tamper


def weight(value: float) -> Bend:
    return lambda t: {**t, "up.weight": torch.full_like(t["up.weight"], value)}


def filled(value: float) -> Bend:
    return lambda t: {**t, "up.w": torch.full_like(t["up.w"], value)}


def without_second_answer(folder: Path, clients: int = 4, **tables: Any) -> Tensor:
    """The global model of a run in which that client did not answer in the second round."""
    app, grid = problem(folder / "app", clients, FEDAVG, **tables)
    node = max(grid.nodes) if clients == 2 else 102
    grid.nodes[node].tamper = lambda order, reply: [] if order.metadata.group_id == "2" else [reply]
    return run(app, grid, folder / "out").server.w


@pytest.mark.parametrize("value", [1e30, 1e7])
def test_a_weight_above_the_largest_is_refused(value: float, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG)
    lying(app, grid, weight(value))
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"weight": 1}
    assert "above deploy.largest_weight" in (tmp_path / "out" / "events.jsonl").read_text()
    torch.testing.assert_close(deployment.server.w, without_second_answer(tmp_path / "other"), rtol=1e-12, atol=1e-12)


def test_a_weight_above_the_announced_number_of_samples_is_refused(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG)
    lying(app, grid, lambda t: {**t, "up.weight": t["up.weight"] + 1})
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"weight": 1}
    assert "samples that it announced" in (tmp_path / "out" / "events.jsonl").read_text()


@pytest.mark.parametrize("value", [3.5, 10.0])
def test_a_weight_above_the_iterations_that_a_device_may_perform_is_refused(value: float, tmp_path: Path) -> None:
    """The model allows 10 and the experiment 3, which honest answers use in full."""
    layer = Equilibrium(lambda z, u: 0.5 * z + u, solver="plain", tol=0.0, limit=10)
    module = BodyAndHead(nn.Sequential(nn.Linear(5, 8), layer), nn.Linear(8, 3))
    tables = {"devices": {"iterations": [3], "fractions": [1.0]}, "participation": 1.0}
    data = classification(4, names=[f"c{i}" for i in range(4)])
    app, grid = deployed(tmp_path / "app", data, module, {"name": "fl-deq", "lr": 0.05, "batch": 4}, **tables)
    lying(app, grid, weight(value))
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"weight": 1}
    assert "above the 3 iterations that its device may perform" in (tmp_path / "out" / "events.jsonl").read_text()
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]


def test_the_largest_weight_is_a_setting(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG, deploy={"largest_weight": 2.0, "attempts": 1, "wait": 1.0})
    with pytest.raises(Exception, match="0 clients came"):
        run(app, grid, tmp_path / "out")
    assert "more than deploy.largest_weight = 2; set that higher" in (tmp_path / "out" / "events.jsonl").read_text()


@pytest.mark.parametrize("size", [10**12, 0])
def test_a_greeting_with_an_impossible_size_is_turned_away(size: int, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG, deploy={"clients": 3})

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.message_type != "query":
            return [reply]
        answer, _ = open_message(reply, Answer, {})
        return [Message(content(answer.model_copy(update={"size": size})), reply_to=order)]

    grid.nodes[102].tamper = tamper
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused["size"] >= 1
    assert sorted(deployment.roster.members) == ["c0", "c1", "c3"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_weights_that_are_numbers_of_samples_are_known_as_such(name: str, tmp_path: Path) -> None:
    app, _ = problem(tmp_path / "app")
    start = app.plan.task().with_own_modules(registered(name), 0).start(4)
    schema = infer_schema(registered(name), start)
    assert schema.weighs_samples == ("weight" in schema.up and name not in ("fl-deq", "fedas"))
    assert schema.weighs_iterations == (name == "fl-deq")
    hidden = infer_schema(registered(name), start, weighted=False)
    assert not hidden.weighs_samples
    assert not hidden.weighs_iterations


@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize("value", [3e38, -1e200, 1e9])
def test_a_finite_but_huge_update_is_refused_and_leaves_no_trace(value: float, clients: int, tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", clients, FEDAVG)
    lying(app, grid, filled(value), node=max(grid.nodes) if clients == 2 else 102)
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"norm": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]
    torch.testing.assert_close(
        deployment.server.w, without_second_answer(tmp_path / "other", clients), rtol=1e-12, atol=1e-12
    )


def test_the_check_of_norms_can_be_switched_off(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG, rounds=2, deploy={"largest_norm": 0.0})
    lying(app, grid, filled(1e9))
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {}
    assert float(deployment.server.w.max()) > 1e8


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize("algorithm", [FEDAVG, {"name": "flame", "lr": 0.05, "batch": 4}])
def test_under_privacy_the_server_enforces_the_clip(where: str, algorithm: dict[str, Any], tmp_path: Path) -> None:
    privacy = {**PRIVATE, "where": where}
    app, grid = problem(tmp_path / "app", algorithm=algorithm, privacy=privacy)
    lying(app, grid, lambda t: {**t, **{k: v + 1 for k, v in t.items() if k.startswith("up.")}}, private=True)
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"clip": 1}
    assert [line["left_out"] for line in deployment.lines] == [0, 1, 0]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("where", ["local", "central"])
def test_no_honest_update_exceeds_the_clip(where: str, precision: str, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg", "lr": 5.0, "batch": 4}  # every update is clipped
    privacy = {**PRIVATE, "where": where}
    app, grid = problem(tmp_path / "app", algorithm=algorithm, privacy=privacy, engine={"precision": precision})
    assert run(app, grid, tmp_path / "out").transport.refused == {}


def test_a_client_with_most_of_the_samples_is_reported(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG)

    def tamper(order: Message, reply: Message) -> list[Message]:
        if order.metadata.message_type != "query":
            return [reply]
        answer, _ = open_message(reply, Answer, {})
        return [Message(content(answer.model_copy(update={"size": 10**6})), reply_to=order)]

    grid.nodes[102].tamper = tamper
    run(app, grid, tmp_path / "out")
    assert "c2 announces 1000000 of all" in (tmp_path / "out" / "events.jsonl").read_text()


lengths = st.floats(1e-3, 1e6)


@examples
@given(st.lists(lengths, min_size=2, max_size=9), st.floats(1, 1e3))
def test_updates_of_similar_length_are_never_refused(norms: list[float], factor: float) -> None:
    low = max(norms) / factor  # no two differ by more than the factor
    given = {str(k): max(norm, low) for k, norm in enumerate(norms)}
    assert UploadNorms(factor * (1 + 1e-9)).outliers(0, given, scale=0.0) == {}


@examples
@given(st.lists(lengths, min_size=1, max_size=9), st.floats(2, 1e3))
def test_one_update_far_beyond_all_others_is_refused(norms: list[float], factor: float) -> None:
    far = 2 * max(factor * max(norms), 10.0)
    given = {str(k): norm for k, norm in enumerate(norms)} | {"far": far}
    assert "far" in UploadNorms(factor).outliers(0, given, scale=1.0)


@examples
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6), st.integers(0, 9), st.floats(1.0, 1e3))
def test_no_update_of_ordinary_length_is_refused_however_short_the_others_are(
    norms: list[float], idle: int, scale: float
) -> None:
    """Others that have converged, or that send nothing, do not shut out a client that joins late or comes back."""
    norms_of_ordinary = {f"honest {k}": norm * scale for k, norm in enumerate(norms)}
    others = {f"idle {k}": 1e-9 for k in range(idle)}
    assert UploadNorms(1000.0).outliers(0, norms_of_ordinary | others, scale) == {}


def test_a_client_alone_is_compared_with_the_model() -> None:
    assert UploadNorms(1000.0).outliers(0, {"a": 1900.0}, scale=2.0) == {}
    assert UploadNorms(1000.0).outliers(0, {"a": 2100.0}, scale=2.0).keys() == {"a"}


@examples
@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4))
def test_what_is_new_in_a_message_is_its_distance_from_what_it_is_a_change_of(values: list[float]) -> None:
    message = State(w=torch.tensor(values[:2]).double(), h=torch.tensor(values[2:]).double())
    known = torch.tensor([3.0, 1.0]).double()
    whole = math.sqrt(float((message.w - known).square().sum() + message.h.square().sum()))
    assert difference_norm(message, {"w": [known]}) == pytest.approx(whole)
    assert difference_norm(State(w=known), {"w": [known + 1, known]}) == 0


def test_under_privacy_zeros_are_not_an_update(tmp_path: Path) -> None:
    """The difference from the broadcast counts: a model of zeros is as far from it as the broadcast is long."""
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG, privacy={"clip": 0.1, "sigma": 1e-6})
    lying(app, grid, filled(0.0), private=True)
    assert run(app, grid, tmp_path / "out").transport.refused == {"clip": 1}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_references_are_fields_of_the_broadcast(name: str, tmp_path: Path) -> None:
    app, _ = problem(tmp_path / "app")
    schema = infer_schema(registered(name), app.plan.task().with_own_modules(registered(name), 0).start(4))
    for field, references in schema.references.items():
        assert {schema.down[k] for k in references} == {schema.up[field]}


def test_a_client_that_comes_back_with_more_samples_does_not_weigh_more(tmp_path: Path) -> None:
    app, grid = problem(tmp_path / "app", algorithm=FEDAVG)
    lying(app, grid, weight(10**6))
    deployment = run(app, grid, tmp_path / "out")
    member = deployment.roster.members["c2"]
    enrol = deployment.enrolment
    reply = Reply(
        PendingOrder(member.node, "c2", Order(run=deployment.id, hello=True), 0.0),
        Answer(run=deployment.id, number=0, client="c2", status="hello", layout=enrol.layout, size=10**6),
        State(),
        0.0,
    )
    before = member.samples
    with speaking_as(SUPERLINK):
        enrol.enrol(reply)
    assert member.samples == before
    assert "c2 now announces 1000000 samples" in (tmp_path / "out" / "events.jsonl").read_text()
    assert deployment.transport.refused == {"weight": 1}


def test_noise_is_hardly_ever_longer_than_the_bound_allows() -> None:
    """The bound is sigma (sqrt(d) + 12); with 4 in place of 12 it is exceeded once in 3,000 at most."""
    draws = 3000
    for d in (1, 3, 50):
        noise = secure_noise(b"a secret of the test" + bytes([d]))((draws, d))
        assert int((noise.norm(dim=1) > math.sqrt(d) + 4).sum()) <= 6


def test_norms_survive_a_restart() -> None:
    norms, other = UploadNorms(10.0), UploadNorms(10.0)
    norms.keep(0, {"a": 1.0, "b": 2.0, "c": 3.0})
    norms.keep(1, {"a": 1e9})
    other.restore(norms.facts())
    assert other.outliers(0, {"d": 50.0}, 1.0).keys() == norms.outliers(0, {"d": 50.0}, 1.0).keys() == {"d"}
    assert other.outliers(1, {"a": 2e9}, 1e9) == {}

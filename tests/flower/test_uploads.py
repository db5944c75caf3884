"""What leaves a client: the algorithm's message and counters; scores only where they are switched on; nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.capabilities import HasConsensusModel, exchanges_of
from equipoise.algorithms.schema import infer_schema
from equipoise.flower.codec import group, unpack
from equipoise.flower.protocol import Answer
from equipoise.storage.model_kinds import COLUMNS
from tests.support.flower_memory import MemoryGrid, deployed, run, table
from tests.support.marks import slow_except
from tests.support.problems import KINDS, classification, registered, small_mlp

SOLVES = {"solves", "iterations", "unconverged", "gradient_solves", "gradient_iterations", "gradients_unconverged"}
COUNTERS = {"trained", "samples", "evaluated", "adapted", "size", *SOLVES}
IDENTITY = {"protocol", "run", "number", "client", "status", "unseen", "layout"}


def captured(grid: MemoryGrid) -> list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]]:
    """Every message that any client sent: its kind, its facts and its tensors, read by nothing of the server's."""
    found = []
    for node in grid.nodes.values():
        for order, reply in zip(node.received, node.sent, strict=True):
            assert not reply.has_error()
            assert list(reply.content) == ["equipoise"]
            record = reply.content["equipoise"]
            assert isinstance(record, ConfigRecord)
            assert list(record) == ["message"]
            blob = record["message"]
            assert isinstance(blob, bytes)
            tensors, facts = unpack(blob, ALLOWED)
            found.append((order.metadata.message_type, facts, tensors))
    return found


ALLOWED: dict[str, Any] = {}


EVERY = [*((name, True) for name in ALGORITHMS), *((name, False) for name in KINDS)]


@pytest.mark.parametrize(("name", "evaluate"), slow_except(EVERY, *((name, True) for name in KINDS), several=True))
def test_only_what_was_announced_is_sent(name: str, evaluate: bool, tmp_path: Path) -> None:
    algorithm = registered(name)
    federation = classification(4)
    app, grid = deployed(
        tmp_path / "app",
        federation,
        small_mlp(),
        table(algorithm),
        deploy={"evaluate": evaluate},
        participation=0.5,
        rounds=2,
    )
    deployment = run(app, grid, tmp_path / "out")
    task = app.plan.task()
    schema = infer_schema(algorithm, task.start(4))
    up = schema.up
    ALLOWED.clear()
    ALLOWED.update({f"up.{k}": v for k, v in up.items()})
    ALLOWED.update({f"diagnostics.{k}": ((1,), torch.float64) for k in schema.diagnostics})
    if evaluate:
        ALLOWED.update({f"scores.{k}": ((len(COLUMNS),), torch.float64) for k in ("personal", "global")})
        if isinstance(algorithm, HasConsensusModel):
            ALLOWED["scores.consensus"] = ((len(COLUMNS),), torch.float64)
        ALLOWED["scores.sizes"] = ((3,), torch.int64)
    sent = captured(grid)  # unpack refuses whatever is not allowed
    asked = 4 * exchanges_of(algorithm)  # two of four clients in each of two rounds
    assert len([kind for kind, _, _ in sent if kind == "train"]) == asked
    for kind, facts, tensors in sent:
        assert facts.keys() <= IDENTITY | COUNTERS
        Answer(**facts)
        assert group(tensors, "up").shapes() == (up if kind == "train" else {})
        assert group(tensors, "diagnostics").keys() == (set(schema.diagnostics) if kind == "train" else set())
        if kind == "query":
            assert not tensors
            assert {facts[k] for k in COUNTERS - {"size"}} == {0}
            weighs = "weight" in up and name not in ("fl-deq", "fedas")  # their weights are not numbers of samples
            assert bool(facts["size"]) == weighs
        if not evaluate:
            assert facts["evaluated"] == facts["adapted"] == 0
    assert bool(deployment.scores.rows) == evaluate
    assert ("personal" in deployment.summary()) == (evaluate and "personal" in deployment.scores.board().tables())


def test_a_client_may_keep_its_scores(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "ditto"})
    grid.nodes[101].settings["evaluate"] = False
    deployment = run(app, grid, tmp_path / "out")
    assert sorted(deployment.scores.rows) == ["client-0", "client-2"]
    for reply in grid.nodes[101].sent:
        blob = reply.content["equipoise"]["message"]
        assert b"scores" not in blob
    assert deployment.transport.refused == {}


def test_without_evaluation_clients_still_get_their_models(tmp_path: Path) -> None:
    app, grid = deployed(
        tmp_path / "app", classification(3), small_mlp(), {"name": "ditto"}, deploy={"evaluate": False}
    )
    deployment = run(app, grid, tmp_path / "out")
    assert len(deployment.lines) == 3
    for node in grid.nodes.values():
        files = list(Path(node.settings["state"]).glob("*/personal.safetensors"))
        assert len(files) == 1
        # Asked only three times to train and once at the end: nothing was scored in between.
        assert [m.metadata.message_type for m in node.received] == ["query", "train", "train", "train", "evaluate"]


def test_errors_do_not_carry_data_away(tmp_path: Path) -> None:
    """What goes wrong on a client may speak of its data; the server hears one word."""
    federation = classification(3)
    app, grid = deployed(tmp_path / "app", federation, small_mlp(), {"name": "ditto"}, deploy={"clients": 2})

    def broken(settings: Any) -> Any:
        if settings["name"] == "client-1":
            raise ValueError("patient 4711 has no value")
        who = federation.names.index(settings["name"])
        return {
            split: tuple(t.numpy() for t in federation.gather(torch.from_numpy(getattr(federation, split)[who])))
            for split in ("train", "test")
        }

    app.data = broken
    deployment = run(app, grid, tmp_path / "out")
    assert deployment.transport.refused == {"failed": 1}
    assert sorted(deployment.roster.members) == ["client-0", "client-2"]
    for reply in grid.nodes[101].sent:
        assert b"4711" not in reply.content["equipoise"]["message"]
    assert "4711" not in (tmp_path / "out" / "events.jsonl").read_text()


def test_the_counted_bytes_are_those_of_the_messages(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "fedavg"})
    deployment = run(app, grid, tmp_path / "out")
    size = app.plan.task().space.size
    assert deployment.counters.bytes_up == 3 * 3 * 8 * (size + 1)  # the model and the weight
    assert deployment.counters.bytes_down == 3 * 3 * 8 * size
    summary = deployment.summary()
    for way, messages in (("up", "sent"), ("down", "received")):
        total = sum(
            len(m.content["equipoise"]["message"]) for node in grid.nodes.values() for m in getattr(node, messages)
        )
        assert summary[f"message_bytes_{way}"] == total
        assert total > summary[f"bytes_{way}"]

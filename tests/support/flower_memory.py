"""A deployment in this process: Flower's own messages and apps, no network, and clients that can be made to err."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tomli_w
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation
from equipoise.engine.simulation import Simulation
from equipoise.flower import App, attendance, enrolment, exchange, transport
from equipoise.flower.apps import serve
from equipoise.flower.client_data import write_client
from equipoise.flower.server import Deployment
from tests.support.problems import simulation


def over_the_wire(message: Message) -> Message:
    """As it comes out at the other end."""
    received = message_from_proto(message_to_proto(message))
    received.metadata.__dict__["_message_id"] = message.metadata.message_id
    return received


SUPERLINK = 1


@contextmanager
def speaking_as(node: int) -> Iterator[None]:
    """Flower's messages take their sender from the process that makes them."""
    before = TaskIdentity._node_id, TaskIdentity._run_id, TaskIdentity._task_id
    TaskIdentity.node_id, TaskIdentity.run_id, TaskIdentity.task_id = node, 1, node
    yield
    TaskIdentity._node_id, TaskIdentity._run_id, TaskIdentity._task_id = before


@dataclass
class Node:
    """A SuperNode: its settings and what may go wrong with it."""

    settings: dict[str, Any]
    registered: str = ""
    online: bool = True
    tamper: Callable[[Message, Message], list[Message]] = lambda order, reply: [reply]
    "what becomes of the reply on its way: nothing, another, or several"
    received: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)


class Killed(BaseException):
    """The end of a server at any place, which nothing in it may catch."""


class MemoryGrid(Grid):
    def __init__(self, app: App, nodes: dict[int, Node]):
        self.app, self.nodes = app, nodes
        self.mailbox: dict[str, list[Message]] = {}
        self.on_push: Callable[[Message], None] = lambda message: None

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node, state in self.nodes.items() if state.online]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.nodes[node].registered) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        identities = []
        for message in messages:
            identity = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = identity
            identities.append(identity)
            self.on_push(message)
            node = self.nodes[message.metadata.dst_node_id]
            if not node.online:
                continue
            order = over_the_wire(message)
            node.received.append(order)
            context = Context(1, message.metadata.dst_node_id, node.settings, RecordDict(), {})
            with speaking_as(message.metadata.dst_node_id):
                reply = self.app.client(order, context)
                reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            node.sent.append(reply)
            self.mailbox[identity] = [over_the_wire(m) for m in node.tamper(order, reply)]
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [message for identity in message_ids for message in self.mailbox.pop(identity, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def deployed(
    folder: Path, federation: Federation, module: nn.Module | None, algorithm: dict[str, Any], **tables: Any
) -> tuple[App, MemoryGrid]:
    """An app for these clients, each with a data file and a state folder of its own."""
    deploy = {"clients": len(federation.by_name[0]), "shape": list(federation.x.shape[1:]), "outputs": 3, "threads": 1}
    given = {
        "rounds": 3,
        **{k: v for k, v in tables.items() if k not in ("deploy", "engine")},
        "algorithm": algorithm,
        "engine": {"precision": "float64", **tables.get("engine", {})},
        "deploy": {**deploy, "wait": 20.0, "deadline": 20.0, **tables.get("deploy", {})},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(tomli_w.dumps(given))
    app = App(folder / "app.py", model=None if module is None else lambda: module)
    nodes = {}
    for who, name in enumerate(federation.names):
        write_client(folder / f"{who}.safetensors", federation, who)
        unseen = name in federation.unseen
        settings = {"name": name, "data": str(folder / f"{who}.safetensors"), "state": str(folder / f"state-{who}")}
        nodes[100 + who] = Node({**settings, "unseen": unseen})
    return app, MemoryGrid(app, nodes)


class Clock:
    """A server's time, which passes in its pauses only: what comes in time does not depend on the machine's speed."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def clock_of_its_own() -> Iterator[None]:
    clock = Clock()
    with ExitStack() as patches:
        for module in (attendance, enrolment, exchange, transport):
            patches.enter_context(mock.patch.object(module, "time", clock))
        yield


def run(app: App, grid: MemoryGrid, out: Path, resume: bool = False, back: int = 0) -> Deployment:
    with speaking_as(SUPERLINK), clock_of_its_own():
        return serve(app.plan, grid, out, resume, app.callbacks, back)


def in_both_engines(
    folder: Path,
    algorithm: Algorithm,
    federation: Federation,
    module: nn.Module,
    uploads: UploadSettings | None = None,
    tables: dict[str, Any] | None = None,
    **schedule: Any,
) -> tuple[Deployment, Simulation]:
    """Run the same over Flower and in the simulator.

    Args:
        folder: the folder of both runs, `flower` and `simulated`.
        algorithm: the algorithm.
        federation: the clients' data.
        module: the model.
        uploads: attack, reducer and privacy of the simulator.
        tables: the same as sections of the deployment's settings, and others that only a deployment has.
        schedule: settings of the schedule; there are three rounds.
    """
    schedule = {"rounds": 3, **schedule}
    simulated = simulation(algorithm, federation, module, folder=folder / "simulated", uploads=uploads, **schedule)
    simulated.run()
    app, grid = deployed(folder / "app", federation, module, table(algorithm), **schedule, **(tables or {}))
    return run(app, grid, folder / "flower"), simulated


def same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, float):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=where)
    else:
        assert a == b, where


def table(algorithm: Algorithm) -> dict[str, Any]:
    name = next(name for name, cls in ALGORITHMS.items() if cls is type(algorithm))
    return {"name": name, **algorithm.table()}


WALL = ("seconds", "samples_per_second", "peak_memory_mb", "mode", "dataset")

"""A client of a tiny private experiment, and orders that no honest server would send."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor, nn

from equipoise.flower.client import Client
from equipoise.flower.protocol import Answer, Order, answer_shapes, content, open_message
from equipoise.models.base import BodyAndHead
from equipoise.state import State
from tests.support.flower_memory import SUPERLINK, deployed, speaking_as
from tests.support.problems import classification

CLIP, SIGMA, PARAMETERS = 0.5, 2.0, 18
PRIVACY = {"clip": CLIP, "sigma": SIGMA}
FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 64}
FLAME = {"name": "flame", "lr": 0.1, "batch": 64}


def softmax_model() -> nn.Module:
    return BodyAndHead(nn.Identity(), nn.Linear(5, 3))


def private_client(
    folder: Path,
    algorithm: dict[str, Any] | None = None,
    privacy: dict[str, Any] | None = PRIVACY,
    state: Path | None = None,
    rounds: int = 3,
    metrics: list[str] | None = None,
    **settings: Any,
) -> Client:
    """Return a client with 13 samples and the state folder `state`."""
    tables = {
        "rounds": rounds,
        **({"privacy": privacy} if privacy else {}),
        **({"metrics": metrics} if metrics else {}),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = softmax_model()
    app, grid = deployed(folder, classification(3), module, algorithm or FEDAVG, **tables)
    own = {"state": str(state or folder / "state"), **settings}
    return Client(app.client_plan, {**grid.nodes[102].settings, **own})


def run_id(number: int) -> str:
    return f"{number:032x}"


def down_for(client: Client, seed: int) -> dict[str, Tensor]:
    """Return a message of the server for an order: everything that the algorithm expects, and the start."""
    rng = np.random.default_rng(seed)
    draw = lambda shape, dtype: torch.from_numpy(0.1 * rng.standard_normal(shape)).to(dtype)  # noqa: E731
    tensors = {f"down.{name}": draw(shape, dtype) for name, (shape, dtype) in client.schema.down.items()}
    return tensors | {"start.w0": torch.zeros(PARAMETERS, dtype=torch.float64)}


def ask(client: Client, order: Order, tensors: dict[str, Tensor] | None = None) -> tuple[Answer, State]:
    """Send an order as Flower would, and open the reply."""
    with speaking_as(SUPERLINK):
        message = Message(content(order, tensors or {}), 102, "train")
        message.metadata.__dict__["_message_id"] = "1"
    with speaking_as(102):
        reply = client(message)
    return open_message(reply, Answer, answer_shapes(client.schema, client.task.metrics))


def train(client: Client, run: int = 1, number: int = 1, seed: int = 0, round: int = 1, **more: Any) -> Any:
    """Order the client to train; return its answer and its update, None if there is none."""
    facts = {"run": run_id(run), "number": number, "client": client.settings.name, "clients": 3, "train": round}
    answer, tensors = ask(client, Order(**{**facts, **more}), down_for(client, seed))
    return answer, next((t for name, t in tensors.items() if name.startswith("up.")), None)

"""The protocol of server and clients: the facts that travel with tensors, and how both become a Flower message."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.local_data import Start
from equipoise.algorithms.schema import MessageSchema, Shapes
from equipoise.equilibrium import Solves, SolveStats
from equipoise.errors import EquipoiseError
from equipoise.evaluation.attack_success import COUNTS
from equipoise.evaluation.forecast_scores import NAIVE
from equipoise.evaluation.scoreboard import score_columns
from equipoise.flower.codec import RejectedMessage, named, pack, unpack
from equipoise.metrics import MetricCollection
from equipoise.settings import Settings, read
from equipoise.state import State
from equipoise.storage.diagnostics import DIAGNOSTICS
from equipoise.storage.model_kinds import SCORED

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Text without line breaks and control characters, because names appear in logs."""
SUCCESS_COUNTS = "success"
"""Group of the counts of an attack's success on a client's test samples."""
FORECASTS = "forecasts"
"""Group of the errors of a client's forecasts."""
_RECORD, _FIELD = "equipoise", "message"

Round = Annotated[int, Field(ge=0, le=2**53)]
Counter = Annotated[int, Field(ge=0, le=10**12)]
Word = Annotated[str, Field(max_length=256, pattern=PRINTABLE)]
NOBODY = "0" * 32
"""The run in the answer of a client that could not read its order."""
Status = Literal["done", "hello", "stale", "out-of-step", "not-finite", "no-data", "no-budget", "failed"]
STATUSES = get_args(Status)


class Order(Settings):
    """What the server asks of a client."""

    protocol: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    "identity of the run; the same after a restart of the server"
    hello: bool = False
    "whether this is a greeting: the client only reports who it is"
    number: Round = 0
    "number of the order; it increases within a run, also over repeated rounds and restarts of the server"
    exchange: Round = 0
    "round that the order belongs to, for logs"
    client: Word = ""
    "name under which the server knows the client"
    clients: Round = 0
    "number of clients"
    samples: Round = 0
    "number of training samples of all clients together, if the algorithm needs it"
    malicious: bool = False
    "whether the client plays a malicious client in the experiment's attack"
    place: Round = 0
    "place of the client among the malicious ones in the order of their names"
    iterations: Round = 0
    "largest number of iterations per solve, by the experiment's device classes; 0: as the model says"
    accepted: Round = 0
    "number of the order that ended the last round in which the server accepted this client's updates; 0: none yet"
    within: Round = 0
    "number of the last order of this round whose update the server accepted, if a round has several exchanges"
    train: Round = 0
    "round to train for; 0: none"
    evaluate: Round = 0
    "round whose models are scored; 0: none"
    finish: bool = False
    "whether training is over, so that the client writes its model to a file"
    shared: Word = ""
    "name of the tensor that is the global model, if there is one"


class Answer(Settings):
    """What a client answers to an order."""

    protocol: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    number: Round
    "number of the order"
    client: Word
    status: Status = "done"
    unseen: bool = False
    "whether the client does not train, but only adapts the result"
    layout: Word = ""
    "fingerprint of the layout of its model's parameters"
    size: Counter = 0
    "number of training samples, if the algorithm needs it or weighs clients by it"
    trained: Round = 0
    "round that it trained for; 0: none"
    samples: Counter = 0
    "number of samples through a backward pass"
    solves: Counter = 0
    "number of solves of the model's equilibrium layers in training, one per sample"
    iterations: Counter = 0
    "number of iterations of these solves together"
    unconverged: Counter = 0
    "number of these solves that did not converge"
    gradient_solves: Counter = 0
    "number of solves for the gradients of these layers"
    gradient_iterations: Counter = 0
    "number of iterations of the gradients' solves together"
    gradients_unconverged: Counter = 0
    "number of the gradients' solves that did not converge"
    measured: Counter | None = None
    "number of samples at whose fixed point a spectral radius was measured; left out if none was"
    radius: Annotated[float, Field(ge=0, le=1e30)] | None = None
    "sum of these spectral radii"
    evaluated: Round = 0
    "round whose models were scored; 0: none"
    adapted: Counter = 0
    "number of samples through a backward pass to make the models that were scored"
    counts: bool | None = None
    "false if the client's owner does not let numbers of samples and solves be sent; otherwise left out"


def solver_facts(solves: Solves) -> dict[str, int | float]:
    """Return the counts of equilibrium solves for an answer."""
    forward, backward = solves.forward, solves.backward
    radii = {"measured": forward.measured, "radius": min(forward.radius, 1e30)} if forward.measured else {}
    return {
        "solves": forward.solves,
        "iterations": forward.iterations,
        "unconverged": forward.unconverged,
        "gradient_solves": backward.solves,
        "gradient_iterations": backward.iterations,
        "gradients_unconverged": backward.unconverged,
        **radii,
    }


def reported_solves(answer: Answer) -> Solves:
    """Return the counts of equilibrium solves in an answer."""
    return Solves(
        SolveStats(
            answer.solves,
            answer.iterations,
            answer.unconverged,
            measured=answer.measured or 0,
            radius=answer.radius or 0.0,
        ),
        SolveStats(answer.gradient_solves, answer.gradient_iterations, answer.gradients_unconverged),
    )


def order_shapes(schema: MessageSchema, start: Start, buffers: int) -> Shapes:
    """Return the names, shapes and types of all tensors that an order may contain."""
    vector = ((start.space.size,), start.w0.dtype)
    return {
        **named(schema.down, "down"),
        "global": vector,
        "start.w0": vector,
        **({"start.buffers": ((buffers,), start.w0.dtype)} if buffers else {}),
    }


def forecast_kinds(kinds: Collection[str]) -> list[str]:
    """Return those of these kinds of models whose forecasts are scored, which are those of a simulation."""
    return [kind for kind in ("personal", "global") if kind in kinds]


def answer_shapes(
    schema: MessageSchema,
    metrics: MetricCollection,
    kinds: Sequence[str] = SCORED,
    success: bool = False,
    horizon: int = 0,
) -> Shapes:
    """Return the tensors that an answer may contain: the algorithm's upload and diagnostics, and scores of models.

    Args:
        schema: the shapes of the algorithm's messages.
        metrics: the metrics of the scores; for those of every class, a client sends its confusion matrices.
        kinds: the kinds of models.
        success: whether the success of an attack is counted on clients' test samples.
        horizon: number of values that a sample forecasts; 0: samples are no windows of time series.
    """
    forecast = (2 * horizon + 9,), torch.float64  # sums, and two figures of intervals
    scores = {kind: ((len(score_columns(metrics)),), torch.float64) for kind in kinds}
    matrix = ((metrics.outputs, metrics.outputs), torch.int64)
    return {
        **named(schema.up, "up"),
        **named(dict.fromkeys(schema.diagnostics, ((1,), torch.float64)), DIAGNOSTICS),
        **named({"sizes": ((3,), torch.int64), **scores}, "scores"),
        **named(dict.fromkeys(kinds, matrix) if metrics.arrays else {}, "confusion"),
        **named(dict.fromkeys(kinds, ((len(COUNTS),), torch.int64)) if success else {}, SUCCESS_COUNTS),
        **named(dict.fromkeys((*forecast_kinds(kinds), *NAIVE), forecast) if horizon else {}, FORECASTS),
    }


S = TypeVar("S", bound=Settings)


def content(facts: Settings, tensors: dict[str, Tensor] | None = None) -> RecordDict:
    """Return facts and tensors as the content of a Flower message."""
    return RecordDict({_RECORD: ConfigRecord({_FIELD: pack(tensors or {}, facts.table())})})


def size(message: Message) -> int:
    """Return the number of bytes of a message's content; 0 if it has none."""
    blob = _blob(message)
    return len(blob) if isinstance(blob, bytes) else 0


def _blob(message: Message) -> Any:
    if not message.has_content():
        return None
    records = message.content
    record = records.get(_RECORD)
    alone = isinstance(record, ConfigRecord) and len(records) == 1 and list(record) == [_FIELD]
    return record[_FIELD] if alone and isinstance(record, ConfigRecord) else None


def open_message(message: Message, cls: type[S], allowed: Shapes) -> tuple[S, State]:
    """Return the facts and tensors of a message, or raise RejectedMessage.

    Args:
        message: the message.
        cls: what its facts are: Order or Answer.
        allowed: names, shapes and types of the tensors that it may contain.
    """
    blob = _blob(message)
    if not isinstance(blob, bytes):
        raise RejectedMessage("malformed", "its content is not one record of bytes")
    tensors, facts = unpack(blob, allowed)
    for key in facts.keys() - cls.model_fields.keys():
        raise RejectedMessage("malformed", f"it contains {ascii(key)[:80]}, which is not expected")
    try:
        return read(cls, facts, "message"), tensors
    except EquipoiseError as error:
        raise RejectedMessage("malformed", str(error)[:200]) from None

"""What server and clients say to each other beside tensors, and how it becomes a message of Flower's."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.local_data import Start
from equipoise.algorithms.schema import MessageSchema, Shapes
from equipoise.equilibrium import Solves, SolveStats
from equipoise.errors import EquipoiseError
from equipoise.flower.codec import RejectedMessage, named, pack, unpack
from equipoise.model_kinds import COLUMNS, SCORED
from equipoise.settings import Settings, read
from equipoise.state import State

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""No line breaks and no control characters: names stand in logs."""
_RECORD, _FIELD = "equipoise", "message"

Round = Annotated[int, Field(ge=0, le=2**53)]
Counter = Annotated[int, Field(ge=0, le=10**12)]
Word = Annotated[str, Field(max_length=256, pattern=PRINTABLE)]
NOBODY = "0" * 32
"""The run that an answer names which could not read its order."""
Status = Literal["done", "hello", "stale", "out-of-step", "not-finite", "no-data", "failed"]
STATUSES = get_args(Status)


class Order(Settings):
    """What the server asks of a client."""

    protocol: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    "stands for this run, whoever serves it after a restart"
    hello: bool = False
    "only tell who you are"
    number: Round = 0
    "grows with every order of this run, also over attempts at a round and restarts of the server"
    exchange: Round = 0
    "the round that it belongs to, for readers"
    client: Word = ""
    "the name under which the server knows it"
    clients: Round = 0
    "how many clients there are"
    samples: Round = 0
    "how many training samples they have together, where the algorithm asks for it"
    malicious: bool = False
    "play the part of a malicious client in the experiment's own attack"
    iterations: Round = 0
    "most iterations of a solve, by the experiment's classes of devices; 0: as the model says"
    accepted: Round = 0
    "the number of the order to this client that ended the last round in which the server took its updates; 0: none yet"
    within: Round = 0
    "the number of the last order of this round whose update the server took, where a round is several exchanges"
    train: Round = 0
    "the round to train for; 0: none"
    evaluate: Round = 0
    "the round whose models are to be scored; 0: none"
    finish: bool = False
    "training is over: keep your model"
    shared: Word = ""
    "the tensor that is the global model, if there is one"


class Answer(Settings):
    """What a client says in reply."""

    protocol: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    number: Round
    "of the order that this answers"
    client: Word
    status: Status = "done"
    unseen: bool = False
    "it takes no part in training, and adapts the result"
    layout: Word = ""
    "stands for the layout of its model's parameters"
    size: Counter = 0
    "how many training samples it has, where the algorithm asks for it"
    trained: Round = 0
    samples: Counter = 0
    "samples through a backward pass"
    solves: Counter = 0
    "of the model's equilibrium layers in training, one a sample"
    iterations: Counter = 0
    "of all those solves"
    unconverged: Counter = 0
    "of those solves"
    gradient_solves: Counter = 0
    "for the gradients of those layers"
    gradient_iterations: Counter = 0
    gradients_unconverged: Counter = 0
    evaluated: Round = 0
    adapted: Counter = 0
    "samples through a backward pass to make the model that was scored"


def solver_facts(solves: Solves) -> dict[str, int]:
    """For an answer."""
    there, back = solves.forward, solves.backward
    return {
        **{"solves": there.solves, "iterations": there.iterations, "unconverged": there.unconverged},
        **{"gradient_solves": back.solves, "gradient_iterations": back.iterations},
        "gradients_unconverged": back.unconverged,
    }


def reported_solves(answer: Answer) -> Solves:
    """What an answer says of them."""
    return Solves(
        SolveStats(answer.solves, answer.iterations, answer.unconverged),
        SolveStats(answer.gradient_solves, answer.gradient_iterations, answer.gradients_unconverged),
    )


def order_shapes(schema: MessageSchema, start: Start, buffers: int) -> Shapes:
    """All that an order may carry."""
    vector = ((start.space.size,), start.w0.dtype)
    return {
        **named(schema.down, "down"),
        "global": vector,
        "start.w0": vector,
        **({"start.buffers": ((buffers,), start.w0.dtype)} if buffers else {}),
    }


def answer_shapes(schema: MessageSchema, kinds: Sequence[str] = SCORED) -> Shapes:
    """All that an answer may carry: the algorithm's message, and scores of these kinds of models."""
    scores = {kind: ((len(COLUMNS),), torch.float64) for kind in kinds}
    return {**named(schema.up, "up"), **named({"sizes": ((3,), torch.int64), **scores}, "scores")}


S = TypeVar("S", bound=Settings)


def content(facts: Settings, tensors: dict[str, Tensor] | None = None) -> RecordDict:
    return RecordDict({_RECORD: ConfigRecord({_FIELD: pack(tensors or {}, facts.table())})})


def size(message: Message) -> int:
    """Bytes of a message's content; 0 where it has none."""
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
    """The facts and tensors of a message, or Refused."""
    blob = _blob(message)
    if not isinstance(blob, bytes):
        raise RejectedMessage("malformed", "it is not one record of bytes")
    tensors, facts = unpack(blob, allowed)
    for key in facts.keys() - cls.model_fields.keys():
        raise RejectedMessage("malformed", f"it says {ascii(key)[:80]}, which nobody asked for")
    try:
        return read(cls, facts, "message"), tensors
    except EquipoiseError as error:
        raise RejectedMessage("malformed", str(error)[:200]) from None

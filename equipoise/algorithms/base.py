"""What a federated algorithm is: a few small pure functions on vectors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.losses import Metric
from equipoise.parameter_space import ParameterSpace, Part, linear_head
from equipoise.representations.head_moments import Moments
from equipoise.representations.points import HEAD, RepresentationPoint
from equipoise.representations.terms import LossTerm
from equipoise.settings import Count, Fraction, Positive, Settings
from equipoise.state import State, Upload, Uploads

Reduce = Callable[[Uploads], State]
DataSplit = Literal["train", "validation"]
PointLookup = Callable[[str], RepresentationPoint]


def _no_points(name: str) -> RepresentationPoint:
    raise EquipoiseError("nothing is known of the model but its parameters, so that no representation can be read")


@dataclass(frozen=True)
class Start:
    """What is known before the first round."""

    space: ParameterSpace
    w0: Tensor
    "the common initial model"
    clients: int
    "how many there are, taking part or not; the server knows them by the numbers below this, and newcomers by others"
    samples: int = 0
    "how many training samples all of them have together"
    seed: int = 0
    "of the run, for what is drawn once and is the same for all"
    outputs: int = 0
    "of the model: numbers that it answers, or classes"
    tap: PointLookup = _no_points
    "where representations are read, by the name of a submodule, or HEAD"


class LocalData(Protocol):
    """A client's data as an algorithm sees it: things to do with it, never the data themselves.

    The same lines run for one client, with vectors of shape (P,), and for a stack of clients, (cohort, P).
    """

    space: ParameterSpace
    seed: int
    "of the run"

    @property
    def outputs(self) -> int:
        """Of the model: numbers that it answers, or classes."""

    def tap(self, name: str) -> RepresentationPoint:
        """A place where representations are read, as in `Start`."""

    @property
    def size(self) -> Tensor:
        """The number of training samples, of shape (1,), or (cohort, 1)."""

    @property
    def iterations(self) -> Tensor:
        """Most iterations of an equilibrium layer's solve that the client affords, of the shape of `size`.

        1 where the model has no such layer.
        """

    def descend(
        self,
        start: Tensor,
        *,
        part: Part = "all",
        pull: Callable[[Tensor], Tensor] | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        stream: int = 0,
        repeat: int = 1,
        only: Tensor | None = None,
        within: Tensor | None = None,
        term: LossTerm | None = None,
        anchor: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Train from `start` and return where it ends; `start` is left alone.

        `part` says which slice of the vector moves, and `within`, a mask of the vector's shape, which coordinates of
        it. `pull` is added to the gradient (a proximal or a dual term), `term` to the loss. With an `anchor`, a vector
        and the gradient there of the mean of the term over all samples, the term's gradient on a batch is corrected by
        what it is amiss there: it keeps its expectation and loses variance as the vector comes near the anchor.
        What is not given comes from the algorithm's own settings. Calls with the same `stream` in a round
        see the same batches in the same order. With `repeat`, that many steps are taken on each batch. With `only`,
        of the shape of `size`, the others stay where they are.
        """

    def slope(self, v: Tensor, *, only: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss over all training samples at v; zero for others than `only`."""

    def slope_of(self, term: LossTerm, v: Tensor, *, steps: int | None = None, stream: int = 0) -> Tensor:
        """The gradient at v of the mean of `term` alone: over all training samples, or over this many batches."""

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        """For each class, the sum over its training samples of what `of` makes of v's representations, rows of them.

        Of shape (outputs, columns), or (cohort, outputs, columns).
        """

    def moments(self, v: Tensor, *, groups: int = 1, of: DataSplit = "train") -> Moments:
        """Of what v's head reads, its body being as it is: all that fitting a linear head by least squares needs."""


@dataclass(frozen=True)
class ClientSamples:
    """What a client may look into when it predicts: its own samples, as pairs (x, y)."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    head: str
    "the name of the submodule that is the model's head"
    metric: Metric


class Algorithm(Settings, ABC):
    """Hyper-parameters are the fields; there is no state, no data, no model and no logger in here."""

    keeps_head: ClassVar[bool] = False
    """Does the method need to know where the model's head begins?"""

    fits_head: ClassVar[bool] = False
    """Does it fit the head by least squares, so that it must be one linear layer?"""

    needs_labels: ClassVar[bool] = False
    """Does it look at samples class by class, so that each must have one label?"""

    lr: Positive = 0.01
    "learning rate of local training"
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 1
    "passes over the client's training data in a round"
    steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    "steps of local training in a round, in place of epochs"
    batch: Count = 50
    "samples in a step; the last batch of an epoch may be smaller"
    optimizer: Literal["sgd", "adam"] = "sgd"
    "rule of the local steps; its memory is new in every round"
    momentum: Fraction = 0.0
    "momentum of sgd"
    clip: Positive | None = None
    "largest norm of a step's gradient, pull included"
    adapt_epochs: Count = 5
    "passes over the training data of a client that took no part in training, to adapt the result to it"

    def training(self) -> dict[str, Any]:
        """All that training depends on: who else says the same trains the same, and differs in what it makes of it."""
        trainer = type(self)
        while _only_scores(trainer):
            trainer = trainer.__bases__[0]
        fields = trainer.model_fields.keys() - {"adapt_epochs"}
        return {"by": trainer.__name__, **{name: value for name, value in self.table().items() if name in fields}}

    @property
    def counts_samples(self) -> bool:
        """Must clients know how many training samples all of them have together?"""
        return False

    @property
    def needs_validation(self) -> bool:
        """Does it learn from the clients' validation samples?"""
        return False

    @property
    def exchanges(self) -> int:
        """How often server and clients write to each other in a round; those who take part stay the same."""
        return 1

    @abstractmethod
    def local(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        """A client's work in an exchange: its new state, and what it sends."""

    def server(self, start: Start) -> State:
        """The server's state before the first round."""
        return State()

    def client(self, start: Start) -> State:
        """A client's state before it first takes part."""
        return State()

    def first(self, start: Start) -> State | None:
        """What every client counts as having sent before it first takes part, if the server uses the last message of
        all clients in every round; None where it uses those of the round alone."""
        return None

    def down(self, server: State, who: int) -> State:
        """What the server sends to client `who`."""
        return server

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        """The server's next state; `reduce` makes one message of many (a mean, or a robust rule)."""
        return server

    def personal(self, client: State, down: State, data: LocalData) -> Tensor | None:
        """The model that the client predicts with, or None where the method has no personal models."""
        return None

    def consensus(self, client: State, down: State, data: LocalData) -> Tensor | None:
        """The personal model with what all agree on in the place of the client's own copy of it.

        None where clients keep no such copy.
        """
        return None

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor | None:
        """The model of a client that took no part in training, from its initial state and what the server would send.

        None where the method has nothing to offer it but the global model.
        """
        return None

    def trained(self, client: State, message: State) -> Tensor | None:
        """The whole model that a client has trained, before it is averaged, from its new state and what it sends.

        For methods without personal models; None where there is none.
        """
        return message.get("w")

    def shared(self, server: State) -> Tensor | None:
        """The global model, or None where the method has none."""
        return None

    def shows(self, client: State, down: State, space: ParameterSpace) -> State:
        """What of a client's state readers may want to see: how much of it takes part, say. Mostly nothing."""
        return State()

    def predictor(self, module: nn.Module, own: ClientSamples) -> nn.Module:
        """What a client predicts with: its personal model, or one that looks into the client's samples as well."""
        return module

    @property
    def looks_up(self) -> bool:
        """Does it predict with more than a vector of parameters?"""
        return type(self).predictor is not Algorithm.predictor

    @property
    def has_consensus(self) -> bool:
        return type(self).consensus is not Algorithm.consensus

    @property
    def has_shows(self) -> bool:
        return type(self).shows is not Algorithm.shows


def _only_scores(cls: type[Algorithm]) -> bool:
    """Does it differ from what it is made of only in what it makes of the training?"""
    kinds = (FunctionType, property, classmethod, staticmethod)
    written = {k for k, v in vars(cls).items() if isinstance(v, kinds) and not k.startswith("__")}
    parent = cls.__bases__[0]
    concrete = issubclass(parent, Algorithm) and not getattr(parent, "__abstractmethods__", None)
    return (
        concrete and len(cls.__bases__) == 1 and written <= {"personal", "consensus", "adapt", "predictor", "trained"}
    )


class ShapeProbe:
    """Data that trains nothing: with it an algorithm's functions show the shapes of what they send."""

    def __init__(self, start: Start):
        self.space, self.seed, self.dtype = start.space, start.seed, start.w0.dtype
        self.outputs, self.start = start.outputs, start
        self.size = self.iterations = torch.ones(1, dtype=start.w0.dtype)

    def descend(self, start: Tensor, **_: object) -> Tensor:
        return start.clone()

    def slope(self, v: Tensor, **_: object) -> Tensor:
        return torch.zeros_like(v)

    def tap(self, name: str) -> RepresentationPoint:
        return self.start.tap(name)

    def slope_of(self, term: LossTerm, v: Tensor, **_: object) -> Tensor:
        return torch.zeros_like(v)

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        columns = of(torch.ones(1, self.tap(at).width, dtype=self.dtype)).shape[1]
        return torch.zeros(self.outputs, columns, dtype=self.dtype)

    def moments(self, v: Tensor, *, groups: int = 1, of: DataSplit = "train") -> Moments:
        inputs, outputs = linear_head(self.space)[:2]
        x = torch.eye(inputs, dtype=self.dtype).expand(groups, -1, -1)
        one = torch.ones(groups, 1, 1, dtype=self.dtype)
        return Moments(x, torch.zeros(groups, inputs, outputs, dtype=self.dtype), one)


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class MessageSchema:
    """The shapes of all that will ever be kept or sent, known before the run."""

    server: Shapes
    client: Shapes
    down: Shapes
    up: Shapes
    parameters_shared: int
    parameters_personal: int


def infer_schema(algorithm: Algorithm, start: Start, weighted: bool = True) -> MessageSchema:
    """Not `weighted`: clients' weights stay with them."""
    server, client = algorithm.server(start), algorithm.client(start)
    down = algorithm.down(server, 0)
    after, upload = algorithm.local(client, down, ShapeProbe(start))
    if after.shapes() != client.shapes():
        raise TypeError(f"{type(algorithm).__name__}.local changes the shape of the client's state")
    up = upload.wire if weighted else upload.message
    return MessageSchema(
        server.shapes(), client.shapes(), down.shapes(), up.shapes(), upload.message.numel, client.numel
    )

"""The contract of a federated algorithm: eight hooks, most of which are one or two lines."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.optimizers.schedules import RateSchedule, ScheduleSetting
from equipoise.settings import Count, Fraction, NonNegative, Positive, Settings
from equipoise.state import State, Upload, Uploads

Reduce = Callable[[Uploads], State]
"""Combines many messages into one: a mean, or a robust rule."""


@dataclass(frozen=True)
class Requirements:
    """What an algorithm needs of the model and of the data."""

    head: bool = False
    "the model's head must be known"
    head_module: bool = False
    "the head must be one submodule, because its inputs are used as features"
    linear_head: bool = False
    "the head must be one linear layer, because it is fitted by itself, to what the body makes"
    labels: bool = False
    "every sample must have one label"
    validation: bool = False
    "some clients must have validation samples, because the algorithm learns from them"
    total_samples: bool = False
    "clients must know the number of training samples of all clients together"


class Algorithm(Settings, ABC):
    """Hyper-parameters as fields, and the steps of the algorithm as pure functions of states.

    An algorithm has no state, data, model or logger of its own. The server's state, a client's state and the messages
    in both directions are `State`s: dictionaries of tensors. Write the hooks as if there were one client: tensors have
    shape (P,), or (cohort, P) when a stack of clients is trained at once. What few algorithms need is in
    `capabilities.py`.
    """

    trains_as: ClassVar["type[Algorithm] | None"] = None
    """The algorithm that trains identically, where this class changes only what is made of the training. A sweep then
    trains once for both. Not inherited: every such class declares it."""

    lr: Positive = 0.01
    "learning rate of local training"
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 1
    "passes over the client's training data in a round"
    steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    "steps of local training in a round, in place of epochs"
    batch: Count = 50
    "samples in a step; the last batch of an epoch may be smaller"
    drop_last: bool = False
    "whether the last batch of an epoch is dropped if it is not full; one that the model cannot train on always is"
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    "update rule of the local steps; its memory is reset in every round"
    momentum: Fraction = 0.0
    "momentum of sgd"
    nesterov: bool = False
    "whether the momentum of sgd is Nesterov's"
    weight_decay: NonNegative = 0.0
    "pull of the parameters towards zero in local training, as in torch.optim: L2 for sgd and adam, decoupled for adamw"
    schedule: ScheduleSetting = RateSchedule()
    "how the rates of local training change over rounds; models adapted or fine-tuned for evaluation use the full rates"
    clip: Positive | None = None
    "largest norm of a step's gradient, with proximal and dual terms and before weight decay"
    buffers: Literal["average", "local"] | None = None
    "BatchNorm statistics: averaged like parameters, or kept by each client; by default averaged with a global model"
    adapt_epochs: Count = 5
    "passes over the training data of a client that took no part in training, to adapt the result to it"

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> "Algorithm":
        if self.momentum and self.optimizer != "sgd":
            raise EquipoiseError(
                f"algorithm.momentum = {self.momentum} has no effect with algorithm.optimizer = {self.optimizer!r}; "
                "leave it out"
            )
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise EquipoiseError(
                "algorithm.nesterov = true needs algorithm.optimizer = 'sgd' and algorithm.momentum > 0"
            )
        return self

    @property
    def requires(self) -> Requirements:
        """Return what the algorithm needs of the model and of the data."""
        return Requirements()

    def init_server(self, start: Start) -> State:
        """Return the server's state before the first round."""
        return State()

    def init_client(self, start: Start) -> State:
        """Return a client's state before it first takes part."""
        return State()

    def broadcast(self, server: State, client: int) -> State:
        """Return the message that the server sends to the client with this number."""
        return server

    @abstractmethod
    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        """Do a client's work of a round.

        Args:
            client: the client's state.
            down: the message from the server.
            data: the client's data, as operations.

        Returns:
            The client's next state, and what it uploads.
        """

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        """Return the server's next state from the uploads of a round, which `reduce` combines into one message."""
        return server

    def origin(self, server: State) -> State | None:
        """Return the message of a client that learned nothing in this round, as the server knows it beforehand.

        Rules on differences (clipping, cosines) and attacks that scale an update measure from it. By default it is
        the server's state: of its fields, those that a message has as well, by name and shape, count. None means that
        there is no such message, as for statistics of the client's samples; rules on differences are then refused.
        """
        return server

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor | None:
        """Return the model that the client predicts with, or None if the algorithm has no personal models."""
        return None

    def global_model(self, server: State) -> Tensor | None:
        """Return the model that all clients share, or None if there is none."""
        return None

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor | None:
        """Return the model of a client that took no part in training, made from its initial state and a broadcast.

        None means that it can only use the global model.
        """
        return None

    def training_settings(self) -> dict[str, Any]:
        """Return the settings that determine training; algorithms with equal ones share one training in a sweep."""
        trainer = type(self)
        while (other := vars(trainer).get("trains_as")) is not None:
            trainer = other
        fields = trainer.model_fields.keys() - {"adapt_epochs"}
        by = f"{trainer.__module__}.{trainer.__qualname__}"  # own code may have classes of the same name
        return {"by": by, **{name: value for name, value in self.table().items() if name in fields}}


def origin_of(algorithm: Algorithm, server: State, like: State) -> State | None:
    """Return the part of an algorithm's origin that messages have; None if there is none.

    Args:
        algorithm: the algorithm.
        server: the server's state before the round.
        like: a message; fields that are not in the origin (a loss, a count) are left out.
    """
    found = algorithm.origin(server)
    if found is None:
        return None
    known = State({k: found[k] for k, t in like.items() if k in found and found[k].shape == t.shape})
    return known if known or not like else None

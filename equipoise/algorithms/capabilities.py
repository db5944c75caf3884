"""What only some algorithms can do. Each capability is a small class, so that `isinstance` tells who has it."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from equipoise.algorithms.local_data import ClientSamples, LocalData, Start
from equipoise.parameter_space import ParameterSpace
from equipoise.state import State
from equipoise.torch_device import widened


class UsesLastUploads(ABC):
    """The server combines the last uploads of all clients in every round, as ADMM does.

    `aggregate` then gets `LastUploads`, which contains every client.
    """

    @abstractmethod
    def initial_upload(self, start: Start) -> State | None:
        """Return the upload assumed for clients that have not taken part yet.

        None means that, with these settings, only the uploads of the round are combined.
        """


class SeveralExchanges(ABC):
    """A round consists of several exchanges of messages with the same clients.

    Which exchange it is must be part of the server's state and of what it broadcasts.
    """

    @property
    @abstractmethod
    def exchanges(self) -> int:
        """Return the number of exchanges in a round."""


class ReducesGroups:
    """The server reduces groups of clients, or groups of fields, one after the other in a round.

    A reducer that remembers the round before has then no one result to remember.
    """


class HasConsensusModel(ABC):
    """Clients keep a copy of what is shared; the consensus model uses the shared values instead of the copy."""

    @abstractmethod
    def consensus_model(self, client: State, down: State, data: LocalData) -> Tensor:
        """Return the personal model with the consensus in place of the client's copy."""


class TrainsOtherModel(ABC):
    """The model that a client has trained is not the field `w` of its upload."""

    @abstractmethod
    def trained_model(self, client: State, message: State) -> Tensor:
        """Return the whole model that a client has trained, from its next state and its upload."""


class PredictsFromSamples(ABC):
    """A client predicts with more than a vector of parameters: it also looks at its own samples."""

    @abstractmethod
    def predictor(self, module: nn.Module, samples: ClientSamples) -> nn.Module:
        """Return the module that predicts, made from the client's personal module and its samples."""


class ShowsState(ABC):
    """Part of a client's state is of interest to readers; it is written to shown.safetensors."""

    @abstractmethod
    def shown_state(self, client: State, down: State, space: ParameterSpace) -> State:
        """Return what readers may want to see of a client's state."""


class ReportsDiagnostics(ABC):
    """Clients report a few numbers about their update; the mean over the clients of a round is logged.

    Under privacy they are neither sent nor logged, because no noise covers them.
    """

    @abstractmethod
    def diagnostics(self, client: State, down: State) -> State:
        """Return numbers of shape (1,), or (cohort, 1), from a client's new state and the message that it got."""


def agreement(copy: Tensor, shared: Tensor, dual: Tensor | None = None) -> State:
    """Return the diagnostics of a consensus: how far copies are from what is shared, and how long their duals are.

    Args:
        copy: the client's copy.
        shared: what all clients should agree on.
        dual: the dual of their equality, if the method has one.
    """
    found = State(consensus_gap=_norm(widened(copy) - widened(shared)))
    return found if dual is None else State(found, dual_norm=_norm(widened(dual)))


def _norm(v: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return norm


def diagnostics_of(algorithm: object, client: State, down: State) -> State:
    """Return what a client reports about its update, if the algorithm has diagnostics."""
    return algorithm.diagnostics(client, down) if isinstance(algorithm, ReportsDiagnostics) else State()


def exchanges_of(algorithm: object) -> int:
    """Return how often the server and the clients exchange messages in a round."""
    return algorithm.exchanges if isinstance(algorithm, SeveralExchanges) else 1


def initial_upload_of(algorithm: object, start: Start) -> State | None:
    """Return the upload assumed for clients that have not taken part yet, if the server uses all last uploads."""
    return algorithm.initial_upload(start) if isinstance(algorithm, UsesLastUploads) else None


def trained_model_of(algorithm: object, client: State, message: State) -> Tensor | None:
    """Return the model that a client has trained before it is averaged, or None if its upload holds none."""
    return algorithm.trained_model(client, message) if isinstance(algorithm, TrainsOtherModel) else message.get("w")

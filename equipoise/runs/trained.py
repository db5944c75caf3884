"""A run after its training: the one interface by which `Result` sees a run in memory and a run on disk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.algorithms.local_data import Start
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.data.series_scale import SeriesScale, client_scale
from equipoise.engine.simulation import Simulation
from equipoise.evaluation.scoreboard import score_columns
from equipoise.executors.base import ClientModel, ModelKind
from equipoise.privacy.mechanisms import Privacy
from equipoise.quantiles import Pinball
from equipoise.state import State
from equipoise.storage.model_kinds import HYBRIDS
from equipoise.storage.run_folder import RunFolder, made_in_python, read_toml
from equipoise.torch_device import CPU
from equipoise.training.buffers import BUFFERS
from equipoise.training.task import Task


class Trained(ABC):
    """What is left of a run: models as vectors, scores, and what is needed to adapt to new clients."""

    names: tuple[str, ...]
    unseen: frozenset[str]
    method: str
    "name of the algorithm for readers"
    schedule: Schedule
    engine: Engine
    privacy: Privacy | None
    "the section [privacy]"
    score_columns: tuple[str, ...]
    "columns of the tables of scores"
    dtype: torch.dtype
    input_shape: tuple[int, ...]
    "shape of one sample"
    outputs: int
    "number of outputs per sample (or position) that the data ask for"
    buffer_names: tuple[str, ...]
    model: dict[str, Any] | None
    "name and settings of a model of the library; None for a module of the user's own"
    pinball: Pinball | None
    "the quantiles that models forecast, if they do"
    looks_up: bool
    "whether personal models use the clients' samples when they predict"

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Return the number of finished rounds."""

    @property
    @abstractmethod
    def server(self) -> State:
        """Return the server's state."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """Return the task: the module with its loss and metric."""

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """Return the algorithm with its settings."""

    @property
    @abstractmethod
    def start(self) -> Start:
        """Return what was known before the first round."""

    @property
    @abstractmethod
    def federation(self) -> Federation:
        """Return the data of all clients."""

    @abstractmethod
    def lines(self) -> list[dict[str, Any]]:
        """Return one dictionary per round."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return the figures of the whole run."""

    @abstractmethod
    def tables(self) -> dict[str, np.ndarray]:
        """Return the scores of each kind of model, one row per client."""

    @abstractmethod
    def personal(self, who: int) -> ClientModel | None:
        """Return the personal model of a client, if it has one."""

    @abstractmethod
    def global_vector(self) -> Tensor | None:
        """Return the parameters of the global model, if there is one."""

    @abstractmethod
    def global_buffers(self) -> Tensor | None:
        """Return the buffers of the global model, if they are averaged."""

    @abstractmethod
    def client_buffers(self, who: int) -> Tensor | None:
        """Return a client's own buffers, with which it uses the global model where buffers are not averaged."""

    @abstractmethod
    def scale(self, who: int) -> SeriesScale | None:
        """Return the scale of a client's time series, if its samples are of one."""

    @abstractmethod
    def hybrid_choices(self) -> np.ndarray:
        """Return what each client's hybrid model is: 1 the global one, 0 its personal one, -1 there is none."""

    @abstractmethod
    def best(self, who: int | None) -> nn.Module | None:
        """Return the best model by validation of a client, or of all (None), if one was kept."""

    @abstractmethod
    def to_module(self, vector: Tensor, buffers: Tensor | None, device: torch.device = CPU) -> nn.Module:
        """Return the module with these parameters and buffers, on a device."""

    @abstractmethod
    def predictor(self, module: nn.Module, who: int) -> nn.Module:
        """Return the module that a client predicts with, if its model looks up its own samples."""


def library_model(folder: RunFolder) -> dict[str, Any] | None:
    """Return the section [model] of a run; None if the user's own module was trained."""
    tables = read_toml(folder.config) if folder.config.exists() else {}
    return None if made_in_python(tables) else tables.get("model")


class SimulatedRun(Trained):
    """A run in memory."""

    def __init__(self, run: Simulation):
        self.run = run
        self.names, self.unseen = run.federation.names, run.federation.unseen
        self.method = type(run.algorithm).__name__
        self.schedule, self.engine = run.schedule, run.engine
        self.privacy = run.pipeline.settings.privacy
        self.score_columns = score_columns(run.task.metrics)
        self.input_shape, self.outputs = (
            tuple(run.task.sample[0].shape[1:]),
            run.federation.outputs * run.task.loss.outputs_per_number,
        )
        self.dtype, self.buffer_names = run.task.dtype, run.task.buffer_names
        self.model = None if run.folder is None else library_model(run.folder)
        self.looks_up = isinstance(run.algorithm, PredictsFromSamples)
        self.pinball = run.task.loss.pinball

    @property
    def rounds(self) -> int:
        return self.run.done

    @property
    def server(self) -> State:
        return self.run.server

    @property
    def task(self) -> Task:
        return self.run.task

    @property
    def algorithm(self) -> Algorithm:
        return self.run.algorithm

    @property
    def start(self) -> Start:
        return self.run.start

    @property
    def federation(self) -> Federation:
        return self.run.federation

    def lines(self) -> list[dict[str, Any]]:
        return self.run.lines

    def summary(self) -> dict[str, Any]:
        return self.run.summary()

    def tables(self) -> dict[str, np.ndarray]:
        return self.run.scores.tables()

    def personal(self, who: int) -> ClientModel | None:
        return next(self.personals([who], "unseen" if self.names[who] in self.unseen else "personal"))

    def personals(self, clients: list[int], kind: ModelKind) -> Iterator[ClientModel | None]:
        """Yield the models of clients that all trained ("personal"), or all did not ("unseen")."""
        return self.run.models_made_alone(clients, kind)

    def global_vector(self) -> Tensor | None:
        return self.run.algorithm.global_model(self.run.server)

    def global_buffers(self) -> Tensor | None:
        return self.run.global_buffers()

    def client_buffers(self, who: int) -> Tensor | None:
        return self.run.store.get(who).get(BUFFERS)

    def scale(self, who: int) -> SeriesScale | None:
        return client_scale(self.run.federation, who)

    def hybrid_choices(self) -> np.ndarray:
        choices = np.full(len(self.names), -1, dtype=np.int8)
        for evaluator in filter(None, (self.run.scores.training, self.run.scores.newcomers)):
            board = evaluator.board()
            if board.tables().keys() & set(HYBRIDS.values()):
                choices[evaluator.order] = board.takes_global()[evaluator.order]
        return choices

    def best(self, who: int | None) -> nn.Module | None:
        found = self.run.best.get(self.run.best.global_row if who is None else who)
        return None if found is None else self.to_module(found.vector, found.buffers)

    def to_module(self, vector: Tensor, buffers: Tensor | None, device: torch.device = CPU) -> nn.Module:
        return self.run.task.to_module(vector, buffers, device)

    def predictor(self, module: nn.Module, who: int) -> nn.Module:
        return self.run.executor.predictor(module, who)

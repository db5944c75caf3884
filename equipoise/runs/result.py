"""The result of a run, as its users see it."""

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from torch import Tensor, nn

from equipoise.data.config import DataSection
from equipoise.data.federation import SPLIT, Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.engine.unscaled import Unscaled
from equipoise.errors import EquipoiseError
from equipoise.evaluation.cka import Similarity
from equipoise.evaluation.conformal import LEVEL
from equipoise.executors.base import ClientModel
from equipoise.runs.adaptation import AdaptedClients
from equipoise.runs.forecasts import ClientForecasts, forecast_series, next_forecasts, window_forecasts
from equipoise.runs.headlines import headlines
from equipoise.runs.predictions import client_number, predict
from equipoise.runs.saved_models import write_models
from equipoise.runs.saved_run import SavedRun
from equipoise.runs.similarity import measure
from equipoise.runs.trained import SimulatedRun, Trained
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import WRITTEN, RunFolder, read_toml


class Result:
    """The outcome of a run: models as ordinary PyTorch modules, scores and metrics, in memory or loaded from a folder.

    `train` returns one, and `load_result` loads one. Clients are given by their number or name.
    """

    def __init__(self, run: Simulation | Trained, settings: Callable[[], Mapping[str, Any]] | None = None):
        """Create the result of a run.

        Args:
            run: the run.
            settings: returns all settings of the run as tables, for `save`; by default those of its folder.
        """
        self._trained = SimulatedRun(run) if isinstance(run, Simulation) else run
        self._settings = settings

    @property
    def simulation(self) -> Simulation:
        """Return the run itself, in its current state."""
        if not isinstance(self._trained, SimulatedRun):
            raise EquipoiseError("the result was loaded from its models, and the run itself is not in memory")
        return self._trained.run

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the names of all clients, in the order of their numbers."""
        return self._trained.names

    @property
    def federation(self) -> Federation:
        """Return the data of all clients."""
        return self._trained.federation.unpacked

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one dictionary per round, as in metrics.jsonl."""
        return copy.deepcopy(self._trained.lines())

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures of the whole run, as in summary.json."""
        return self._trained.summary()

    @property
    def looks_up(self) -> bool:
        """Tell whether personal models use the clients' training samples when they predict."""
        return self._trained.looks_up

    @property
    def outputs(self) -> int:
        """Return the number of outputs of a model for a sample, or for each position in it."""
        return self._trained.outputs

    def scores(self) -> dict[str, np.ndarray]:
        """Return, for each kind of model, one row of scores per client, with the columns `score_columns`."""
        return {kind: table.copy() for kind, table in self._trained.tables().items()}

    @property
    def score_columns(self) -> tuple[str, ...]:
        """Return the columns of `scores`: loss and first metric on validation and test samples, then other metrics."""
        return self._trained.score_columns

    def _number(self, client: int | str) -> int:
        return client_number(self._trained.names, client)

    def personal_vector(self, client: int | str) -> ClientModel:
        """Return the parameters and buffers of the personal model of a client."""
        model = self._trained.personal(self._number(client))
        if model is None:
            raise EquipoiseError(f"{self._trained.method} has no personal models; ask for the global one")
        return model

    def personal(self, client: int | str) -> nn.Module:
        """Return the personal model of a client."""
        return self._module(self.personal_vector(client))

    def _module(self, model: ClientModel) -> nn.Module:
        module = self._trained.to_module(model.vector, model.buffers)
        return self._trained.predictor(module, model.who) if model.looks_up else module

    def best(self, client: int | str | None = None) -> nn.Module:
        """Return the best model by validation that the callback `BestModel` kept.

        Args:
            client: number or name of a client, for its best personal model; None for the best global model.
        """
        who = None if client is None else self._number(client)
        if (module := self._trained.best(who)) is None:
            which = "global model" if client is None else f"personal model of {client!r}"
            raise EquipoiseError(f"no best {which} was kept; train with callbacks=[eq.BestModel()]")
        return self._trained.predictor(module, who) if who is not None and self.looks_up else module

    def global_vector(self) -> Tensor:
        """Return the parameters of the global model."""
        vector = self._trained.global_vector()
        if vector is None:
            raise EquipoiseError(f"{self._trained.method} has no global model; ask for a client's personal model")
        return vector

    def global_model(self, client: int | str | None = None) -> nn.Module:
        """Return the model that all clients share; if clients keep its buffers (BatchNorm), with those of `client`."""
        if (averaged := self._trained.global_buffers()) is not None:
            return self._trained.to_module(self.global_vector(), averaged)
        if client is None and self._trained.buffer_names:
            raise EquipoiseError(
                "the model's buffers stay with the clients; name a client to use its buffers: global_model(client)"
            )
        who = None if client is None else self._number(client)
        if who is not None and self._trained.buffer_names and self._trained.names[who] in self._trained.unseen:
            raise EquipoiseError(
                f"client {client!r} took no part in training and has no buffers (BatchNorm statistics) of its own; "
                "ask for its personal model"
            )
        buffers = None if who is None else self._trained.client_buffers(who)
        return self._trained.to_module(self.global_vector(), buffers)

    def hybrid(self, client: int | str) -> nn.Module:
        """Return the better of a client's personal model and the global one, as chosen by `select`."""
        choice = self._trained.hybrid_choices()[self._number(client)]
        if choice < 0:
            raise EquipoiseError(
                "there is no hybrid model without a personal model, a global one and validation samples"
            )
        return self.global_model(client) if choice else self.personal(client)

    def predict(self, client: int | str | None, x: Any, *, batch: int = 512) -> Any:
        """Return the outputs of a client's personal model, or of the global one if the method has no personal models.

        Args:
            client: the client; None for the global model.
            x: inputs, one row per sample: a tensor, or anything that numpy makes an array of.
            batch: number of samples per pass.

        Returns:
            A tensor for a tensor, else a numpy array.
        """
        trained = self._trained
        module = self.global_model() if client is None else self._predicting(self._number(client))
        return predict(module, x, trained.input_shape, trained.dtype, batch, trained.pinball)

    def unscaled(self, client: int | str) -> Unscaled:
        """Return the module that a client predicts with, with forecasts in the data's own unit."""
        who = self._number(client)
        if (scale := self._trained.scale(who)) is None:
            raise EquipoiseError(
                f"the samples of client {client!r} are not windows of one time series, so its model has no unit of its "
                "own; use personal(client) or global_model()"
            )
        return Unscaled(self._predicting(who), scale, self._trained.pinball).eval()

    def forecasts(self, client: int | str, level: float = LEVEL, *, shared: bool = False) -> ClientForecasts:
        """Return the forecasts for a client's test samples, in the data's own unit.

        Args:
            client: number or name of the client.
            level: probability of the intervals, which are made from the client's validation samples.
            shared: whether the global model forecasts, in place of the client's own.
        """
        who = self._number(client)
        federation = self._trained.federation
        forecast_series(federation)
        return window_forecasts(self._trained.task, self._predicting(who, shared), federation, who, level)

    def next_forecasts(
        self, client: int | str, data: DataSection, level: float = LEVEL, *, shared: bool = False
    ) -> ClientForecasts:
        """Return the forecasts of the values that follow the end of a client's series, in the data's own unit.

        Args:
            client: number or name of the client.
            data: the section [data] of the run, which makes inputs from the last known values.
            level: probability of the intervals.
            shared: whether the global model forecasts, in place of the client's own.
        """
        who = self._number(client)
        federation = self._trained.federation
        forecast_series(federation)
        return next_forecasts(self._trained.task, self._predicting(who, shared), federation, who, level, data)

    def _predicting(self, who: int, shared: bool = False) -> nn.Module:
        """Return a client's personal model, or the global one if that is asked for or there is no other."""
        model = None if shared else self._trained.personal(who)
        return self.global_model(who) if model is None else self._module(model)

    def adapt(
        self, clients: Sequence[Any] | Mapping[Any, Any] | Federation, *, split: Sequence[float] = SPLIT
    ) -> AdaptedClients:
        """Adapt the models to clients that come after training, as the method does for unseen clients.

        Args:
            clients: the new clients, as `train` takes them: a list, a dictionary by name, or a `Federation`.
            split: train, validation and test fractions of clients that come undivided.

        Returns:
            The adapted clients: models and scores by name.
        """
        if not isinstance(clients, Federation):
            clients = from_clients(clients, split=split, seed=self._trained.schedule.seed)
        return AdaptedClients(self._trained, clients)

    def similarity(
        self, samples: int = 1000, *, name: str | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Similarity:
        """Compare the clients' models with the global model layer by layer (CKA), as `equipoise cka` does.

        Args:
            samples: largest number of test samples on which models are compared.
            name: name of the run in the result; by default that of the algorithm.
            progress: is called with the numbers of finished pairs and of all pairs.
        """
        return measure(self._trained, name or self._trained.method, samples, progress or (lambda done, total: None))

    def save(self, folder: str | Path) -> None:
        """Save the result, so that `load_result` loads it: all models, scores, metrics and settings.

        Args:
            folder: a new folder. It is a run folder without checkpoint, so `compare` and `report` read it too.
        """
        if not isinstance(folder, (str, Path)):
            raise EquipoiseError(f"folder is of type {type(folder).__name__}; it must be the path of a new folder")
        target = RunFolder(Path(folder))
        if isinstance(self._trained, SavedRun):
            _check_new(target.path)
            shutil.copytree(self._trained.folder.path, target.path, dirs_exist_ok=True)
            return
        run = self.simulation
        if run.folder is not None and run.folder.path.resolve() == target.path.resolve():
            write_models(SimulatedRun(run), target.models)
            return
        _check_new(target.path)
        atomic_files.make_folder(target.path)
        settings = read_toml(run.folder.config) if run.folder is not None else self._described()
        target.text = tomli_w.dumps(settings)
        target.write_config()
        for line in run.lines:
            target.append(target.metrics, line)
        write_models(SimulatedRun(run), target.models)
        run.best.write(target.path, {name: who for who, name in enumerate(run.federation.names)})
        run.write_results(target)

    def _described(self) -> dict[str, Any]:
        if self._settings is None:
            raise EquipoiseError("the settings of this run are not known, so it cannot be saved")
        return {**self._settings(), WRITTEN: {"equipoise": version("equipoise"), "torch": version("torch")}}

    def __repr__(self) -> str:
        scores = ", ".join(f"{kind} {value}" for kind, value in headlines(self.summary)) or "not scored"
        return f"Result({self._outline}: {scores})"

    @property
    def _outline(self) -> str:
        counts = ((len(self.clients), "client"), (self._trained.rounds, "round"))
        return ", ".join([self._trained.method, *(f"{n} {what}{'s' * (n != 1)}" for n, what in counts)])

    def _repr_html_(self) -> str:
        rows = (f"<tr><td>{escape(kind)}</td><td>{escape(value)}</td></tr>" for kind, value in headlines(self.summary))
        return f"<table><caption>{escape(self._outline)}</caption>{''.join(rows)}</table>"


def _check_new(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise EquipoiseError(f"{path} is not an empty folder; choose another to save the result in")

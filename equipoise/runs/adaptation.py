"""Adaptation of a finished run to clients that come after training."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.data.federation import Federation
from equipoise.data.finite import check_finite
from equipoise.engine.compatibility import check_data
from equipoise.engine.described_modules import described_own_modules
from equipoise.engine.model_files import write_tensors_of_model
from equipoise.errors import EquipoiseError
from equipoise.evaluation.evaluator import Evaluator
from equipoise.executors.base import ClientModel, with_engine_state
from equipoise.executors.build import build_executor
from equipoise.runs.headlines import headlines
from equipoise.runs.predictions import client_number, predict
from equipoise.runs.trained import Trained
from equipoise.state import State
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import RunFolder
from equipoise.training.sample_privacy import SamplePrivacy

_SHOWN = 3  # names of clients in a repr


class _InitialState:
    """The states of clients that have not taken part."""

    def __init__(self, state: State):
        self.state = state

    def get(self, client: int) -> State:
        """Return the initial state."""
        return self.state


class AdaptedClients:
    """Clients that came after training: the model of each, adapted to its training samples, and its scores."""

    def __init__(self, trained: Trained, federation: Federation):
        """Adapt the models of a run to new clients, as `unseen` clients of the run would have adapted.

        Args:
            trained: the run.
            federation: the new clients.
        """
        check_finite(federation)
        task = trained.task
        self._check_shapes(trained, federation)
        federation = federation.prepared(task.dtype, task.channels_last)
        check_data(task, federation)
        self._trained, self.federation = trained, federation
        executor = build_executor(trained.engine, task, federation, trained.algorithm, trained.schedule)
        if trained.privacy is not None and trained.privacy.of_samples:
            executor.privacy = SamplePrivacy.of(trained.privacy, task, trained.algorithm, trained.start, {})
        who = federation.by_name[0]
        longest = int(federation.train.lengths.max())
        store = _InitialState(with_engine_state(trained.algorithm.init_client(trained.start), task, longest))
        evaluator = Evaluator(
            federation,
            trained.algorithm,
            executor,
            who,
            unseen=True,
            select=trained.schedule.select,
            first_number=trained.start.clients,
            keep=True,
        )
        try:
            evaluator(trained.rounds, trained.server, store)
            self._models: dict[int, ClientModel] = {model.who: model for model in evaluator.kept or ()}
            self._predictors: dict[int, nn.Module] = {}
            if isinstance(trained.algorithm, PredictsFromSamples):
                self._predictors = {each: executor.predictor(self._module(each), each) for each in self._models}
        finally:
            executor.close()
        board = evaluator.board()
        self._tables, self._figures = board.tables(), board.summary()

    @staticmethod
    def _check_shapes(trained: Trained, federation: Federation) -> None:
        for what, given, wanted in zip(("inputs", "targets"), federation.sample(), trained.task.sample, strict=True):
            if given.shape[1:] != wanted.shape[1:] or given.is_floating_point() != wanted.is_floating_point():
                kinds = [
                    f"{'numbers' if each.is_floating_point() else 'whole numbers'} of shape {list(each.shape[1:])}"
                    for each in (given, wanted)
                ]
                raise EquipoiseError(f"the new clients' {what} are {kinds[0]}, and the run was trained on {kinds[1]}")

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the names of the clients."""
        return self.federation.names

    @property
    def summary(self) -> dict[str, Any]:
        """Return figures over the clients for each kind of model: "personal" is the adapted one."""
        return {kind: dict(figures) for kind, figures in self._figures.items()}

    def scores(self) -> dict[str, np.ndarray]:
        """Return, for each kind of model, one row of scores per client; the columns are `Result.score_columns`."""
        return {kind: table.copy() for kind, table in self._tables.items()}

    def _module(self, who: int) -> nn.Module:
        model = self._models[who]
        return self._trained.to_module(model.vector, model.buffers)

    def personal(self, client: int | str) -> nn.Module:
        """Return the adapted model of a client (by number or name)."""
        who = client_number(self.clients, client)
        if who not in self._models:
            raise EquipoiseError(f"{self._trained.method} has no models of new clients; they use the global model")
        return self._predictors.get(who) or self._module(who)

    def predict(self, client: int | str, x: Any, *, batch: int = 512) -> Any:
        """Return the outputs of a client's adapted model, or of the global one if there is none.

        Args:
            client: number or name of the client.
            x: inputs, one row per sample: a tensor, or anything that numpy makes an array of.
            batch: number of samples per pass.

        Returns:
            A tensor for a tensor, else a numpy array.
        """
        if client_number(self.clients, client) in self._models:
            return self._predict(self.personal(client), x, batch)
        vector = self._trained.global_vector()
        buffers = self._trained.global_buffers()
        if vector is None or (self._trained.buffer_names and buffers is None):
            raise EquipoiseError(f"{self._trained.method} has no model for a new client")
        return self._predict(self._trained.to_module(vector, buffers), x, batch)

    def _predict(self, module: nn.Module, x: Any, batch: int) -> Any:
        trained = self._trained
        return predict(module, x, trained.input_shape, trained.dtype, batch, trained.pinball)

    def save(self, folder: str | Path) -> None:
        """Write a file NAME.safetensors with each client's adapted model, for `load_model`, and clients.csv."""
        if self._predictors:
            raise EquipoiseError(
                f"a personal model of {self._trained.method} is the global model together with the client's samples, "
                "so it cannot be saved as parameters"
            )
        path = Path(folder)
        if path.exists() and any(path.iterdir()):
            raise EquipoiseError(f"{path} is not empty; choose another folder")
        atomic_files.make_folder(path)
        shape = list(self.federation.sample()[0].shape[1:])
        for who, name in enumerate(self.clients):
            if who not in self._models:
                continue
            described = {
                "shape": shape,
                "outputs": self._trained.outputs,
                **({"model": self._trained.model} if self._trained.model else {}),
                **described_own_modules(self._trained.algorithm, self._trained.task.head),
                "trained": {"algorithm": self._trained.method, "data": self.federation.title, "of": name},
            }
            file = name if re.fullmatch(r"[\w-][\w .-]*", name) else f"client-{who}"
            tensors = {k: t.clone() for k, t in self._module(who).state_dict().items()}
            write_tensors_of_model(path / f"{file}.safetensors", tensors, described)
        sizes = {split: getattr(self.federation, split).lengths for split in ("train", "validation", "test")}
        RunFolder(path).write_clients(self.clients, {}, sizes, self._tables, self._trained.score_columns)

    def __repr__(self) -> str:
        scores = ", ".join(f"{kind} {value}" for kind, value in headlines(self._figures)) or "not scored"
        return f"AdaptedClients({', '.join(self.clients[:_SHOWN])}{', …' * (len(self.clients) > _SHOWN)}: {scores})"

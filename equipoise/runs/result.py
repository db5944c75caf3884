"""The result of a run, as its users see it."""

import copy
from typing import Any

import numpy as np
from torch import Tensor, nn

from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.data.federation import Federation
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors.base import BUFFERS, ClientModel, ModelKind
from equipoise.executors.build import build_executor
from equipoise.storage.model_kinds import HYBRIDS


class Result:
    """The outcome of a run: models as ordinary PyTorch modules, and the metrics."""

    def __init__(self, simulation: Simulation):
        self._run = simulation

    @property
    def simulation(self) -> Simulation:
        """Return the run itself, in its current state."""
        return self._run

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the names of all clients, in the order of their numbers."""
        return self._run.federation.names

    @property
    def federation(self) -> Federation:
        """Return the data of all clients."""
        return self._run.federation

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one dictionary per round, as in metrics.jsonl."""
        return copy.deepcopy(self._run.lines)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures of the whole run, as in summary.json."""
        return self._run.summary()

    @property
    def looks_up(self) -> bool:
        """Tell whether personal models use the clients' training samples when they predict."""
        return isinstance(self._run.algorithm, PredictsFromSamples)

    def scores(self) -> dict[str, np.ndarray]:
        """Return, for each kind of model, one row per client: validation loss and metric, test loss and metric."""
        return {kind: table.copy() for kind, table in self._run.scores.tables().items()}

    def _client_number(self, client: int | str) -> int:
        names = self._run.federation.names
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, int) and 0 <= client < len(names):
            return client
        raise EquipoiseError(
            f"there is no client {client!r}; clients are 0 to {len(names) - 1}, or by name, such as {names[0]!r}"
        )

    def _is_unseen(self, client: int | str) -> bool:
        return self._run.federation.names[self._client_number(client)] in self._run.federation.unseen

    def personal_vector(self, client: int | str) -> ClientModel:
        """Return the parameters and buffers of the personal model of a client (by number or name)."""
        run = self._run
        who = self._client_number(client)
        executor = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule.seed)
        try:
            kind: ModelKind = "unseen" if self._is_unseen(who) else "personal"
            model, _ = next(iter(executor.models(run.done, [run.job(who)], kind)))
        finally:
            executor.close()
        if model is None:
            raise EquipoiseError(f"{type(run.algorithm).__name__} has no personal models; ask for the global one")
        return model

    def personal(self, client: int | str) -> nn.Module:
        """Return the personal model of a client (by number or name)."""
        return self._run.module_of(self.personal_vector(client))

    def best(self, client: int | str | None = None) -> nn.Module:
        """Return the best model by validation that the callback `BestModel` kept.

        Args:
            client: number or name of a client, for its best personal model; None for the best global model.
        """
        best = self._run.best
        row = best.global_row if client is None else self._client_number(client)
        if (found := best.get(row)) is None:
            which = "global model" if client is None else f"personal model of {client!r}"
            raise EquipoiseError(f"no best {which} was kept; train with callbacks=[eq.BestModel()]")
        return self._run.module_of(ClientModel(row, found.vector, found.buffers, client is not None and self.looks_up))

    def global_vector(self) -> Tensor:
        """Return the parameters of the global model."""
        vector = self._run.algorithm.global_model(self._run.server)
        if vector is None:
            raise EquipoiseError(
                f"{type(self._run.algorithm).__name__} has no global model; ask for a client's personal model"
            )
        return vector

    def global_model(self, client: int | str | None = None) -> nn.Module:
        """Return the model that all clients share; if it has buffers (BatchNorm), with those of `client`."""
        if client is None and self._run.task.buffer_names:
            raise EquipoiseError(
                "the model's buffers stay with the clients; name a client to use its buffers: global_model(client)"
            )
        if client is not None and self._run.task.buffer_names and self._is_unseen(client):
            raise EquipoiseError(
                f"client {client!r} took no part in training and has no buffers (BatchNorm statistics) of its own; "
                "ask for its personal model"
            )
        buffers = None if client is None else self._run.store.get(self._client_number(client)).get(BUFFERS)
        return self._run.task.to_module(self.global_vector(), buffers)

    def hybrid(self, client: int | str) -> nn.Module:
        """Return the better of a client's personal model and the global one, as chosen by `select`."""
        board = self._run.scores.of(self._client_number(client)).board()
        if not board.tables().keys() & set(HYBRIDS.values()):
            raise EquipoiseError(
                "there is no hybrid model without a personal model, a global one and validation samples"
            )
        takes_global = board.takes_global()[self._client_number(client)]
        return self.global_model(client) if takes_global else self.personal(client)

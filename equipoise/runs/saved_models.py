"""The file models.safetensors: every client's model, the global model and what adapting to new clients needs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.errors import EquipoiseError, first_line
from equipoise.executors.base import ClientModel, ModelKind
from equipoise.losses import LOSSES
from equipoise.metrics import METRICS
from equipoise.metrics.quantile import fitted
from equipoise.parameter_space import ParameterEntry
from equipoise.runs.saved_facts import read_facts
from equipoise.runs.trained import SimulatedRun
from equipoise.state import State
from equipoise.storage.tensor_files import read_header, write_rows
from equipoise.training.task import Task

_FORMAT = "equipoise-models-1"
_MODULE, _SERVER, _SCORES = "module.", "server.", "scores."
_GLOBAL_BUFFERS = "global_buffers"
_LONGEST = 64 << 20  # bytes of the header, which names all clients
_PERSONAL, _PERSONAL_BUFFERS, _CLIENT_BUFFERS = "personal", "personal_buffers", "client_buffers"


def write_models(trained: SimulatedRun, path: Path) -> None:
    """Write all models of a run to a file, one client at a time."""
    task, start = trained.task, trained.start
    training, unseen = trained.federation.by_name
    groups: list[tuple[list[int], ModelKind]] = [(sorted(training), "personal"), (sorted(unseen), "unseen")]
    groups = [(who, kind) for who, kind in groups if who and trained.personal(who[0]) is not None]
    owners = [who for group, _ in groups for who in group]
    module = dict(task.module.named_parameters()) | dict(task.module.named_buffers())
    tensors = {_MODULE + name: tensor.detach() for name, tensor in module.items()}
    tensors |= {_SERVER + name: tensor for name, tensor in sorted(trained.server.items())}
    tensors |= {_SCORES + kind: torch.from_numpy(table) for kind, table in trained.tables().items()}
    tensors["owners"] = torch.tensor(owners, dtype=torch.int64)
    tensors["choices"] = torch.from_numpy(trained.hybrid_choices())
    if (shared := trained.global_vector()) is not None:
        tensors["global"] = shared
        if (averaged := trained.global_buffers()) is not None:
            tensors[_GLOBAL_BUFFERS] = averaged
    tables = {_PERSONAL: ((len(owners), task.space.size), task.dtype)} if owners else {}
    if kept := len(task.buffers):
        tables[_CLIENT_BUFFERS] = ((len(trained.names), kept), task.dtype)
        tables |= {_PERSONAL_BUFFERS: ((len(owners), kept), task.dtype)} if owners else {}

    def rows() -> Iterator[tuple[str, int, Tensor]]:
        for who in range(len(trained.names)) if kept else ():
            yield _CLIENT_BUFFERS, who, _present(trained.client_buffers(who))
        row = 0
        for clients, kind in groups:
            for model in trained.personals(clients, kind):
                assert model is not None
                yield _PERSONAL, row, model.vector
                if kept:
                    yield _PERSONAL_BUFFERS, row, _present(model.buffers)
                row += 1

    x, y = task.sample
    facts = {
        "clients": list(trained.names),
        "unseen": sorted(trained.unseen),
        "rounds": trained.rounds,
        "method": trained.method,
        "looks_up": trained.looks_up,
        "title": trained.federation.title,
        "columns": list(trained.score_columns),
        "parameters": [[entry.name, list(entry.shape)] for entry in task.space.entries],
        "body_size": task.space.body_size,
        "head": task.head,
        "buffers": list(task.buffer_names),
        "inputs": [list(x.shape[1:]), _format(x)],
        "targets": [list(y.shape[1:]), _format(y)],
        "outputs": trained.outputs,
        "dtype": _format(task.w0),
        "loss": _loss_name(task),
        "quantiles": None if task.loss.pinball is None else list(task.loss.pinball.quantiles),
        "metrics": [metric.name for metric in task.metrics.metrics] if _have_names(task) else None,
        "scales": _scales(trained),
        "training_clients": start.clients,
        "training_samples": start.samples,
        "origin": trained.run.fingerprint,
    }
    write_rows(path, tensors, tables, rows(), {"format": _FORMAT, "equipoise": json.dumps(facts)})


def _scales(trained: SimulatedRun) -> list[dict[str, Any] | None] | None:
    """Return the scale of each client's time series; None if there are none."""
    found = [trained.scale(who) for who in range(len(trained.names))]
    return [None if scale is None else scale.table() for scale in found] if any(found) else None


def _loss_name(task: Task) -> str | None:
    """Return the name of the loss, if it is none of the user's own."""
    if task.loss.pinball is not None:
        return "pinball"
    return next((name for name, loss in LOSSES.items() if loss is task.loss), None)


def _have_names(task: Task) -> bool:
    """Tell whether all metrics are known by name, and none is the user's own."""
    return all(
        metric.name in METRICS and metric == fitted(METRICS[metric.name], task.loss.pinball)
        for metric in task.metrics.metrics
    )


def _present(buffers: Tensor | None) -> Tensor:
    assert buffers is not None
    return buffers


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class SavedModels:
    """The models in a file, read one by one when they are asked for."""

    def __init__(self, path: Path):
        """Open a file that `write_models` wrote."""
        self.path = path
        header = read_header(path, "the models of a run", _LONGEST)
        if header.metadata.get("format") != _FORMAT:
            raise EquipoiseError(f"{path} was not written by Result.save or by train(out=...)")
        self.facts: dict[str, Any] = read_facts(path, header)
        "checked facts about the run"
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name not in (_PERSONAL, _PERSONAL_BUFFERS, _CLIENT_BUFFERS)]  # noqa: SIM118
                tensors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise EquipoiseError(f"{path} cannot be read: {first_line(error)}") from None
        self.names: tuple[str, ...] = tuple(self.facts["clients"])
        self.module = {k.removeprefix(_MODULE): t for k, t in header.tensors.items() if k.startswith(_MODULE)}
        "shapes and number formats of the parameters and buffers of the module"
        self.initial = _group(tensors, _MODULE)
        self.server = State(_group(tensors, _SERVER))
        self.tables = {kind: table.numpy() for kind, table in _group(tensors, _SCORES).items()}
        self.choices: np.ndarray = tensors["choices"].numpy()
        self.shared: Tensor | None = tensors.get("global")
        self.averaged: Tensor | None = tensors.get(_GLOBAL_BUFFERS)
        "the buffers of the global model, where they are averaged"
        self.rows = {who: row for row, who in enumerate(tensors["owners"].tolist())}
        if not all(0 <= who < len(self.names) for who in self.rows):
            raise EquipoiseError(f"{path} cannot be read: it has models of clients that are not among its clients")
        self.dtype: torch.dtype = getattr(torch, self.facts["dtype"])

    @property
    def entries(self) -> list[ParameterEntry]:
        """Return the place of each parameter in the vector."""
        entries, offset = [], 0
        for name, shape in self.facts["parameters"]:
            entries.append(ParameterEntry(name, torch.Size(shape), offset))
            offset = entries[-1].end
        return entries

    def personal(self, who: int) -> ClientModel | None:
        """Return the personal model of a client, if it has one."""
        if who not in self.rows:
            return None
        row = self.rows[who]
        buffers = self._row(_PERSONAL_BUFFERS, row) if self.facts["buffers"] else None
        return ClientModel(who, self._row(_PERSONAL, row), buffers, self.facts["looks_up"])

    def client_buffers(self, who: int) -> Tensor | None:
        """Return a client's own buffers, if the model has buffers."""
        return self._row(_CLIENT_BUFFERS, who) if self.facts["buffers"] else None

    def _row(self, table: str, row: int) -> Tensor:
        try:
            with safe_open(self.path, framework="pt") as file:
                found: Tensor = file.get_slice(table)[row]
                return found.clone()
        except (SafetensorError, OSError) as error:
            raise EquipoiseError(f"{self.path} cannot be read: {error}") from None

    def tensors(self, vector: Tensor, buffers: Tensor | None) -> dict[str, Tensor]:
        """Return all parameters and buffers of a model by name, for which the module itself is not needed."""
        found = dict(self.initial)
        found |= {entry.name: entry.view(vector).contiguous() for entry in self.entries}
        offset = 0
        for name in self.facts["buffers"] if buffers is not None else ():
            assert buffers is not None
            size = found[name].numel()
            found[name] = buffers[offset : offset + size].view(found[name].shape).to(found[name].dtype)
            offset += size
        return found


def _group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

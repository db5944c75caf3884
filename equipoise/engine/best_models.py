"""The best models of a run, which a callback chose: kept with the checkpoints, written to files at the end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.engine.client_store import ClientStore
from equipoise.errors import EquipoiseError, first_line
from equipoise.state import State
from equipoise.storage import atomic_files, tensor_files
from equipoise.torch_device import CPU
from equipoise.training.task import Task

FOLDER = "best"
"""Folder in the run folder with the files of the best models, and what the names of their segments begin with."""


@dataclass(frozen=True)
class BestModelOfRound:
    """A model that was the best one after some round."""

    vector: Tensor
    buffers: Tensor | None
    round: int


class BestModels:
    """One model per client, and one for all, stored like the states of clients."""

    def __init__(self, task: Task, clients: int, folder: Path | None, memory: int, part: tuple[int, int] = (0, 1)):
        """Create an empty store.

        Args:
            task: the task, whose models are kept.
            clients: number of clients; 0 if only the global model can be kept.
            folder: the folder of checkpoints; without it all models stay in memory.
            memory: memory limit in bytes, if there is a folder.
            part: number of this process and number of processes.
        """
        self.task, self.global_row = task, clients
        self.store = ClientStore(clients + 1, self._state(task.w0, None, 0), folder, memory, FOLDER, part)

    def _state(self, vector: Tensor, buffers: Tensor | None, round: int) -> State:
        own = {"buffers": self.task.buffers if buffers is None else buffers} if len(self.task.buffers) else {}
        return State(vector=vector, round=torch.tensor([round]), **own).to(CPU)

    def keep(self, row: int, vector: Tensor, buffers: Tensor | None, round: int) -> None:
        """Keep a model in place of the one before; `row` is a client's number, or `global_row`."""
        self.store.put(row, self._state(vector, buffers, round))

    def get(self, row: int) -> BestModelOfRound | None:
        """Return the best model of a client, or the global one; None if none was kept."""
        state = self.store.get(row)
        round = int(state["round"])
        return BestModelOfRound(state["vector"], state.get("buffers"), round) if round else None

    @staticmethod
    def read(folder: Path, client: str | None) -> dict[str, Tensor] | None:
        """Return the parameters and buffers of a best model that `write` wrote; None if there is none.

        Args:
            folder: the run folder.
            client: name of a client; None for the global model.
        """
        path = folder / FOLDER / ("global.safetensors" if client is None else "personal.safetensors")
        if not path.exists():
            return None
        prefix = "" if client is None else f"{client}/"
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names} or None
        except (SafetensorError, OSError) as error:
            raise EquipoiseError(f"{path} cannot be read: {first_line(error)}") from None

    def stores(self) -> dict[str, ClientStore]:
        """Return what a checkpoint keeps; nothing if no model was kept."""
        return {FOLDER: self.store} if self.store.written or self.store.changed.states else {}

    def write(self, folder: Path, clients: Mapping[str, int]) -> None:
        """Write the files of the folder best/: personal.safetensors and global.safetensors, where there are such.

        A tensor is called PARAMETER, or CLIENT/PARAMETER; the file's metadata have the round of each model.

        Args:
            folder: the run folder.
            clients: names and numbers of the clients.
        """
        if not self.stores():
            return
        for kind, rows in {"personal": clients, "global": {"": self.global_row}}.items():
            models = {name: model for name, row in rows.items() if (model := self.get(row)) is not None}
            if not models:
                continue
            tensors = {
                f"{name}/{key}" if name else key: tensor.clone()
                for name, model in models.items()
                for key, tensor in self.task.to_module(model.vector, model.buffers).state_dict().items()
            }
            rounds = {name or kind: model.round for name, model in models.items()}
            atomic_files.make_folder(folder / FOLDER)
            tensor_files.write_tensors(folder / FOLDER / f"{kind}.safetensors", tensors, {"rounds": json.dumps(rounds)})

"""A run on disk with the user's module: models without the data, and adaptation to new clients."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.algorithms.local_data import Start
from equipoise.algorithms.own_modules import with_own_modules
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation
from equipoise.data.series_scale import SeriesScale
from equipoise.engine.best_models import BestModels
from equipoise.engine.model_files import load_tensors
from equipoise.engine.origin import find_data_difference
from equipoise.errors import EquipoiseError
from equipoise.executors.base import ClientModel
from equipoise.executors.build import build_executor
from equipoise.metrics import MetricLike
from equipoise.parameter_space import ParameterSpace
from equipoise.privacy.mechanisms import Privacy
from equipoise.quantiles import Pinball
from equipoise.runs.saved_models import SavedModels
from equipoise.runs.trained import Trained, library_model
from equipoise.settings import read
from equipoise.state import State
from equipoise.storage.run_folder import RunFolder, read_toml
from equipoise.torch_device import CPU
from equipoise.training.task import Task, build_module


class SavedRun(Trained):
    """A finished run in a folder."""

    def __init__(
        self,
        folder: RunFolder,
        models: SavedModels,
        module: nn.Module,
        algorithm: Algorithm | None,
        loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        federation: Federation | None = None,
    ):
        """Open a run.

        Args:
            folder: the folder of the run.
            models: its models.
            module: a module like the one that was trained; its own weights do not matter.
            algorithm: the algorithm with its settings, if it is known.
            loss: the loss, if it is not one of those with a name.
            metric: the metric or metrics, if not all of them are of those with a name.
            federation: the data of the run, if they are known.
        """
        self.folder, self.models, facts = folder, models, models.facts
        self.names, self.unseen = models.names, frozenset(facts["unseen"])
        self.model = library_model(folder)
        self.method, self.looks_up = facts["method"], facts["looks_up"]
        self.input_shape, self.outputs = tuple(facts["inputs"][0]), facts["outputs"]
        self.dtype, self.buffer_names = models.dtype, tuple(facts["buffers"])
        tables = read_toml(folder.config)
        self.schedule = read(Schedule, {k: v for k, v in tables.items() if k in Schedule.model_fields}, "")
        self.score_columns = tuple(facts["columns"])
        self.engine = read(Engine, tables.get("engine", {}), "engine")
        self.privacy = read(Privacy, tables["privacy"], "privacy") if "privacy" in tables else None
        self._algorithm = algorithm
        self.pinball = Pinball(facts["quantiles"]) if facts.get("quantiles") else None
        self._loss, self._metric = loss or self.pinball or facts["loss"], metric or facts["metrics"]
        self.template = self._template(module)
        self.space = ParameterSpace(self.template, self._head_parameters)
        self._federation = None if federation is None else self._checked(federation)

    def _template(self, module: nn.Module) -> nn.Module:
        """Return a copy of the module with the initial weights of the run, trainable where they were trained."""
        template = with_own_modules(copy.deepcopy(module), self.models.facts["head"], self._algorithm).to(self.dtype)
        load_tensors(template, self.models.initial, str(self.models.path))
        trained = {entry.name for entry in self.models.entries}
        for name, parameter in template.named_parameters():
            parameter.requires_grad_(name in trained)
        return template

    @property
    def _head_parameters(self) -> list[str] | None:
        names = [entry.name for entry in self.models.entries if entry.offset >= self.models.facts["body_size"]]
        return names or None

    def _checked(self, federation: Federation) -> Federation:
        """Return the federation as it was trained on, or raise an error if it is not the one of the run."""
        channels_last = any(isinstance(layer, nn.Conv2d) for layer in self.template.modules())
        federation = replace(federation, unseen=self.unseen).prepared(self.dtype, channels_last)
        if (difference := find_data_difference(self.models.facts["origin"], federation)) is not None:
            raise EquipoiseError(f"clients are not those of the run in {self.folder.path}: {difference}")
        return federation

    @property
    def rounds(self) -> int:
        return int(self.models.facts["rounds"])

    @property
    def server(self) -> State:
        return self.models.server

    @property
    def algorithm(self) -> Algorithm:
        if self._algorithm is None:
            raise EquipoiseError(
                f"the run in {self.folder.path} used {self.method}, an algorithm of your own; give it to load_result "
                f"as algorithm={self.method}"
            )
        return self._algorithm

    @cached_property
    def task(self) -> Task:
        for what, given in (("loss", self._loss), ("metric", self._metric)):
            if given is None:
                raise EquipoiseError(f"the run used a {what} of your own; give it to load_result as {what}=")
        head = self.models.facts["head"] or self._head_parameters
        task = Task(
            self.template,
            self._sample(),
            head=head,
            loss=self._loss,
            metric=self._metric,
            dtype=self.dtype,
            mixed=self.engine.mixed,
        )
        task.set_buffers(self.buffer_names)  # as found with real samples
        return task

    def _sample(self) -> tuple[Tensor, Tensor]:
        """Return two samples like those of the run, of random numbers (nothing of the data is kept on disk)."""
        rng = randomness.torch_generator(0, "sample")
        made = []
        for what in ("inputs", "targets"):
            shape, name = self.models.facts[what]
            dtype: torch.dtype = getattr(torch, name)
            numbers = torch.randn((2, *shape), generator=rng, dtype=dtype if dtype.is_floating_point else None)
            made.append(numbers if dtype.is_floating_point else torch.zeros((2, *shape), dtype=dtype))
        return made[0], made[1]

    @property
    def start(self) -> Start:
        facts = self.models.facts
        return self.task.start(facts["training_clients"], facts["training_samples"], self.schedule.seed)

    @property
    def federation(self) -> Federation:
        if self._federation is None:
            raise EquipoiseError(
                "the result was loaded without the clients' data; give them to load_result as clients= to use them"
            )
        return self._federation

    def lines(self) -> list[dict[str, Any]]:
        return self.folder.read_metrics()

    def summary(self) -> dict[str, Any]:
        return self.folder.read_summary()

    def tables(self) -> dict[str, np.ndarray]:
        return self.models.tables

    def personal(self, who: int) -> ClientModel | None:
        return self.models.personal(who)

    def global_vector(self) -> Tensor | None:
        return self.models.shared

    def global_buffers(self) -> Tensor | None:
        return self.models.averaged

    def client_buffers(self, who: int) -> Tensor | None:
        return self.models.client_buffers(who)

    def scale(self, who: int) -> SeriesScale | None:
        table = (self.models.facts.get("scales") or {who: None})[who]
        return None if table is None else read(SeriesScale, table, "scales")

    def hybrid_choices(self) -> np.ndarray:
        return self.models.choices

    def best(self, who: int | None) -> nn.Module | None:
        tensors = BestModels.read(self.folder.path, None if who is None else self.names[who])
        if tensors is None:
            return None
        module = copy.deepcopy(self.template)
        load_tensors(module, tensors, str(self.folder.path))
        return module.eval()

    def to_module(self, vector: Tensor, buffers: Tensor | None, device: torch.device = CPU) -> nn.Module:
        if buffers is None:
            return self.space.module(self.template, vector.to(device))
        return build_module(self.template, self.space, vector.to(device), self.buffer_names, buffers)

    def predictor(self, module: nn.Module, who: int) -> nn.Module:
        if self._federation is None:
            raise EquipoiseError(
                f"a personal model of {self.method} looks up the client's samples; give them to load_result as clients="
            )
        assert isinstance(self.algorithm, PredictsFromSamples)
        executor = build_executor(self.engine, self.task, self._federation, self.algorithm, self.schedule)
        try:
            return executor.predictor(module, who)
        finally:
            executor.close()

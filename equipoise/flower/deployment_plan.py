"""What a deployment does: an experiment whose data are on other machines, and perhaps the user's own model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithms.base import Algorithm
from equipoise.config.experiment import Experiment
from equipoise.data.federation import SPLIT, check_split
from equipoise.engine.assembly import build_task, check_head, experiment_module, initial_module
from equipoise.errors import EquipoiseError
from equipoise.metrics import MetricLike
from equipoise.parameter_space import Selection
from equipoise.registry import allow_only, is_own_code
from equipoise.settings import Settings
from equipoise.training.task import Task

EXPERIMENT = "experiment.toml"


@dataclass(frozen=True)
class DeploymentPlan:
    """An experiment, with the user's own model, loss and metric where given."""

    experiment: Experiment
    model: Callable[[], nn.Module] | None = None
    "function that returns the user's own model, in place of the one that the experiment names"
    head: Selection | None = "head"
    "the head of that model; of a model that the experiment names, its setting `head` if this is not given"
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None
    metric: MetricLike | Sequence[MetricLike] | None = None
    "in place of the metrics that the experiment names"

    def __post_init__(self) -> None:
        # What cannot work is an error now, before anybody waits for clients.
        deploy, wanted = self.experiment.deploy, self.experiment.schedule.participation
        cohort = min(wanted, deploy.clients) if isinstance(wanted, int) else max(1, round(wanted * deploy.clients))
        if deploy.minimum > cohort:
            raise EquipoiseError(
                f"deploy.minimum = {deploy.minimum} is more than the {cohort} clients of a round "
                f"(deploy.clients = {deploy.clients}, participation = {wanted})"
            )
        attack = self.experiment.attack
        if attack is not None and attack.pools:
            raise EquipoiseError(
                f"attack.name = {self.experiment.attack_name!r} is for simulations: its attackers look at each other's "
                "samples"
            )
        if attack is not None and attack.needs_labels and deploy.targets != "classes":
            name = self.experiment.attack_name
            raise EquipoiseError(f"attack.name = {name!r} needs labels, but deploy.targets = 'numbers'")
        if deploy.names and len(deploy.names) < deploy.clients:
            raise EquipoiseError(
                f"deploy.names has {len(deploy.names)} names, but deploy.clients = {deploy.clients}; "
                "list at least as many names as clients"
            )
        if deploy.horizon and deploy.horizon != math.prod(deploy.target_shape):
            raise EquipoiseError(
                f"deploy.horizon = {deploy.horizon} does not agree with deploy.target_shape = "
                f"{list(deploy.target_shape)}; a sample's target is as many values as it forecasts"
            )
        check_split(self.split)

    @staticmethod
    def of(
        tables: Mapping[str, Any], parts: Mapping[str, Any], model: Any = None, schedule: Any = None, **own: Any
    ) -> "DeploymentPlan":
        """Make the plan of an app.

        Nothing is imported by name, because the names may come from another machine: sections that name own code get
        what app.py passes, and otherwise raise an error.

        Args:
            tables: the content of experiment.toml.
            parts: the user's own algorithm, attack and reducer, where app.py passes them.
            model: the user's own model: what [model] names, or a function that returns a module.
            schedule: the user's own schedule of learning rates, which [algorithm] names.
            **own: the user's own head, loss and metric.
        """
        tables, given = dict(tables), {}
        for section, part in parts.items():
            if part is not None:
                tables[section], given[f"{section}.name"] = _own_section(tables.get(section, {}), section, part)
        passed = parts.get("algorithm")
        if isinstance(passed, Algorithm) and passed.schedule.own_function is not None:
            schedule = passed.schedule.own_function
        if schedule is not None:
            given["algorithm.schedule.function"] = schedule
        if own.get("metric") is not None:
            tables.pop("metrics", None)
        named = tables.get("model")
        by_name = isinstance(named, Mapping) and is_own_code(named.get("name"))
        if model is not None and by_name:
            given["model.name"] = model
        elif model is not None:
            tables.pop("model", None)
        with allow_only(given):
            experiment = Experiment.parse(tables, needs=("algorithm",))
        if schedule is not None and experiment.algorithm.schedule.kind != "function":
            raise EquipoiseError(
                "app.py passes a schedule, but experiment.toml names none; write algorithm.schedule = 'app.py:NAME'"
            )
        return DeploymentPlan(experiment, model=None if by_name else model, **own)

    @property
    def title(self) -> str:
        """Return the name of the data for readers."""
        name = self.experiment.data.name if self.experiment.data else "clients' own data"
        return self.experiment.deploy.title or name

    @property
    def split(self) -> Sequence[float]:
        """Return the fractions of train, validation and test for a client whose samples are not divided yet."""
        deploy, data = self.experiment.deploy, self.experiment.data
        return deploy.split or (data.dealing.split if data else None) or SPLIT

    @property
    def classes(self) -> int | None:
        """Return the number of classes; None if the targets are numbers."""
        return self.experiment.deploy.outputs if self.experiment.deploy.targets == "classes" else None

    def described(self) -> tuple[Experiment, Sequence[int], int, str]:
        """Return what a model file says about its model: experiment, shape of a sample, number of outputs, title."""
        deploy = self.experiment.deploy
        return self.experiment, deploy.shape, deploy.outputs or 0, self.title

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return two samples of the configured shape, all zeros, to find out what the model's outputs are."""
        deploy, dtype = self.experiment.deploy, self.experiment.engine.dtype
        if not deploy.shape:
            raise EquipoiseError(
                "the server has no data, so it cannot know the shape of a sample: "
                "give deploy.shape, such as [1, 28, 28], and deploy.outputs"
            )
        x = torch.zeros((2, *deploy.shape), dtype=torch.int64 if deploy.inputs == "symbols" else dtype)
        y = torch.zeros((2, *deploy.target_shape), dtype=torch.int64 if deploy.targets == "classes" else dtype)
        return x, y

    def module(self) -> nn.Module:
        """Build the model, with its initial parameters."""
        if self.model is not None:
            return initial_module(self.model, self.experiment.schedule.seed)
        if self.experiment.model is not None and self.experiment.deploy.outputs is None:
            raise EquipoiseError("deploy.outputs is missing: the number of outputs of the model for one sample")
        return experiment_module(self.experiment, self.experiment.deploy.shape, self.experiment.deploy.outputs or 0)

    def task(self) -> Task:
        """Build the task: model, with modules that the algorithm adds, loss and metric."""
        sample = self.sample()  # first, because without a shape there is nothing to build a model for
        module, settings = self.module(), self.experiment.engine
        if settings.device not in ("auto", "cpu"):
            raise EquipoiseError(
                f"engine.device = {settings.device!r} is for simulations; clients of a deployment train on the CPU, so "
                "leave it out"
            )
        head = self.experiment.head if self.model is None and self.head == "head" else self.head
        check_head(module, head, self.experiment.algorithm)
        metric = self.experiment.schedule.metrics if self.metric is None else self.metric
        loss = self.loss or self.experiment.schedule.pinball or self.experiment.schedule.loss
        task = build_task(module, sample, settings, head=head, loss=loss, metric=metric)
        return task.with_own_modules(self.experiment.algorithm, self.experiment.schedule.seed)


def _own_section(table: Any, section: str, part: Any) -> tuple[Any, type]:
    """Return a section of an experiment for what app.py passes, a class or settings, and the class."""
    cls = part if isinstance(part, type) else type(part)
    if not isinstance(table, Mapping):
        return table, cls
    name = table.get("name", f"app.py:{cls.__name__}")
    if not is_own_code(name):
        raise EquipoiseError(
            f"{section}.name = {name!r} in experiment.toml, but app.py passes {cls.__name__}; write {section}.name = "
            f"'app.py:{cls.__name__}', or pass no {section} in app.py"
        )
    if isinstance(part, type) or not isinstance(part, Settings):
        return {**table, "name": name}, cls
    settings = part.table()
    for key, value in table.items():
        if key != "name" and (key not in settings or settings[key] != value):
            raise EquipoiseError(
                f"{section}.{key} = {value!r} in experiment.toml, but app.py passes {settings.get(key)!r}; set it in "
                "one of them, or pass the class"
            )
    return {"name": name, **settings}, cls

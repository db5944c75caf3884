"""What a deployment does: an experiment whose data are on other machines, and perhaps the user's own model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import LabelPoison
from equipoise.config.engine import DTYPES
from equipoise.config.experiment import Experiment
from equipoise.data.federation import SPLIT
from equipoise.engine.assembly import build_task, experiment_module, initial_module
from equipoise.errors import EquipoiseError
from equipoise.metrics import Metric
from equipoise.storage.run_folder import CALLBACKS, read_toml
from equipoise.training.task import Task

EXPERIMENT = "experiment.toml"


@dataclass(frozen=True)
class DeploymentPlan:
    """An experiment, with the user's own model, loss and metric where given."""

    experiment: Experiment
    model: Callable[[], nn.Module] | None = None
    "function that returns the user's own model, in place of the one that the experiment names"
    head: str | Sequence[str] | None = "head"
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None
    metric: str | Metric | None = None

    def __post_init__(self) -> None:
        # What cannot work is an error now, before anybody waits for clients.
        deploy, wanted = self.experiment.deploy, self.experiment.schedule.participation
        cohort = min(wanted, deploy.clients) if isinstance(wanted, int) else max(1, round(wanted * deploy.clients))
        if deploy.minimum > cohort:
            raise EquipoiseError(
                f"deploy.minimum = {deploy.minimum} is more than the {cohort} clients of a round "
                f"(deploy.clients = {deploy.clients}, participation = {wanted})"
            )
        if isinstance(self.experiment.attack, LabelPoison) and deploy.targets != "classes":
            raise EquipoiseError("attack.name = 'label-poison' needs labels, but deploy.targets = 'numbers'")
        if deploy.names and len(deploy.names) < deploy.clients:
            raise EquipoiseError(
                f"deploy.names has {len(deploy.names)} names, but deploy.clients = {deploy.clients}; "
                "list at least as many names as clients"
            )

    @staticmethod
    def load(folder: Path, callbacks: bool = True, **own: Any) -> "DeploymentPlan":
        """Read the plan of the app in a folder.

        Args:
            folder: the folder.
            callbacks: whether to read the section [[callbacks]]; only the server has callbacks.
            **own: the user's own model, head, loss and metric.
        """
        tables = read_toml(folder / EXPERIMENT)
        if not callbacks:
            tables.pop(CALLBACKS, None)
        experiment = Experiment.parse(tables, needs=("algorithm",))
        if own.get("model") is not None:
            experiment = replace(experiment, model_name="", model=None)
        return DeploymentPlan(experiment, **own)

    @property
    def title(self) -> str:
        """Return the name of the data for readers."""
        name = self.experiment.data.name if self.experiment.data else "clients' own data"
        return self.experiment.deploy.title or name

    @property
    def split(self) -> Sequence[float]:
        """Return the fractions of train, validation and test for a client whose samples are not divided yet."""
        return (self.experiment.data.dealing.split if self.experiment.data else None) or SPLIT

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
        deploy, dtype = self.experiment.deploy, DTYPES[self.experiment.engine.dtype]
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
        """Build the task: model, loss and metric."""
        sample = self.sample()  # first, because without a shape there is nothing to build a model for
        settings = self.experiment.engine
        return build_task(self.module(), sample, settings, head=self.head, loss=self.loss, metric=self.metric)

"""What a deployment is to do: an experiment whose data are elsewhere, and perhaps a model of the user's own."""

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
from equipoise.losses import Metric
from equipoise.storage.run_folder import read_toml
from equipoise.training.task import Task

EXPERIMENT = "experiment.toml"


@dataclass(frozen=True)
class DeploymentPlan:
    experiment: Experiment
    model: Callable[[], nn.Module] | None = None
    "makes the user's own model, in place of the one that the experiment names"
    head: str | Sequence[str] | None = "head"
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None
    metric: str | Metric | None = None

    def __post_init__(self) -> None:
        """What can never be is said before anybody waits for it."""
        deploy, wanted = self.experiment.deploy, self.experiment.schedule.participation
        cohort = min(wanted, deploy.clients) if isinstance(wanted, int) else max(1, round(wanted * deploy.clients))
        if deploy.minimum > cohort:
            raise EquipoiseError(
                f"deploy.minimum = {deploy.minimum} is more than the {cohort} clients of a round "
                f"(deploy.clients = {deploy.clients}, participation = {wanted})"
            )
        if isinstance(self.experiment.attack, LabelPoison) and deploy.targets != "classes":
            raise EquipoiseError("attack.name = 'label-poison' needs labels, and deploy.targets = 'numbers'")
        if deploy.names and len(deploy.names) < deploy.clients:
            raise EquipoiseError(
                f"deploy.names has {len(deploy.names)} names, and deploy.clients = {deploy.clients} are waited for"
            )

    @staticmethod
    def load(folder: Path, **own: Any) -> "DeploymentPlan":
        experiment = Experiment.parse(read_toml(folder / EXPERIMENT), needs=("algorithm",))
        if own.get("model") is not None:
            experiment = replace(experiment, model_name="", model=None)
        return DeploymentPlan(experiment, **own)

    @property
    def title(self) -> str:
        named = self.experiment.data.name if self.experiment.data else "clients' own data"
        return self.experiment.deploy.title or named

    @property
    def split(self) -> Sequence[float]:
        """How a client divides samples that come undivided."""
        return (self.experiment.data.dealing.split if self.experiment.data else None) or SPLIT

    @property
    def classes(self) -> int | None:
        return self.experiment.deploy.outputs if self.experiment.deploy.targets == "classes" else None

    def described(self) -> tuple[Experiment, Sequence[int], int, str]:
        """What a file with a model of this plan tells about it."""
        deploy = self.experiment.deploy
        return self.experiment, deploy.shape, deploy.outputs or 0, self.title

    def sample(self) -> tuple[Tensor, Tensor]:
        """Two samples of the announced shape, all zeros: enough to see what the model makes of them."""
        deploy, dtype = self.experiment.deploy, DTYPES[self.experiment.engine.dtype]
        if not deploy.shape:
            raise EquipoiseError(
                "the server has no data, so it must be told what a sample looks like: "
                "give deploy.shape, such as [1, 28, 28], and deploy.outputs"
            )
        x = torch.zeros((2, *deploy.shape), dtype=torch.int64 if deploy.inputs == "symbols" else dtype)
        y = torch.zeros((2, *deploy.target_shape), dtype=torch.int64 if deploy.targets == "classes" else dtype)
        return x, y

    def module(self) -> nn.Module:
        if self.model is not None:
            return initial_module(self.model, self.experiment.schedule.seed)
        if self.experiment.model is not None and self.experiment.deploy.outputs is None:
            raise EquipoiseError("deploy.outputs is missing: how many numbers does the model give for a sample?")
        return experiment_module(self.experiment, self.experiment.deploy.shape, self.experiment.deploy.outputs or 0)

    def task(self) -> Task:
        sample = self.sample()  # first, because without a shape there is nothing to build a model for
        settings = self.experiment.engine
        return build_task(self.module(), sample, settings, head=self.head, loss=self.loss, metric=self.metric)

"""Experiment trackers: rounds and results are also sent to TensorBoard, MLflow or Weights & Biases.

A tracker that fails is reported once and then dropped: no run fails because a tracking server is down.
"""

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from equipoise.callbacks.base import Callback, Line
from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_folder import flatten

MLFLOW_RUN = "mlflow.json"
"""File in the run folder with the id of the run in MLflow, so that a resumed run continues there."""
WANDB_RUN = "wandb.json"
"""The same for Weights & Biases."""
_PROJECT = "equipoise"


def flatten_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a line of metrics or in a summary, with names such as `personal/accuracy`."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= flatten_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + key] = float(value)
    return found


def _figures(line: Line) -> dict[str, float]:
    return flatten_numbers({k: v for k, v in line.items() if k != "round"})


class Tracker(Callback):
    """Sends the figures of a run to a tracker; needs a run folder."""

    affects_results: ClassVar[bool] = False
    extra: ClassVar[str]
    "name of the extra to install"

    @property
    def path(self) -> Path:
        """Return the run folder."""
        if self.run.folder is None:
            raise EquipoiseError(f"{self.extra} needs a run folder; say out=...")
        return self.run.folder

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Turn a failing import into advice to install the extra."""
        try:
            yield
        except ImportError:
            raise EquipoiseError(
                f"track = [{self.extra!r}] needs {self.extra}, which is not installed; "
                f"pip install 'equipoise[{self.extra}]'"
            ) from None


class TensorBoard(Tracker):
    """Writes event files into the folder tensorboard/ of the run."""

    extra: ClassVar[str] = "tensorboard"

    def on_run_begin(self) -> None:
        with self.installed():
            from torch.utils.tensorboard import SummaryWriter
        done = self.run.done
        self.writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=done + 1 if done else None)
        settings = flatten(dict(self.run.settings)).items()
        self.writer.add_text("configuration", "\n".join(f"    {k} = {json.dumps(v)}" for k, v in settings), done)

    def on_round_end(self, line: Line) -> None:
        for name, value in _figures(line).items():
            self.writer.add_scalar(name, value, line["round"])
        self.writer.flush()

    def on_run_end(self, summary: dict[str, Any]) -> None:
        self.writer.close()

    def on_interrupt(self, failed: bool) -> None:
        if "writer" in vars(self):
            self.writer.close()


class MLflow(Tracker):
    """Logs to MLflow.

    The tracking server is MLFLOW_TRACKING_URI, by default ./mlflow.db; the experiment is MLFLOW_EXPERIMENT_NAME, by
    default equipoise.
    """

    extra: ClassVar[str] = "mlflow"

    def on_run_begin(self) -> None:
        with self.installed():
            from mlflow.tracking import MlflowClient
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it logs how it creates its tables
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path('mlflow.db').resolve()}"))
        file = self.path / MLFLOW_RUN
        if self.run.done and file.exists():
            self.id = json.loads(file.read_text())["run"]
            self.client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        self.id = self.client.create_run(experiment, run_name=self.path.resolve().name).info.run_id
        atomic_files.write_json(file, {"run": self.id})
        for key, value in flatten(dict(self.run.settings)).items():
            self.client.log_param(self.id, key, json.dumps(value)[:500])

    def on_round_end(self, line: Line) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        figures = [Metric(name, value, now, line["round"]) for name, value in _figures(line).items()]
        self.client.log_batch(self.id, figures)

    def on_run_end(self, summary: dict[str, Any]) -> None:
        for name, value in flatten_numbers({k: v for k, v in summary.items() if k not in KINDS}).items():
            self.client.log_metric(self.id, f"summary/{name}", value)
        self.client.set_terminated(self.id)

    def on_interrupt(self, failed: bool) -> None:
        if "id" in vars(self):
            self.client.set_terminated(self.id, "FAILED" if failed else "KILLED")


class WandB(Tracker):
    """Logs to Weights & Biases.

    Its own environment variables apply: with WANDB_MODE=offline, everything stays in the folder wandb/ of the run.
    """

    extra: ClassVar[str] = "wandb"
    project: str | None = None
    "project that the run belongs to; if left out, WANDB_PROJECT, or else equipoise"

    def on_run_begin(self) -> None:
        with self.installed():
            import wandb
        file = self.path / WANDB_RUN
        known = json.loads(file.read_text())["run"] if self.run.done and file.exists() else None
        self.id = known or uuid.uuid4().hex
        atomic_files.write_json(file, {"run": self.id})
        # The run folder says all that is worth knowing: nothing of the terminal, the code or the machine is recorded.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        self.session = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT", _PROJECT),
            dir=str(self.path.resolve()),
            id=self.id,
            name=self.path.resolve().name,
            resume="allow",
            reinit="create_new",
            config=flatten(dict(self.run.settings)),
            settings=settings,
        )

    def on_round_end(self, line: Line) -> None:
        self.session.log(_figures(line), step=line["round"])

    def on_run_end(self, summary: dict[str, Any]) -> None:
        figures = flatten_numbers({k: v for k, v in summary.items() if k not in KINDS})
        self.session.summary.update({f"summary/{name}": value for name, value in figures.items()})
        self.session.finish()

    def on_interrupt(self, failed: bool) -> None:
        if "session" in vars(self):
            self.session.finish(exit_code=1 if failed else 255)

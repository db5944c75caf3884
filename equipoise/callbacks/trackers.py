"""Experiment trackers: rounds and results are sent to TensorBoard or MLflow if the setting `track` names them.

A tracker that fails is reported once and then dropped: no run fails because a tracking server is down.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.callbacks.base import RunCallback
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.storage import atomic_files
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_folder import RunFolder, flatten

MLFLOW_RUN = "mlflow.json"
"""File in the run folder with the id of the run in MLflow, so that a resumed run continues there."""


def flatten_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a line of metrics or in a summary, with names such as `personal/accuracy`."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= flatten_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + key] = float(value)
    return found


class Tracker(RunCallback):
    """Receives the events of a run, and its end if it does not finish."""

    def on_interrupted(self, failed: bool) -> None:
        """Handle the end of a run that failed or was stopped."""


class TensorBoard(Tracker):
    """Writes event files into the folder tensorboard/ of the run."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self.make = lambda done: SummaryWriter(str(folder.path / "tensorboard"), purge_step=done + 1 if done else None)
        self.settings = settings
        self.writer: SummaryWriter | None = None

    def on_run_begin(self, rounds: int, done: int) -> None:
        self.writer = self.make(done)
        text = "\n".join(f"    {key} = {json.dumps(value)}" for key, value in flatten(dict(self.settings)).items())
        self.writer.add_text("configuration", text, done)

    def on_round_end(self, line: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in flatten_numbers({k: v for k, v in line.items() if k != "round"}).items():
                self.writer.add_scalar(name, value, line["round"])
            self.writer.flush()

    def on_run_end(self, summary: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.close()

    def on_interrupted(self, failed: bool) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow(Tracker):
    """Logs to MLflow.

    The tracking server is MLFLOW_TRACKING_URI, by default ./mlflow.db; the experiment is MLFLOW_EXPERIMENT_NAME, by
    default equipoise.
    """

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]):
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it logs how it creates its tables
        self.folder, self.settings = folder, settings
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path('mlflow.db').resolve()}"))
        self.run = ""

    def on_run_begin(self, rounds: int, done: int) -> None:
        path = self.folder.path / MLFLOW_RUN
        if done and path.exists():
            self.run = json.loads(path.read_text())["run"]
            self.client.update_run(self.run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "equipoise")
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        self.run = self.client.create_run(experiment, run_name=self.folder.path.resolve().name).info.run_id
        atomic_files.write_json(path, {"run": self.run})
        for key, value in flatten(dict(self.settings)).items():
            self.client.log_param(self.run, key, json.dumps(value)[:500])

    def on_round_end(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        found = flatten_numbers({k: v for k, v in line.items() if k != "round"})
        now = round(1000 * time.time())
        self.client.log_batch(self.run, [Metric(name, value, now, line["round"]) for name, value in found.items()])

    def on_run_end(self, summary: dict[str, Any]) -> None:
        for name, value in flatten_numbers({k: v for k, v in summary.items() if k not in KINDS}).items():
            self.client.log_metric(self.run, f"summary/{name}", value)
        self.client.set_terminated(self.run)

    def on_interrupted(self, failed: bool) -> None:
        if self.run:
            self.client.set_terminated(self.run, "FAILED" if failed else "KILLED")


TRACKERS: dict[str, Callable[[RunFolder, Mapping[str, Any]], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class TrackedCallback(RunCallback):
    """Forwards events to a callback and to trackers, and drops trackers that fail."""

    def __init__(self, callback: RunCallback, trackers: dict[str, Tracker]):
        self.callback, self.trackers = callback, trackers

    def on_data_progress(self, done: int, total: int) -> None:
        self.callback.on_data_progress(done, total)

    def on_run_begin(self, rounds: int, done: int) -> None:
        self.callback.on_run_begin(rounds, done)
        self._forward(lambda tracker: tracker.on_run_begin(rounds, done))

    def on_round_end(self, line: dict[str, Any]) -> None:
        self.callback.on_round_end(line)
        self._forward(lambda tracker: tracker.on_round_end(line))

    def on_run_end(self, summary: dict[str, Any]) -> None:
        self.callback.on_run_end(summary)
        self._forward(lambda tracker: tracker.on_run_end(summary))

    def on_message(self, text: str) -> None:
        self.callback.on_message(text)

    def on_interrupted(self, failed: bool) -> None:
        """Report to the trackers that the run failed or was stopped."""
        self._forward(lambda tracker: tracker.on_interrupted(failed))

    def _forward(self, event: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                event(tracker)
            except Exception as error:  # whatever the tracker's library raises, the run continues
                del self.trackers[name]
                self.callback.on_message(f"{name} failed and is not used any more: {type(error).__name__}: {error}")


@contextmanager
def with_trackers(
    callback: RunCallback, names: Sequence[str], folder: RunFolder, settings: Mapping[str, Any]
) -> Iterator[RunCallback]:
    """Yield a callback that also reports to trackers, and report to them if the run fails or is stopped.

    Args:
        callback: the callback to extend.
        names: names of trackers.
        folder: the run folder.
        settings: all settings of the run, which trackers record.
    """
    if not names:
        yield callback
        return
    trackers = {}
    for name in dict.fromkeys(names):
        try:
            trackers[name] = TRACKERS[name](folder, settings)
        except ImportError:
            raise EquipoiseError(
                f"track = [{name!r}] needs {name}, which is not installed; pip install 'equipoise[{name}]'"
            ) from None
        except Exception as error:  # as above: no run fails because of a tracker
            callback.on_message(f"{name} failed and is not used: {type(error).__name__}: {error}")
    tracked = TrackedCallback(callback, trackers)
    try:
        yield tracked
    except BaseException as error:
        tracked.on_interrupted(failed=not isinstance(error, Interrupted | KeyboardInterrupt))
        raise

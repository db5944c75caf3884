"""The two halves of a Flower app: what the SuperLink runs, and what every SuperNode runs."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from equipoise.callbacks import Callback, Progress, with_trackers
from equipoise.engine.assembly import run_in_folder, start_or_resume
from equipoise.errors import EquipoiseError
from equipoise.flower.client import work
from equipoise.flower.client_data import DataFunction
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.server import Deployment
from equipoise.metrics import Metric


def _set_up_logging() -> None:
    """Send this library's log messages, and no others, to the SuperNode's log."""
    log = logging.getLogger("equipoise")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("equipoise: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


class LogCallback(Callback):
    """Prints the progress of a run, which Flower writes to the log of the run."""

    affects_results: ClassVar[bool] = False

    def on_run_begin(self) -> None:
        rounds = self.run.rounds
        self.on_message(f"{rounds - self.run.done} of {rounds} rounds left")

    def on_round_end(self, line: dict[str, Any]) -> None:
        scores = []
        for kind in ("personal", "global"):
            name, score = next(iter(line.get(kind, {}).items()), ("", None))
            if score is not None:
                scores.append(f"{kind} {name} {score:.4f}")
        clients = f"{line['clients'] - line['left_out']} of {line['clients']} clients"
        self.on_message(", ".join([f"round {line['round']} of {self.run.rounds}: {clients}", *scores]))

    def on_message(self, text: str) -> None:
        print(f"equipoise: {text}", flush=True)


class App:
    """A Flower app for the experiment.toml in the folder of `app.py`.

    `server` and `client` are the two objects that Flower runs.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        model: Callable[[], nn.Module] | None = None,
        data: DataFunction | None = None,
        head: str | Sequence[str] | None = "head",
        loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
        metric: str | Metric | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """Create both halves of the app.

        Args:
            file: the file `app.py`; pass `__file__`.
            model: returns the user's own module, in place of the model that the experiment names.
            data: gets the client's settings and returns (x, y), a torch Dataset, or a dictionary of train, validation
                and test.
            head: name of the submodule that is the head, or names of several; None if there is no head.
            loss: name of a loss, or a function of outputs and targets.
            metric: name of a metric, or a metric.
            callbacks: are called on the server, besides those of experiment.toml.
        """
        self.folder = Path(file).resolve().parent
        self.own: dict[str, Any] = {"model": model, "head": head, "loss": loss, "metric": metric}
        self.data, self.callbacks = data, callbacks
        self.server, self.client = ServerApp(), ClientApp()
        self.server.main()(self._serve)
        for register in (self.client.train(), self.client.evaluate(), self.client.query()):
            register(self._work)

    @property
    def plan(self) -> DeploymentPlan:
        """Return what the deployment does, as read from experiment.toml now."""
        return DeploymentPlan.load(self.folder, **self.own)

    @property
    def client_plan(self) -> DeploymentPlan:
        """Return the same without callbacks, whose code may be on the server only."""
        return DeploymentPlan.load(self.folder, callbacks=False, **self.own)

    def _serve(self, grid: Grid, context: Context) -> None:
        out = context.run_config.get("out")
        if not isinstance(out, str) or not out:
            raise EquipoiseError("the run folder is missing: --run-config 'out=\"/path/to/folder\"'")
        resume = bool(context.run_config.get("resume", False))
        serve(self.plan, grid, Path(out).expanduser(), resume, [LogCallback(), *self.callbacks])

    def _work(self, message: Message, context: Context) -> Message:
        _set_up_logging()
        return work(self.client_plan, context.node_config, self.data, message)


def serve(plan: DeploymentPlan, grid: Grid, out: Path, resume: bool, callbacks: Sequence[Callback] = ()) -> Deployment:
    """Run the server.

    Args:
        plan: what the deployment does.
        grid: Flower's connection to the clients.
        out: the run folder.
        resume: whether to continue from the last checkpoint in `out`.
        callbacks: are called besides those of the experiment.
    """
    experiment = plan.experiment.deployed()

    def execute(deployment: Deployment) -> None:
        try:
            start_or_resume(deployment, resume)
        except EquipoiseError as error:
            deployment.note("failed", text=str(error))
            raise

    chosen = [callback for callback in experiment.callbacks if not isinstance(callback, Progress)]
    return run_in_folder(
        lambda folder, callbacks: Deployment(plan, grid, folder, callbacks),
        execute,
        out,
        experiment.tables(),
        resume=resume,
        callbacks=with_trackers([*callbacks, *chosen], experiment.schedule.track),
        mode="flower",
    )

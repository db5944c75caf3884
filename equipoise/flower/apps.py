"""The two halves of a Flower app: what the SuperLink runs, and what every SuperNode runs."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from equipoise.callbacks.base import RunCallback
from equipoise.engine.assembly import run_in_folder, start_or_resume
from equipoise.errors import EquipoiseError
from equipoise.flower.client import work
from equipoise.flower.client_data import DataFunction
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.flower.server import Deployment
from equipoise.metrics import MetricLike
from equipoise.parameter_space import Selection


def _set_up_logging() -> None:
    """Send this library's log messages, and no others, to the SuperNode's log."""
    log = logging.getLogger("equipoise")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("equipoise: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


class LogCallback(RunCallback):
    """Prints the progress of a run, which Flower writes to the log of the run."""

    def __init__(self) -> None:
        self.rounds = 0

    def on_run_begin(self, rounds: int, done: int) -> None:
        self.rounds = rounds
        self.on_message(f"{rounds - done} of {rounds} rounds left")

    def on_round_end(self, line: dict[str, Any]) -> None:
        scores = []
        for kind in ("personal", "global"):
            name, score = next(iter(line.get(kind, {}).items()), ("", None))
            if score is not None:
                scores.append(f"{kind} {name} {score:.4f}")
        clients = f"{line['clients'] - line['left_out']} of {line['clients']} clients"
        self.on_message(", ".join([f"round {line['round']} of {self.rounds}: {clients}", *scores]))

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
        head: Selection | None = "head",
        loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
    ):
        """Create both halves of the app.

        Args:
            file: the file `app.py`; pass `__file__`.
            model: returns the user's own module, in place of the model that the experiment names.
            data: gets the client's settings and returns (x, y), a torch Dataset, or a dictionary of train, validation
                and test.
            head: the model's head, as in `equipoise.train`.
            loss: name of a loss, or a function of outputs and targets.
            metric: a metric or several, each a name, a `Metric` or a function of outputs and targets; they replace
                those of the experiment.
        """
        self.folder = Path(file).resolve().parent
        self.own = {"model": model, "head": head, "loss": loss, "metric": metric}
        self.data = data
        self.server, self.client = ServerApp(), ClientApp()
        self.server.main()(self._serve)
        for register in (self.client.train(), self.client.evaluate(), self.client.query()):
            register(self._work)

    @property
    def plan(self) -> DeploymentPlan:
        """Return what the deployment does, as read from experiment.toml now."""
        return DeploymentPlan.load(self.folder, **self.own)

    def _serve(self, grid: Grid, context: Context) -> None:
        out = context.run_config.get("out")
        if not isinstance(out, str) or not out:
            raise EquipoiseError("the run folder is missing: --run-config 'out=\"/path/to/folder\"'")
        serve(self.plan, grid, Path(out).expanduser(), bool(context.run_config.get("resume", False)))

    def _work(self, message: Message, context: Context) -> Message:
        _set_up_logging()
        return work(self.plan, context.node_config, self.data, message)


def serve(plan: DeploymentPlan, grid: Grid, out: Path, resume: bool, callback: RunCallback | None = None) -> Deployment:
    """Run the server.

    Args:
        plan: what the deployment does.
        grid: Flower's connection to the clients.
        out: the run folder.
        resume: whether to continue from the last checkpoint in `out`.
        callback: gets the progress; without one it is printed.
    """
    experiment = plan.experiment.deployed()

    def execute(deployment: Deployment) -> None:
        try:
            start_or_resume(deployment, resume)
        except EquipoiseError as error:
            deployment.note("failed", text=str(error))
            raise

    return run_in_folder(
        lambda folder, callback: Deployment(plan, grid, folder, callback),
        execute,
        out,
        experiment.tables(),
        resume=resume,
        track=experiment.schedule.track,
        callback=callback or LogCallback(),
        mode="flower",
    )

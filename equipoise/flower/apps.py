"""The two halves of a Flower app: what the SuperLink runs, and what every SuperNode runs."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.attacks import Attack
from equipoise.callbacks import Callback, Progress, with_trackers
from equipoise.engine.assembly import check_back, run_in_folder, start_or_resume
from equipoise.errors import EquipoiseError
from equipoise.flower.client import work
from equipoise.flower.client_data import DataFunction
from equipoise.flower.deployment_plan import EXPERIMENT, DeploymentPlan
from equipoise.flower.server import Deployment
from equipoise.metrics import MetricLike
from equipoise.models.base import ModelSettings
from equipoise.optimizers.schedules import RateFunction
from equipoise.parameter_space import Selection
from equipoise.reducers import Reducer
from equipoise.registry import allow_only
from equipoise.storage.run_folder import CALLBACKS, read_toml


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
        algorithm: type[Algorithm] | Algorithm | None = None,
        model: Callable[..., Any] | type[ModelSettings] | None = None,
        data: DataFunction | None = None,
        head: Selection | None = "head",
        loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        attack: type[Attack] | Attack | None = None,
        reducer: type[Reducer] | Reducer | None = None,
        schedule: RateFunction | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """Create both halves of the app.

        A deployment imports nothing by name. If experiment.toml names own code, such as `name = "mine.py:Mine"`, app.py
        imports it and passes it here.

        Args:
            file: the file `app.py`; pass `__file__`.
            algorithm: the user's own algorithm: a class, whose settings are in the section [algorithm], or an algorithm
                with its settings.
            model: the user's own model. If [model] names own code, it is that code, built with the settings of [model];
                otherwise it is a function that returns the module.
            data: gets the client's settings and returns (x, y), a torch Dataset, or a dictionary of train, validation
                and test.
            head: the model's head, as in `equipoise.train`.
            loss: name of a loss, or a function of outputs and targets.
            metric: a metric or several, each a name, a `Metric` or a function of outputs and targets; they replace
                those of the experiment.
            attack: the user's own attack, a class or an attack with its settings.
            reducer: the user's own reducer, a class or a reducer with its settings.
            schedule: the user's own schedule of learning rates, where [algorithm] names one.
            callbacks: are called on the server, besides those of experiment.toml.
        """
        self.folder = Path(file).resolve().parent
        self.parts = {"algorithm": algorithm, "attack": attack, "reducer": reducer}
        self.schedule = schedule
        self.own: dict[str, Any] = {"model": model, "head": head, "loss": loss, "metric": metric}
        self.data, self.callbacks = data, callbacks
        self.server, self.client = ServerApp(), ClientApp()
        self.server.main()(self._serve)
        for register in (self.client.train(), self.client.evaluate(), self.client.query()):
            register(self._work)

    @property
    def plan(self) -> DeploymentPlan:
        """Return what the deployment does, as read from experiment.toml now."""
        return self.plan_of(read_toml(self.folder / EXPERIMENT))

    def plan_of(self, tables: Mapping[str, Any]) -> DeploymentPlan:
        """Return what the deployment would do with this content of experiment.toml."""
        return DeploymentPlan.of(tables, self.parts, schedule=self.schedule, **self.own)

    @property
    def client_plan(self) -> DeploymentPlan:
        """Return the same without callbacks, whose code may be on the server only."""
        tables = read_toml(self.folder / EXPERIMENT)
        return self.plan_of({k: v for k, v in tables.items() if k != CALLBACKS})

    def _serve(self, grid: Grid, context: Context) -> None:
        out = context.run_config.get("out")
        if not isinstance(out, str) or not out:
            raise EquipoiseError("the run folder is missing: --run-config 'out=\"/path/to/folder\"'")
        with allow_only({}):
            resume = bool(context.run_config.get("resume", False))
            callbacks = [LogCallback(), *self.callbacks]
            serve(self.plan, grid, Path(out).expanduser(), resume, callbacks, context.run_config.get("back", 0))

    def _work(self, message: Message, context: Context) -> Message:
        _set_up_logging()
        with allow_only({}):
            return work(self.client_plan, context.node_config, self.data, message)


def load_app(folder: Path) -> App:
    """Import the app.py in a folder on this machine, and return its app.

    Args:
        folder: the folder of the app.
    """
    file = folder / "app.py"
    if not file.exists():
        raise EquipoiseError(f"{folder} is not an app: it has no app.py")
    spec = spec_from_file_location("equipoise_app", file)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(folder.resolve()))  # as Flower does
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise EquipoiseError(f"{file} cannot be imported: {text}") from error
    found = next((value for value in vars(module).values() if isinstance(value, App)), None)
    if found is None:
        raise EquipoiseError(f"{file} has no `app = App(__file__)`")
    return found


def serve(
    plan: DeploymentPlan, grid: Grid, out: Path, resume: bool, callbacks: Sequence[Callback] = (), back: Any = 0
) -> Deployment:
    """Run the server.

    Args:
        plan: what the deployment does.
        grid: Flower's connection to the clients.
        out: the run folder.
        resume: whether to continue from the last checkpoint in `out`.
        callbacks: are called besides those of the experiment.
        back: 0 to continue from the newest checkpoint, N from the Nth complete round before it.
    """
    check_back(back, resume)
    experiment = plan.experiment.deployed()

    def execute(deployment: Deployment) -> None:
        try:
            start_or_resume(deployment, resume, back)
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

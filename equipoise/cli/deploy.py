"""Commands about deployments: a federation over real machines, on Flower."""

import math
import shlex
import signal
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from equipoise.cli.console import Data, Out, ProgressCallback, Sets, interrupted, out_console, progress_bar
from equipoise.errors import EquipoiseError

deploy_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A federation over real machines, on Flower. Begin with `equipoise deploy local FILE.toml`.",
)

_DEFAULT = {
    "rounds": 20,
    "data": {"name": "digits-by-writer", "clients": 4},
    "model": {"name": "mlp"},
    "algorithm": {"name": "ditto", "lr": 0.1},
}


def _need_flower() -> None:
    if any(find_spec(name) is None for name in ("flwr", "cryptography", "psutil")):
        raise EquipoiseError("deployments need Flower; install it with: pip install 'equipoise[flower]'")


def _say(text: str) -> None:
    out_console.print(escape(text), highlight=False, soft_wrap=True)


@deploy_app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write the app into.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.toml]", help="The experiment; else Ditto on digits-by-writer, to begin with."),
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The server's run folder; else DIR-run, beside DIR.")
    ] = None,
    data: Data = None,
) -> None:
    """Write a Flower app for an experiment; `flwr run DIR SUPERLINK` starts it.

    The server has no data, so [deploy] must say what a sample looks like: it is filled in from the data set that the
    experiment names, or you give deploy.shape and deploy.outputs. A model and data of your own go into DIR/app.py.
    """
    _need_flower()
    from equipoise.config.experiment import Experiment, override
    from equipoise.data.sources import data_folder
    from equipoise.flower import app_template
    from equipoise.runs.launch import folder_of_data

    needs = ("algorithm",)
    experiment = (
        Experiment.load(file, sets or [], needs) if file else Experiment.parse(override(deepcopy(_DEFAULT), sets or []))
    )
    if not experiment.deploy.shape and experiment.data is not None:
        with progress_bar("") as progress:
            bar = ProgressCallback(progress, experiment.data.name)
            source = data_folder(folder_of_data(file, data, bar.on_message) if file else data)
            federation = experiment.federation(source, bar.on_data_progress)
        experiment = replace(experiment, deploy=app_template.describe(federation, experiment.deploy))
    whole = folder.resolve()
    target = out or whole.with_name(whole.name + "-run")
    app_template.write_app(folder, experiment, target)
    _say(f"The app is in {folder}; its server will write into {target}")
    _say("Next, with a SuperLink in Flower's configuration (docs/deploy.md tells how):")
    _say(f"  flwr run {shlex.quote(str(folder))} SUPERLINK --stream")


@deploy_app.command("local")
def local(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")],
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=1, max=64, help="How many SuperNodes.")] = 4,
    sets: Sets = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
) -> None:
    """Run an experiment as a real deployment on this machine: a SuperLink and a SuperNode a client, on loopback.

    TLS and node authentication are on, with certificates and keys made for the purpose. The run folder is the same as
    that of `equipoise run`; keys, clients' data and states, and all logs are in its folder `deployment`.
    """
    _need_flower()
    from equipoise.config.experiment import Experiment
    from equipoise.data.sources import data_folder
    from equipoise.flower.local_deployment import LocalDeployment
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs.launch import default_folder, folder_of_data
    from equipoise.storage import run_index

    settings = [*(sets or []), f"data.clients={clients}", "engine.kind=flower"]
    experiment = Experiment.load(file, settings)
    folder = out or default_folder(file, experiment, "-deployed")
    progress = progress_bar()
    bar = ProgressCallback(None if quiet else progress, experiment.algorithm_name)
    federation = experiment.federation(data_folder(folder_of_data(file, data, bar.on_message)), bar.on_data_progress)
    for note in federation.notes:
        bar.on_message(note)
    run = LocalDeployment(experiment, federation, folder, bar).run
    again = ["equipoise", "deploy", "local", str(file), "--clients", str(clients)]
    again += [x for s in sets or [] for x in ("--set", s)] + ["--out", str(folder)]
    again += ["--data", str(data)] if data else []
    try:
        with _ending_in_order(), nullcontext() if quiet else progress:
            run(resume)
    except KeyboardInterrupt:
        interrupted(f"stopped after round {bar.done}, everything is taken down", shlex.join([*again, "--resume"]))
    if not quiet:
        out_console.print(comparison_table.as_table(comparison.compare(run_index.find_runs([folder]))))
        _say(f"Run folder: {folder}")


class _ending_in_order:
    """A request to end (SIGTERM) is answered like Ctrl-C: everything is taken down first."""

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, self._stop)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    @staticmethod
    def _stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt


@deploy_app.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write them into.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Name or address under which clients reach the SuperLink."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long they are valid.")] = 365,
) -> None:
    """Make a certificate for a SuperLink and the authority that signs it.

    ca.crt goes to every machine; server.pem and server.key stay with the SuperLink.
    """
    _need_flower()
    from equipoise.flower.credentials import write_certificates

    if (folder / "server.key").exists():
        raise EquipoiseError(f"{folder} has certificates already; choose another folder, or remove them first")
    write_certificates(folder, hosts or ["127.0.0.1", "localhost"], days)
    _say(f"{folder}: ca.crt (for every machine), server.pem and server.key (for the SuperLink only)")


@deploy_app.command("client")
def client(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The client's folder: key, settings, state.")],
    name: Annotated[str, typer.Option("--name", help="Who it is; no other client may have the same name.")],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="PATH", help="Folder or file with its samples; else DIR/data.")
    ] = None,
    unseen: Annotated[bool, typer.Option("--unseen", help="Take no part in training, only adapt the result.")] = False,
) -> None:
    """Set up a client on its machine: a key of its own and its settings."""
    _need_flower()
    from equipoise.flower import app_template
    from equipoise.flower.credentials import write_key

    if not 0 < len(name) <= 256 or not name.isprintable():
        raise EquipoiseError("--name must have 1 to 256 characters, all of them printable")
    if (folder / "key").exists():
        raise EquipoiseError(f"{folder} is a client already; choose another folder")
    settings = app_template.write_settings(folder, name, data or folder / "data", unseen)
    write_key(folder / "key")
    _say(f"{settings} says who it is and where its data and its state are; {folder / 'key'} never leaves this machine.")
    _say("Give the operator of the SuperLink this file, to be registered:")
    key, toml = (shlex.quote(str(path)) for path in (folder / "key", settings))
    _say(f"  flwr supernode register {shlex.quote(str(folder / 'key.pub'))} SUPERLINK --name {shlex.quote(name)}")
    _say("Then start the client, with the operator's ca.crt:")
    _say(
        f"  flower-supernode --superlink HOST:PORT --root-certificates ca.crt --auth-supernode-private-key {key} "
        f"--node-config {toml}"
    )


@deploy_app.command("check")
def check(
    settings: Annotated[Path, typer.Argument(metavar="client.toml", help="The client's settings.")],
    app: Annotated[Path, typer.Option("--app", metavar="DIR", help="The app, as `deploy init` wrote it.")],
) -> None:
    """Look whether a client's data fit the experiment, before its SuperNode is started."""
    _need_flower()
    from equipoise.flower import App
    from equipoise.flower.client import Client
    from equipoise.storage.run_folder import read_toml

    file = app / "app.py"
    if not file.exists():
        raise EquipoiseError(f"{app} is not an app: it has no app.py")
    spec = spec_from_file_location("equipoise_app", file)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(app.resolve()))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise EquipoiseError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    found = next((value for value in vars(module).values() if isinstance(value, App)), None)
    if found is None:
        raise EquipoiseError(f"{file} has no `app = App(__file__)`")
    one = Client(found.plan, read_toml(settings), found.data)
    federation = one.data()
    sizes = {name: int(getattr(federation, name).lengths[0]) for name in ("train", "validation", "test")}
    _say(f"{one.settings.name}: " + ", ".join(f"{n:,} samples for {name}" for name, n in sizes.items()))
    sent = sum(math.prod(shape) for shape, _ in one.schema.up.values())
    _say(f"In a round it sends {sent:,} numbers ({', '.join(one.schema.up)}), and nothing else of its data.")

"""The commands `equipoise deploy`: federations over real machines, with Flower."""

import math
import shlex
import signal
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from equipoise.cli.command_group import CommandGroup, SettingsCommand
from equipoise.cli.console import Back, Data, Out, Sets, err_console, interrupted, out_console, progress_bar, show_run
from equipoise.errors import EquipoiseError

if TYPE_CHECKING:
    from equipoise.callbacks.base import Callback
    from equipoise.config.experiment import Experiment
    from equipoise.flower.local_apps import ExperimentApp

_CLIENTS, _MOST = 4, 64  # default and largest number of clients of a local deployment
deploy_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a federation over real machines, with Flower. Start with `equipoise deploy local FILE.toml`.",
)

_DEFAULT = {
    "rounds": 20,
    "data": {"name": "digits-by-writer", "clients": 4},
    "model": {"name": "mlp"},
    "algorithm": {"name": "ditto", "lr": 0.1},
}


FastPoll = Annotated[
    bool,
    typer.Option(
        "--fast-poll", help="Look for messages every 0.2 s instead of Flower's 3 s, if this version of Flower is known."
    ),
]


def _need_flower() -> None:
    if any(find_spec(name) is None for name in ("flwr", "cryptography", "psutil")):
        raise EquipoiseError("deployments need Flower; install it with: pip install 'equipoise[flower]'")


def _print(text: str) -> None:
    out_console.print(escape(text), highlight=False, soft_wrap=True)


def _note(text: str) -> None:
    err_console.print(f"equipoise: {escape(text)}", highlight=False, soft_wrap=True)


@deploy_app.command("init", cls=SettingsCommand)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the app into.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.toml]", help="Experiment; default: Ditto on digits-by-writer."),
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder of the server; default: DIR-run.")
    ] = None,
    data: Data = None,
) -> None:
    """Write a Flower app for an experiment.

    \b
        equipoise deploy init app
        equipoise deploy init app experiment.toml --out runs/hospital

    Start the app with `flwr run DIR SUPERLINK`. The server has no data, so it needs the shape of a sample: it is taken
    from the data set of the experiment, or you set deploy.shape and deploy.outputs. Put your own model and data into
    DIR/app.py. Code of your own that the experiment names is copied into the app.
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
            bar = show_run(progress, experiment.data.name)
            source = data_folder(folder_of_data(file, data, bar.on_message) if file else data)
            federation = experiment.federation(source, bar.on_data_progress)
        experiment = replace(experiment, deploy=app_template.describe(federation, experiment))
        experiment = app_template.with_columns(experiment, source)
    whole = folder.resolve()
    target = out or whole.with_name(whole.name + "-run")
    code = app_template.write_app(folder, experiment, target)
    if code.installed:
        _print(f"Install {', '.join(code.installed)} on every machine: the app imports it, and it is not copied.")
    _print(f"The app is in {folder}; its server will write into {target}")
    _print("Next, with a SuperLink in Flower's configuration (see docs/deploy.md):")
    _print(f"  flwr run {shlex.quote(str(folder))} SUPERLINK --stream")


@deploy_app.command("local", cls=SettingsCommand)
def local(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml|APP_DIR", help="Experiment, or the folder of an app.")],
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients",
            metavar="N",
            min=1,
            max=_MOST,
            help="Number of clients (SuperNodes); default: data.clients or 4.",
        ),
    ] = None,
    sets: Sets = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume after the last complete round.")] = False,
    back: Back = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the progress bar and the table.")] = False,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Start every client's process anew for every message, without a resident one."),
    ] = False,
    fast_poll: FastPoll = False,
) -> None:
    """Run an experiment, or an app of your own, as a deployment on this machine.

    \b
        equipoise deploy local examples/digits.toml --clients 4
        equipoise deploy local examples/digits.toml --clients 4 --resume
        equipoise deploy local app --data records

    This starts a SuperLink and one SuperNode per client, with TLS and node authentication. The output folder has the
    same files as that of `equipoise run`; its folder `deployment` has the keys, the clients' data and states, and all
    logs.

    The clients of an app are the files or folders in --data; or else the folders clients/* of the app, with a
    client.toml each; or else as many as deploy.clients says, and the function data() of app.py gets their names. Data
    of your own (data.name = "folder", or a function) have as many clients as there are.
    """
    _need_flower()
    from equipoise.flower.local_apps import LocalApp, OwnApp
    from equipoise.flower.local_deployment import LocalDeployment
    from equipoise.reporting import comparison, comparison_table
    from equipoise.runs.launch import default_folder
    from equipoise.storage import run_index

    progress = progress_bar()
    bar = show_run(None if quiet else progress, file.stem)
    app: LocalApp
    if file.is_dir():
        app = OwnApp(file, sets or [], data, clients)
    else:
        app = _experiment_app(file, clients, sets or [], data, bar)
    folder = out or default_folder(Path(file.resolve().name), app.experiment, "-deployed")
    run = LocalDeployment(app, folder, bar, warm=not cold, fast_poll=fast_poll).run
    again = ["equipoise", "deploy", "local", str(file), *(["--clients", str(clients)] if clients else [])]
    again += [x for s in sets or [] for x in ("--set", s)] + ["--out", str(folder)]
    again += (["--data", str(data)] if data else []) + ["--cold"] * cold + ["--fast-poll"] * fast_poll
    try:
        with _sigterm_as_ctrl_c(), nullcontext() if quiet else progress:
            run(resume, back)
    except KeyboardInterrupt:
        interrupted(f"stopped after round {bar.done}, and all processes have ended", shlex.join([*again, "--resume"]))
    if not quiet:
        out_console.print(comparison_table.as_table(comparison.compare(run_index.find_runs([folder]))))
        _print(f"Run folder: {folder}")


def _experiment_app(
    file: Path, clients: int | None, sets: list[str], data: Path | None, bar: "Callback"
) -> "ExperimentApp":
    """Return the app for an experiment, with its data."""
    from equipoise.config.experiment import Experiment
    from equipoise.data.sources import data_folder
    from equipoise.flower.local_apps import ExperimentApp
    from equipoise.runs.launch import folder_of_data

    sets = [*sets, "engine.kind=flower"]
    given = Experiment.load(file, sets)
    clients = _number_of_clients(clients, given)
    experiment = Experiment.load(file, [*sets, f"data.clients={clients}"]) if clients else given
    federation = experiment.federation(data_folder(folder_of_data(file, data, bar.on_message)), bar.on_data_progress)
    for note in federation.notes:
        bar.on_message(note)
    return ExperimentApp(experiment, federation)


def _number_of_clients(wanted: int | None, experiment: "Experiment") -> int | None:
    """Return the number of clients that was asked for, or None for all that own data have.

    Args:
        wanted: what `--clients` says, if anything.
        experiment: the experiment as the file and `--set` say it.
    """
    given = experiment.data
    own = given is not None and given.source.own
    said = given.dealing.clients if given is not None else None
    if wanted is not None and said is not None and wanted != said:
        raise EquipoiseError(
            f"--clients {wanted} does not agree with data.clients = {said}; leave one of them out, or set "
            f"data.clients with --set data.clients={wanted}"
        )
    if said is not None and said > _MOST and not own:
        raise EquipoiseError(
            f"data.clients = {said} would start {said} SuperNodes on this machine, and {_MOST} are allowed; choose "
            f"fewer with --set data.clients={_CLIENTS}"
        )
    return wanted or said or (None if own else _CLIENTS)


class _sigterm_as_ctrl_c:
    """Handles SIGTERM like Ctrl-C, so that all processes are stopped first."""

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, self._stop)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    @staticmethod
    def _stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt


@deploy_app.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the certificates into.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Name or address of the SuperLink, as clients reach it."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="Days for which the certificates are valid.")
    ] = 365,
) -> None:
    """Make certificates for a SuperLink.

    \b
        equipoise deploy certificates certificates --host superlink.example.org

    ca.crt is the certificate of the authority: copy it to every machine. Keep server.pem and server.key with the
    SuperLink.
    """
    _need_flower()
    from equipoise.flower.credentials import write_certificates

    if (folder / "server.key").exists():
        raise EquipoiseError(f"{folder} has certificates already; choose another folder or remove them first")
    write_certificates(folder, hosts or ["127.0.0.1", "localhost"], days)
    _print(f"{folder}: ca.crt (for every machine), server.pem and server.key (for the SuperLink only)")


@deploy_app.command("client")
def client(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the client: key, settings, state.")],
    name: Annotated[str, typer.Option("--name", help="Name of the client, which no other client may have.")],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="PATH", help="Folder or file with its samples; default: DIR/data.")
    ] = None,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Do not take part in training, only adapt the result.")
    ] = False,
    scores: Annotated[bool, typer.Option("--scores/--no-scores", help="Send scores of its models.")] = True,
    counts: Annotated[
        bool, typer.Option("--counts/--no-counts", help="Send numbers of samples; without them, no scores either.")
    ] = True,
    max_releases: Annotated[
        int | None,
        typer.Option("--max-releases", metavar="N", min=1, help="Most private messages that may ever leave."),
    ] = None,
    max_epsilon: Annotated[
        float | None, typer.Option("--max-epsilon", metavar="E", help="Largest epsilon of all of them together.")
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Set it up for a resident process, so that messages are answered in seconds.")
    ] = False,
) -> None:
    """Make the key and the settings of a client, on its machine.

    \b
        equipoise deploy client clients/ward-3 --name ward-3 --data /data/ward-3
        equipoise deploy client clients/ward-3 --name ward-3 --data /data/ward-3 --warm

    Under privacy a client sends the messages of one run and no more. --max-releases and --max-epsilon allow more, or
    less, over all runs and experiments.
    """
    _need_flower()
    from equipoise.flower import app_template
    from equipoise.flower.credentials import write_key
    from equipoise.flower.warm.launch import WarmFolder

    if not 0 < len(name) <= 256 or not name.isprintable():
        raise EquipoiseError("--name must have 1 to 256 characters, all of them printable")
    if (folder / "key").exists():
        raise EquipoiseError(f"{folder} is a client already; choose another folder")
    if max_epsilon is not None and not 0 < max_epsilon < math.inf:
        raise EquipoiseError(f"--max-epsilon {max_epsilon:g} is not allowed; it must be a number above 0")
    limits = {"max_releases": max_releases, "max_epsilon": max_epsilon}
    switched_off = {key: False for key, on in (("evaluate", scores), ("counts", counts)) if not on}
    if warm:
        WarmFolder(folder / "warm").prepare()
    settings = app_template.write_settings(folder, name, data or folder / "data", unseen, **switched_off, **limits)
    write_key(folder / "key")
    _print(f"{settings} names the client, its data and its state; {folder / 'key'} must never leave this machine.")
    _print("Give the public key to the operator of the SuperLink, to register it:")
    key, toml = (shlex.quote(str(path)) for path in (folder / "key", settings))
    _print(f"  flwr supernode register {shlex.quote(str(folder / 'key.pub'))} SUPERLINK --name {shlex.quote(name)}")
    _print("Then start the client with the operator's ca.crt:")
    if warm:
        _print(
            f"  equipoise deploy supernode {shlex.quote(str(folder))} --superlink HOST:PORT --root-certificates ca.crt"
        )
        return
    _print(
        f"  flower-supernode --superlink HOST:PORT --root-certificates ca.crt --auth-supernode-private-key {key} "
        f"--node-config {toml}"
    )


@deploy_app.command("supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the client, as `deploy client` makes it.")],
    cold: Annotated[
        bool, typer.Option("--cold", help="Without a resident process, as flower-supernode alone.")
    ] = False,
    fast_poll: FastPoll = False,
) -> None:
    """Start a client's SuperNode with a resident process that runs its messages.

    \b
        equipoise deploy supernode clients/ward-3 --superlink HOST:PORT --root-certificates ca.crt

    All other options are those of flower-supernode; its key and its settings are taken from DIR. Signals and the exit
    code are passed on, and everything that the SuperNode has started ends with it. Its port answers to you only.
    """
    _need_flower()
    from equipoise.flower import own_user_only
    from equipoise.flower.processes import own_user_command
    from equipoise.flower.warm.launch import NO_WARM, WarmFolder, available, become_supernode, supernode_command

    for file in ("key", "client.toml"):
        if not (folder / file).exists():
            raise EquipoiseError(f"{folder} is not a client: it has no {file}; `equipoise deploy client` makes one")
    command = [*supernode_command(fast_poll), *context.args]
    for option, file in (("--auth-supernode-private-key", "key"), ("--node-config", "client.toml")):
        if not any(argument.partition("=")[0] == option for argument in context.args):
            command += [option, str(folder / file)]
    if not own_user_only.supported():
        _note("this machine cannot tell whose connections they are, so every user of it can reach the SuperNode's port")
    if not cold and not available():
        cold = True
        _note(f"{NO_WARM}, so the client runs cold, slower but with the same results")
    become_supernode(None if cold else WarmFolder(folder / "warm"), own_user_command(command))


@deploy_app.command("check")
def check(
    settings: Annotated[Path, typer.Argument(metavar="client.toml", help="Settings of the client.")],
    app: Annotated[Path, typer.Option("--app", metavar="DIR", help="App that `deploy init` wrote.")],
) -> None:
    """Check that a client's data fit the experiment, and list all that would leave the client.

    \b
        equipoise deploy check clients/ward-3/client.toml --app app

    Do this before you start the client's SuperNode. `evaluate = false` and `counts = false` in client.toml keep scores
    and numbers of samples on this machine; `max_releases` and `max_epsilon` limit what leaves under privacy.
    """
    _need_flower()
    from equipoise.flower.apps import load_app
    from equipoise.flower.client import Client
    from equipoise.flower.codec import RejectedMessage
    from equipoise.storage.run_folder import read_toml

    found = load_app(app)
    one = Client(found.client_plan, read_toml(settings), found.data)
    federation = one.checked_data()
    try:
        left = one.check_budget()
    except RejectedMessage as error:
        raise EquipoiseError(str(error)) from None
    sizes = {name: int(getattr(federation, name).lengths[0]) for name in ("train", "validation", "test")}
    _print(f"{one.settings.name}: " + ", ".join(f"{n:,} samples for {name}" for name, n in sizes.items()))
    if found.client_plan.experiment.deploy.horizon and federation.series is None:
        _print("its data do not say of which time series its samples are windows, so its forecasts are not scored")
    for line in [*one.disclosures(), *([left] if left else [])]:
        _print(line)

"""What a deployment on this machine runs: an app made for an experiment, or an app of the user's own."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.config.experiment import Experiment, override
from equipoise.data.client_files import clients_in
from equipoise.data.federation import Federation
from equipoise.data.text_encoding import numbered
from equipoise.errors import EquipoiseError
from equipoise.flower import app_template, client_data
from equipoise.flower.apps import load_app
from equipoise.flower.client import Client
from equipoise.flower.deployment_plan import EXPERIMENT
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import read_toml


class LocalApp(ABC):
    """An app, and the clients that take part in it."""

    experiment: Experiment
    "the experiment as the server will run it"
    names: tuple[str, ...]
    "names of the clients"

    @abstractmethod
    def write_app(self, folder: Path, out: Path) -> None:
        """Write the app into a folder that does not exist; `out` is the server's run folder."""

    @abstractmethod
    def write_client(self, who: int, folder: Path) -> None:
        """Write the settings of a client, and its data where they are not on this machine yet, into its folder."""


class ExperimentApp(LocalApp):
    """An app made for an experiment, whose data are divided over the clients."""

    def __init__(self, experiment: Experiment, federation: Federation):
        """Derive the section [deploy] from the data; nothing is written yet.

        Args:
            experiment: the experiment.
            federation: the data of all clients.
        """
        deploy = app_template.describe(federation, experiment)
        training, _ = federation.by_name
        # Many clients share the cores of this machine.
        update = {"clients": len(training), "threads": deploy.threads or 1}
        self.federation, self.names = federation, federation.names
        experiment = replace(experiment, deploy=deploy.model_copy(update=update))
        self.experiment = app_template.without_data_code(experiment)

    def write_app(self, folder: Path, out: Path) -> None:
        """Write an app for the experiment."""
        app_template.write_app(folder, self.experiment, out)

    def write_client(self, who: int, folder: Path) -> None:
        """Write a client's settings and its samples."""
        name = self.names[who]
        app_template.write_settings(folder, name, folder / "data.safetensors", name in self.federation.unseen)
        client_data.write_client(folder / "data.safetensors", self.federation, who)


class OwnApp(LocalApp):
    """An app of the user's own, with the data that its clients have.

    The clients are, in this order of preference: the files or folders in `data`; the folders `clients/*` of the app, as
    `equipoise deploy client` writes them; or as many as wanted, whose data the function data() of app.py makes.
    """

    def __init__(self, folder: Path, sets: Sequence[str] = (), data: Path | None = None, clients: int | None = None):
        """Read the app and check the data of all clients; nothing is written yet.

        Args:
            folder: the folder of the app.
            sets: changes of experiment.toml as `section.key=value`.
            data: folder with one file or folder per client.
            clients: number of clients, which must be that of what is there.
        """
        self.folder, self.app = folder, load_app(folder)
        self.tables = override(read_toml(folder / EXPERIMENT), sets)
        deploy = self.app.plan_of(self.tables).experiment.deploy
        self.settings = self._settings(data, clients, deploy.names, deploy.clients)
        self.names = tuple(str(settings.get("name", "")) for settings in self.settings)
        training = sum(not settings.get("unseen") for settings in self.settings)
        self.tables["deploy"] = {**self.tables.get("deploy", {}), "clients": training, "threads": deploy.threads or 1}
        plan = self.app.plan_of(self.tables)
        for name in self.names:
            if deploy.names and name not in deploy.names:
                raise EquipoiseError(
                    f"deploy.names does not have the client {name!r}; it has {', '.join(deploy.names)}"
                )
        for settings in self.settings:  # before anything is started
            Client(plan, {"state": "unused", **settings}, self.app.data).checked_data()
        self.experiment = plan.experiment.deployed()

    def _settings(
        self, data: Path | None, clients: int | None, names: Sequence[str], wanted: int
    ) -> list[dict[str, Any]]:
        """Return the settings of all clients, without the folders of their states."""
        files = sorted((self.folder / "clients").glob("*/client.toml"))
        if data is not None:
            found: list[dict[str, Any]] = [
                {"name": name, "data": str(path.resolve())} for name, path in clients_in(data).items()
            ]
            where = str(data)
        elif files:
            found, where = [read_toml(file) for file in files], str(self.folder / "clients")
        elif self.app.data is not None:
            if names and clients is not None and clients > len(names):
                raise EquipoiseError(f"--clients {clients} does not agree with the {len(names)} names in deploy.names")
            return [{"name": name} for name in (names[:clients] or numbered(clients or wanted))]
        else:
            raise EquipoiseError(
                f"{self.folder} has neither a function data() in app.py nor folders clients/*/client.toml; with "
                "--data, name a folder that has one file or folder per client"
            )
        if clients is not None and clients != len(found):
            raise EquipoiseError(f"--clients {clients} does not agree with the {len(found)} clients in {where}")
        return found

    def write_app(self, folder: Path, out: Path) -> None:
        """Copy the app, with the changed experiment and the run folder of this deployment."""
        shutil.copytree(self.folder, folder, ignore=_ignored(folder, out))
        atomic_files.write_text(folder / EXPERIMENT, tomli_w.dumps(self.tables))
        project = folder / "pyproject.toml"
        tables = read_toml(project) if project.exists() else app_template.project(self.experiment, "")
        config = tables.setdefault("tool", {}).setdefault("flwr", {}).setdefault("app", {}).setdefault("config", {})
        config |= {"out": str(out.resolve()), "resume": False, "back": 0}
        atomic_files.write_text(project, tomli_w.dumps(tables))

    def write_client(self, who: int, folder: Path) -> None:
        """Write a client's settings, with a state of its own for this deployment."""
        atomic_files.make_folder(folder)
        settings = {**self.settings[who], "state": str((folder / "state").resolve())}
        atomic_files.write_text(folder / "client.toml", tomli_w.dumps(settings))


def _ignored(*places: Path) -> Any:
    """Return a filter for copytree: clients' keys and states, caches and the target itself are no part of an app."""
    inside = {place.resolve() for place in places}

    def ignore(folder: str, names: list[str]) -> list[str]:
        unwanted = {"clients", "__pycache__", "runs"}
        return [
            name for name in names if name in unwanted or name.startswith(".") or Path(folder, name).resolve() in inside
        ]

    return ignore

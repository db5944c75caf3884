"""Writing a Flower app for an experiment: what `flwr run` takes, and what a client's machine needs."""

from pathlib import Path
from typing import Any

import tomli_w

from equipoise.config.deployment import Deploy
from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.errors import EquipoiseError
from equipoise.flower.deployment_plan import EXPERIMENT, DeploymentPlan
from equipoise.storage import atomic_files

_APP = '''"""The two halves of this Flower app: the SuperLink runs `server`, every SuperNode runs `client`.

A model of your own, or data that are not arrays in a folder, are functions here:

    def model():                # an nn.Module; name its last layer `head` for methods that keep the head personal
        return MyNetwork()

    def data(settings):         # the client's settings; returns (x, y), a Dataset, or {"train": ..., "test": ...}
        return MyDataset(settings["data"])

    app = App(__file__, model=model, data=data)
"""

from equipoise.flower import App

app = App(__file__)
server = app.server
client = app.client
'''

_README = """# {name}

A Flower app written by `equipoise deploy init`. What is in it:

- `experiment.toml`: what is trained, how, and in `[deploy]` whom a round waits for, and how long
- `app.py`: the server's and the clients' half; a model or data of your own are functions here
- `pyproject.toml`: where Flower finds both, and the server's run folder

Start it from this folder, with a SuperLink named in Flower's configuration:

    flwr run . SUPERLINK --stream

After a crash of the server, go on from the last round:

    flwr run . SUPERLINK --stream --run-config resume=true
"""


def describe(federation: Federation, deploy: Deploy) -> Deploy:
    """The section [deploy] with what the server must know of such data."""
    (x, y), classes = federation.sample(), federation.classes
    told = {
        "shape": tuple(x.shape[1:]),
        "inputs": "numbers" if x.is_floating_point() else "symbols",
        "outputs": federation.outputs,
        "targets": "numbers" if classes is None else "classes",
        "target_shape": tuple(y.shape[1:]),
        "title": federation.title,
    }
    return deploy.model_copy(update=told)


def write_app(folder: Path, experiment: Experiment, out: Path) -> None:
    """The app's four files. Whether the server can work with them is tried first."""
    experiment = experiment.deployed()
    plan = DeploymentPlan(experiment)
    if experiment.model is not None:
        plan.task()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EquipoiseError(f"{folder} is not empty; choose another folder for the app")
    atomic_files.make_folder(folder)
    name = "equipoise-" + "".join(c if c.isalnum() else "-" for c in experiment.algorithm_name)
    project: dict[str, Any] = {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"{experiment.algorithm_name} on {plan.title}",
            "dependencies": ["equipoise[flower]" if experiment.privacy is None else "equipoise[flower,privacy]"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "equipoise",
                    "components": {"serverapp": "app:server", "clientapp": "app:client"},
                    "config": {"out": str(out.resolve()), "resume": False},
                }
            }
        },
    }
    atomic_files.write_text(folder / "pyproject.toml", tomli_w.dumps(project))
    atomic_files.write_text(folder / EXPERIMENT, tomli_w.dumps(experiment.tables()))
    atomic_files.write_text(folder / "app.py", _APP)
    atomic_files.write_text(folder / "README.md", _README.format(name=name))


def write_settings(folder: Path, name: str, data: Path, unseen: bool = False) -> Path:
    """The settings of a client, which its SuperNode is given as --node-config."""
    atomic_files.make_folder(folder)
    settings = {
        "name": name,
        "data": str(data.resolve()),
        "state": str((folder / "state").resolve()),
        "unseen": unseen,
        "evaluate": True,
    }
    atomic_files.write_text(folder / "client.toml", tomli_w.dumps(settings))
    return folder / "client.toml"

"""Files of a Flower app for an experiment: what `flwr run` takes, and the settings of a client."""

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

To use your own model, or data that are not arrays in a folder, add functions to this file:

    def model():                # returns an nn.Module; name its last layer `head` for methods with a personal head
        return MyNetwork()

    def data(settings):         # gets the client's settings; returns (x, y), a Dataset or {"train": ..., "test": ...}
        return MyDataset(settings["data"])

    app = App(__file__, model=model, data=data)
"""

from equipoise.flower import App

app = App(__file__)
server = app.server
client = app.client
'''

_README = """# {name}

A Flower app written by `equipoise deploy init`. It contains:

- `experiment.toml`: what is trained and how, and in `[deploy]` how many clients a round waits for, and how long
- `app.py`: the server's half and the clients' half; add functions here for your own model or data
- `pyproject.toml`: tells Flower where to find both halves, and names the server's run folder

Start it from this folder, with a SuperLink that is named in Flower's configuration:

    flwr run . SUPERLINK --stream

After a crash of the server, resume from its last checkpoint:

    flwr run . SUPERLINK --stream --run-config resume=true
"""


def describe(federation: Federation, deploy: Deploy) -> Deploy:
    """Return the section [deploy] with what the server must know about this federation's data."""
    (x, y), classes = federation.sample(), federation.classes
    facts = {
        "shape": tuple(x.shape[1:]),
        "inputs": "numbers" if x.is_floating_point() else "symbols",
        "outputs": federation.outputs,
        "targets": "numbers" if classes is None else "classes",
        "target_shape": tuple(y.shape[1:]),
        "title": federation.title,
    }
    return deploy.model_copy(update=facts)


def write_app(folder: Path, experiment: Experiment, out: Path) -> None:
    """Write the four files of an app, after checking that the server can build the experiment's model.

    Args:
        folder: the app's folder; it must be empty or not exist.
        experiment: the experiment.
        out: the server's run folder.
    """
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
    """Write a client's settings, which its SuperNode gets as --node-config; return the file.

    Args:
        folder: the client's folder, which also gets its state.
        name: the client's name.
        data: the folder or file with its samples.
        unseen: whether it does not train, but only adapts the result.
    """
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

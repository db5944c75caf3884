"""Files of a Flower app for an experiment: what `flwr run` takes, and the settings of a client."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.config.deployment import Deploy
from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.data.sources.folder import Folder
from equipoise.errors import EquipoiseError
from equipoise.flower.app_code import AppCode
from equipoise.flower.deployment_plan import EXPERIMENT, DeploymentPlan
from equipoise.registry import is_own_code, short_name
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import CALLBACKS

_APP = '''"""The two halves of this Flower app: the SuperLink runs `server`, every SuperNode runs `client`.

To use your own model, or data that are not files in a folder, add functions to this file:

    def model():                # returns an nn.Module; name its last layer `head` for methods with a personal head
        return MyNetwork()

    def data(settings):         # gets the client's settings; returns (x, y), a Dataset or {"train": ..., "test": ...}
        return MyDataset(settings["data"])

    app = App(__file__, model=model, data=data)

An algorithm of your own is passed in the same way: App(__file__, algorithm=MyAlgorithm).
"""

{imports}from equipoise.flower import App

app = App(__file__{given})
server = app.server
client = app.client
'''

_README = """# {name}

A Flower app written by `equipoise deploy init`. It contains:

- `experiment.toml`: what is trained and how, and in `[deploy]` how many clients a round waits for, and how long
- `app.py`: the server's half and the clients' half; add functions here for your own model or data
{files}- `pyproject.toml`: tells Flower where to find both halves, and names the server's run folder

Start it from this folder, with a SuperLink that is named in Flower's configuration:

    flwr run . SUPERLINK --stream

After a crash of the server, resume from its last checkpoint:

    flwr run . SUPERLINK --stream --run-config resume=true

If the run has gone wrong, go back two complete rounds before its newest checkpoint:

    flwr run . SUPERLINK --stream --run-config "resume=true back=2"
"""


def describe(federation: Federation, experiment: Experiment) -> Deploy:
    """Return the section [deploy] of an experiment with what the server must know about this federation's data."""
    (x, y), classes, series = federation.sample(), federation.classes, federation.series
    facts = {
        "shape": tuple(x.shape[1:]),
        "inputs": "numbers" if x.is_floating_point() else "symbols",
        "outputs": federation.outputs * experiment.schedule.outputs_per_number,
        "targets": "numbers" if classes is None else "classes",
        "target_shape": tuple(y.shape[1:]),
        "title": federation.title,
        **({} if series is None else {"horizon": series.horizon, "step": series.step, "unit": series.unit}),
    }
    return experiment.deploy.model_copy(update=facts)


def with_columns(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with the columns and classes of a folder of tables, which a client does not know itself.

    Args:
        experiment: the experiment.
        folder: the data folder.
    """
    data = experiment.data
    if data is None or not isinstance(data.source, Folder):
        return experiment
    source = data.source.resolved(data.request(folder, experiment.schedule.seed, experiment.folders))
    return replace(experiment, data=replace(data, source=source))


def without_data_code(experiment: Experiment) -> Experiment:
    """Return the experiment without a section [data] that names own code: in a deployment, clients have their data."""
    data = experiment.data
    if data is None or not _names_code(data.table()):
        return experiment
    deploy = experiment.deploy.model_copy(update={"split": experiment.deploy.split or data.dealing.split})
    return replace(experiment, data=None, deploy=deploy)


def _names_code(table: Mapping[str, Any]) -> bool:
    """Tell whether the section [data] or a partition in it names own code."""
    inner = [value for value in table.values() if isinstance(value, Mapping)]
    return any(is_own_code(table.get(key)) for key in ("name", "kind")) or any(map(_names_code, inner))


def project(experiment: Experiment, out: str) -> dict[str, Any]:
    """Return the content of an app's pyproject.toml, which tells Flower where both halves are.

    Args:
        experiment: the experiment.
        out: the server's run folder.
    """
    algorithm = short_name(experiment.algorithm_name)
    return {
        "project": {
            "name": _project_name(experiment),
            "version": "1.0.0",
            "description": f"{algorithm} on {DeploymentPlan(experiment).title}",
            "dependencies": ["equipoise[flower]" if experiment.privacy is None else "equipoise[flower,privacy]"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "equipoise",
                    "components": {"serverapp": "app:server", "clientapp": "app:client"},
                    "config": {"out": out, "resume": False, "back": 0},
                }
            }
        },
    }


def _project_name(experiment: Experiment) -> str:
    return "equipoise-" + "".join(c if c.isalnum() else "-" for c in short_name(experiment.algorithm_name))


def write_app(folder: Path, experiment: Experiment, out: Path) -> AppCode:
    """Write the files of an app, after checking that the server can build the experiment's model.

    Args:
        folder: the app's folder; it must be empty or not exist.
        experiment: the experiment.
        out: the server's run folder.

    Returns:
        The own code that the experiment names, which app.py passes.
    """
    experiment = without_data_code(experiment.deployed())
    plan = DeploymentPlan(experiment)
    if experiment.model is not None:
        plan.task()
    code = AppCode.of(experiment)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EquipoiseError(f"{folder} is not empty; choose another folder for the app")
    atomic_files.make_folder(folder)
    for target, source in code.files.items():
        atomic_files.make_folder((folder / target).parent)
        atomic_files.write_text(folder / target, source.read_text(encoding="utf-8"))
    imports = "".join(f"import {module}\n" for module in sorted(code.modules))
    given = "".join(f", {section}={value}" for section, value in code.given.items())
    listed = "".join(f"- `{target}`: own code that `experiment.toml` names\n" for target in sorted(code.files))
    name = _project_name(experiment)
    atomic_files.write_text(folder / "pyproject.toml", tomli_w.dumps(project(experiment, str(out.resolve()))))
    atomic_files.write_text(folder / EXPERIMENT, tomli_w.dumps(_without_passed(experiment.tables())))
    atomic_files.write_text(folder / "app.py", _APP.replace("{imports}", imports).replace("{given}", given))
    atomic_files.write_text(folder / "README.md", _README.format(name=name, files=listed))
    return code


def _without_passed(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of an experiment without own metrics and callbacks, which app.py passes."""
    kept = dict(tables)
    if any(map(is_own_code, kept.get("metrics", ()))):
        del kept["metrics"]
    if CALLBACKS in kept:
        kept[CALLBACKS] = [table for table in kept[CALLBACKS] if not is_own_code(table["name"])]
    return kept


def write_settings(folder: Path, name: str, data: Path, unseen: bool = False, **own: bool | float | None) -> Path:
    """Write a client's settings, which its SuperNode gets as --node-config; return the file.

    Args:
        folder: the client's folder, which also gets its state.
        name: the client's name.
        data: the folder or file with its samples.
        unseen: whether it does not train, but only adapts the result.
        **own: other settings of a client, such as max_releases; what is None is left out.
    """
    atomic_files.make_folder(folder)
    settings = {
        "name": name,
        "data": str(data.resolve()),
        "state": str((folder / "state").resolve()),
        "unseen": unseen,
        "evaluate": True,
        **{key: value for key, value in own.items() if value is not None},
    }
    atomic_files.write_text(folder / "client.toml", tomli_w.dumps(settings))
    return folder / "client.toml"

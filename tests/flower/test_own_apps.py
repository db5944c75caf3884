"""Own code in deployments: only what app.py passes is used, and an app of one's own is rehearsed with one command.

tests/flower/test_disturbed_deployment.py really deploys the app.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from equipoise import Ditto, LoadRequest
from equipoise.config.experiment import Experiment
from equipoise.data.sources.folder import Folder
from equipoise.errors import EquipoiseError
from equipoise.flower import App
from equipoise.flower.app_code import AppCode
from equipoise.flower.apps import load_app
from equipoise.flower.client_data import client_data
from equipoise.flower.local_apps import OwnApp
from tests.support.commands import equipoise_command, is_one_sentence, one_sentence, small
from tests.support.own_code import write_experiment

DEPLOY = {"shape": [4], "outputs": 3}
OWN_MODULES = {"helper", "mine", "net", "rest", "blobs", "equipoise_app", "trap", "local_package", "sibling_of_it"}
APP = """
import numpy as np
from torch import nn

from equipoise import Ditto
from equipoise.flower import App


class Mine(Ditto):
    extra: float = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


def data(settings):
    if settings["name"] == "broken":
        raise OSError("the disk\\nis on fire")
    rng = np.random.default_rng(sum(map(ord, settings["name"])))
    return rng.normal(size=(20, 4)), rng.integers(0, 3, 20)


app = App(__file__, algorithm=Mine(lr=0.1, extra=2.0), model=Net, data=data)
server = app.server
client = app.client
"""


class Mine(Ditto):
    """An algorithm of one's own."""

    extra: float = 1.0


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an app imports is gone after the test: other apps have files of the same names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in OWN_MODULES]:
        del sys.modules[name]


def experiment_in(folder: Path, **tables: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"rounds": 1, "model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "deploy": DEPLOY, **tables}
    (folder / "experiment.toml").write_text(tomli_w.dumps(given))
    return folder / "app.py"


TRAPS = [
    {"algorithm": {"name": "trap:Thing"}},
    {"algorithm": {"name": "trap.py:Thing"}},
    {"model": {"name": "trap:Thing"}},
    {"attack": {"name": "trap:Thing"}},
    {"reducer": {"name": "trap:Thing"}},
    {"data": {"name": "trap:thing"}},
    {"data": {"name": "linear", "partition": {"kind": "trap:Thing"}}},
    {"data": {"name": "linear", "partition": {"kind": "hybrid", "first": {"kind": "trap:Thing"}}}},
]


@pytest.mark.parametrize("tables", TRAPS, ids=str)
def test_a_client_never_imports_what_the_experiment_names(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    app = App(experiment_in(tmp_path, **tables))
    with pytest.raises(EquipoiseError) as caught:
        app.plan  # noqa: B018
    is_one_sentence(caught.value, "trap", "names code, and a deployment imports no code by name")
    assert not (tmp_path / "sprung").exists()
    assert "trap" not in sys.modules


def test_an_order_to_such_a_client_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flower calls it, with any message, after experiment.toml was changed."""
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = App(experiment_in(tmp_path, algorithm={"name": "trap:Thing"}))
    with pytest.raises(EquipoiseError, match="imports no code by name"):
        app._work(None, None)  # type: ignore[arg-type]
    assert not (tmp_path / "sprung").exists()


def test_an_algorithm_is_passed_as_a_class_or_with_its_settings(tmp_path: Path) -> None:
    file = experiment_in(tmp_path, algorithm={"name": "mine.py:Mine", "lam": 0.3})
    for given in (Mine, Mine(lam=0.3)):
        experiment = App(file, algorithm=given).plan.experiment
        assert (experiment.algorithm, experiment.algorithm_name) == (Mine(lam=0.3), "mine.py:Mine")
    experiment_in(tmp_path, algorithm={"lam": 0.7})
    experiment = App(file, algorithm=Mine).plan.experiment
    assert (experiment.algorithm, experiment.algorithm_name) == (Mine(lam=0.7), "app.py:Mine")
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps({"model": {"name": "mlp"}, "deploy": DEPLOY}))
    assert App(file, algorithm=Mine(extra=3.0)).plan.experiment.algorithm == Mine(extra=3.0)


@pytest.mark.parametrize(
    ("table", "given", "words"),
    [
        ({"name": "ditto"}, Mine, "algorithm.name = 'ditto' in experiment.toml, but app.py passes Mine; write"),
        ({"lam": 0.7}, Mine(lam=0.3), "algorithm.lam = 0.7 in experiment.toml, but app.py passes 0.3"),
        ({"lamb": 0.7}, Mine(lam=0.3), "algorithm.lamb = 0.7 in experiment.toml, but app.py passes None"),
        ({"lamb": 0.7}, Mine, "unknown setting algorithm.lamb; did you mean 'lam'?"),
        ({}, 3, "is the class int; it must be a class that derives from equipoise.Algorithm"),
    ],
)
def test_an_app_and_its_experiment_must_agree(table: dict[str, Any], given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError) as caught:
        App(experiment_in(tmp_path, algorithm=table), algorithm=given).plan  # noqa: B018
    is_one_sentence(caught.value, words)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """An experiment in which everything that can be named is own code."""
    return write_experiment(tmp_path / "study")


def test_init_copies_own_code_and_what_it_imports(study: Path, tmp_path: Path) -> None:
    done = equipoise_command("deploy", "init", "app", study, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = {path.name for path in (tmp_path / "app").glob("*.py")}
    assert code == {"app.py", "mine.py", "helper.py", "net.py", "rest.py"}
    tables = tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())
    assert "data" not in tables, "clients have their own data"
    assert (tables["deploy"]["shape"], tables["deploy"]["split"]) == ([4], [0.7, 0.1, 0.2])
    assert tables["algorithm"]["name"] == "code/mine.py:Mine"
    for name in ("mine", "net", "rest"):
        (study.parent / "code" / f"{name}.py").unlink()  # the app does without
    plan = load_app(tmp_path / "app").plan
    assert type(plan.experiment.algorithm).__module__ == "mine"
    assert plan.task().head == "last"
    assert [type(part).__name__ for part in (plan.experiment.attack, plan.experiment.reducer)] == ["Louder", "MyMean"]
    assert Path(sys.modules["mine"].__file__ or "").parent == tmp_path / "app"


def test_init_passes_own_metrics_callbacks_and_schedules(tmp_path: Path) -> None:
    (tmp_path / "extras.py").write_text(
        "import equipoise as eq\n"
        "def top2(outputs, targets):\n"
        "    return (outputs.topk(2, 1).indices == targets[:, None]).any(1).float()\n"
        "def falling(round, rounds):\n"
        "    return 1 / round\n"
        "class Watch(eq.Callback):\n"
        "    every: int = 1\n"
    )
    tables = {
        "metrics": ["accuracy", "extras.py:top2"],
        "model": {"name": "mlp"},
        "data": {"name": "digits-by-writer", "clients": 2},
        "algorithm": {"name": "fedavg", "schedule": "extras.py:falling"},
        "callbacks": [{"name": "extras.py:Watch", "every": 3}, {"name": "best-model"}],
    }
    (tmp_path / "study.toml").write_text(tomli_w.dumps(tables))
    done = equipoise_command("deploy", "init", "app", "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "extras.py").unlink()
    app = load_app(tmp_path / "app")
    assert [metric.name for metric in app.plan.task().metrics.metrics] == ["accuracy", "top2"]
    assert app.plan.experiment.algorithm.schedule.factor(4, 9) == 1 / 4
    assert [type(callback).__name__ for callback in app.callbacks] == ["Watch"]
    assert app.callbacks[0].every == 3
    assert app.plan.experiment.callback_names == ("best-model",)


def test_init_copies_packages_that_lie_there_and_names_installed_ones(study: Path, tmp_path: Path) -> None:
    package = study.parent / "local_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("from equipoise import FedAvg as Mine\nimport sibling_of_it\n")
    (study.parent / "sibling_of_it.py").write_text("")
    sets = ("--set", "algorithm.name=local_package.inner:Mine", "--set", "reducer.name=equipoise:Median")
    done = equipoise_command("deploy", "init", "app", study, *sets, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Install equipoise on every machine" in done.stdout
    for name in ("local_package/__init__.py", "local_package/inner/__init__.py", "sibling_of_it.py"):
        assert (tmp_path / "app" / name).exists()
    assert "import local_package.inner\n" in (tmp_path / "app" / "app.py").read_text()


@pytest.mark.parametrize("name", ["app", "test_mine", "my-code", "random"])
def test_a_file_that_cannot_be_in_an_app_is_told(name: str, study: Path, tmp_path: Path) -> None:
    code = study.parent / "code"
    (code / f"{name}.py").write_text("from equipoise import FedAvg as Mine\n")
    setting = f"algorithm.name=code/{name}.py:Mine"
    done = equipoise_command("deploy", "init", "made", study, "--set", setting, cwd=tmp_path)
    one_sentence(done, 2, f"{name}.py cannot be part of an app under this name; rename the file")
    assert not (tmp_path / "made").exists()


def test_an_experiment_without_own_code_has_none() -> None:
    assert AppCode.of(Experiment.parse(small())) == AppCode()


# Tables as a client's data


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "wards"
    folder.mkdir()
    (folder / "a.csv").write_text("u,v,label\n1,2,ill\n3,4,well\n5,6,ill\n")
    (folder / "b.csv").write_text("label,v,u\nunsure,2,1\nwell,4,3\n")
    return folder


def test_a_client_reads_a_table_as_the_experiment_says(tables: Path, tmp_path: Path) -> None:
    source = Folder(path=str(tables), target="label").resolved(LoadRequest(tmp_path))
    assert (source.features, source.classes) == (("u", "v"), ("ill", "unsure", "well"))
    deploy = {"shape": [2], "outputs": 3}
    file = experiment_in(tmp_path, data={"name": "folder", **source.table()}, deploy=deploy)
    found = client_data(App(file).plan, "b", {"data": str(tables / "b.csv")})
    assert found.x[found.y == 1].tolist() == [[1, 2]], "columns in the order of the experiment, labels of all clients"
    assert sorted(found.y.tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "label"}, "clients must agree on the order of its columns; list them in data.features"),
        ({"target": "label", "features": ["u", "v"]}, "the labels are text, such as 'ill', and a client does not know"),
        ({"target": "label", "features": ["u", "v"], "classes": ["ill"]}, "the label 'well', which is not one of"),
        ({}, "data.target is missing"),
    ],
)
def test_a_table_that_a_client_cannot_know_brings_a_sentence(
    settings: dict[str, Any], words: str, tables: Path, tmp_path: Path
) -> None:
    file = experiment_in(tmp_path, data={"name": "folder", **settings}, deploy={"shape": [2], "outputs": 3})
    with pytest.raises(EquipoiseError) as caught:
        client_data(App(file).plan, "a", {"data": str(tables / "a.csv")})
    is_one_sentence(caught.value, words)


def test_init_writes_columns_and_classes_for_the_clients(tables: Path, tmp_path: Path) -> None:
    own = {"data": {"name": "folder", "path": "wards", "target": "label"}, "model": {"name": "mlp"}}
    (tmp_path / "own.toml").write_text(tomli_w.dumps({**own, "algorithm": {"name": "fedavg"}}))
    done = equipoise_command("deploy", "init", "app", "own.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())
    assert (written["data"]["features"], written["data"]["classes"]) == (["u", "v"], ["ill", "unsure", "well"])
    assert (written["deploy"]["outputs"], written["deploy"]["title"]) == (3, "wards")


def test_clients_are_split_as_deploy_says(tmp_path: Path) -> None:
    file = experiment_in(tmp_path, deploy={**DEPLOY, "split": [0.5, 0.25, 0.25]})
    np.savez(tmp_path / "a.npz", x=np.zeros((8, 4)), y=np.zeros(8, int))
    found = client_data(App(file).plan, "a", {"data": str(tmp_path / "a.npz")})
    assert [len(split[0]) for split in (found.train, found.validation, found.test)] == [4, 2, 2]
    with pytest.raises(EquipoiseError, match="must be three fractions"):
        App(experiment_in(tmp_path, deploy={**DEPLOY, "split": [0.5, 0.5, 0.5]})).plan  # noqa: B018


# An app of one's own


@pytest.fixture
def app(tmp_path: Path) -> Path:
    experiment_in(tmp_path / "app", algorithm={}, deploy={**DEPLOY, "clients": 3}).write_text(APP)
    (tmp_path / "app" / "experiment.toml").write_text(
        tomli_w.dumps({"rounds": 1, "engine": {"dtype": "float64"}, "deploy": {**DEPLOY, "clients": 3}})
    )
    return tmp_path / "app"


def records(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        np.savez(folder / f"{name}.npz", x=np.ones((9, 4)), y=np.arange(9) % 3)
    return folder


def test_the_clients_of_an_app_are_those_of_data_else_its_own_else_made(app: Path, tmp_path: Path) -> None:
    made = OwnApp(app)
    assert made.names == ("client-0", "client-1", "client-2")
    assert made.experiment.algorithm.table()["extra"] == 2.0
    assert OwnApp(app, clients=2).names == ("client-0", "client-1")
    names = ["deploy.names=['x', 'y', 'z']"]
    assert OwnApp(app, sets=names).names == ("x", "y", "z")
    assert OwnApp(app, sets=names, clients=2).names == ("x", "y")
    with pytest.raises(EquipoiseError, match=r"--clients 5 does not agree with the 3 names in deploy\.names"):
        OwnApp(app, sets=names, clients=5)
    for name in ("ward 1", "ward 2"):
        done = equipoise_command("deploy", "client", f"app/clients/{name}", "--name", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    theirs = OwnApp(app)
    assert theirs.names == ("ward 1", "ward 2")
    assert theirs.experiment.deploy.clients == 2
    given = OwnApp(app, data=records(tmp_path / "records", "a", "b"))
    assert given.names == ("a", "b")
    assert given.settings[0]["data"] == str(tmp_path / "records" / "a.npz")


def test_a_rehearsal_leaves_the_app_as_it_is_and_has_states_of_its_own(app: Path, tmp_path: Path) -> None:
    equipoise_command("deploy", "client", "app/clients/ward", "--name", "ward", cwd=tmp_path)
    before = {path: path.read_bytes() for path in app.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    rehearsed = OwnApp(app, sets=["rounds=7"])
    rehearsed.write_app(tmp_path / "copy", tmp_path / "out")
    rehearsed.write_client(0, tmp_path / "ward")
    copied = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert copied == ["app.py", "experiment.toml", "pyproject.toml"]
    written = tomllib.loads((tmp_path / "copy" / "experiment.toml").read_text())
    assert (written["rounds"], written["deploy"]["clients"]) == (7, 1)
    project = tomllib.loads((tmp_path / "copy" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["out"] == str(tmp_path / "out")
    assert tomllib.loads((tmp_path / "ward" / "client.toml").read_text())["state"] == str(tmp_path / "ward" / "state")
    after = {path: path.read_bytes() for path in app.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    assert after == before
    assert load_app(tmp_path / "copy").plan.experiment.deployed().tables() == rehearsed.experiment.tables()


def test_local_tells_what_does_not_fit_before_it_starts_anything(app: Path, tmp_path: Path) -> None:
    records(tmp_path / "records", "a", "b")
    (tmp_path / "empty").mkdir()
    one = ("--set", "deploy.clients=1", "--set")
    for words, sentence in (
        (("--clients", 3, "--data", "records"), "--clients 3 does not agree with the 2 clients in records"),
        (("--data", "nowhere"), "nowhere is not a folder with one file or folder per client"),
        (("--data", "empty"), "empty has no data"),
        (("--set", "algorithm.lr=0.2"), "algorithm.lr = 0.2 in experiment.toml, but app.py passes 0.1"),
        ((*one, "deploy.names=['a', 'c']", "--data", "records"), "deploy.names does not have the client 'b'"),
        ((*one, "deploy.names=['broken']"), "data() of app.py failed for 'broken': OSError: the disk"),
        (("--set", "deploy.shape=[5]"), "the model does not take inputs of shape (5,)"),
    ):
        done = equipoise_command("deploy", "local", "app", "--out", "run", *words, cwd=tmp_path)
        one_sentence(done, 2, sentence)
        assert not (tmp_path / "run").exists()
    done = equipoise_command("deploy", "local", "empty", "--out", "run", cwd=tmp_path)
    one_sentence(done, 2, "empty is not an app: it has no app.py")
    (app / "app.py").write_text(APP.replace(", data=data)", ")"))
    done = equipoise_command("deploy", "local", "app", "--out", "run", cwd=tmp_path)
    one_sentence(done, 2, "neither a function data() in app.py nor folders clients/*/client.toml; with --data")


def test_check_tells_in_one_sentence_that_data_failed(app: Path, tmp_path: Path) -> None:
    equipoise_command("deploy", "client", "ward", "--name", "broken", cwd=tmp_path)
    done = equipoise_command("deploy", "check", "ward/client.toml", "--app", "app", cwd=tmp_path)
    one_sentence(done, 2, "the function data() of app.py failed for 'broken': OSError: the disk")

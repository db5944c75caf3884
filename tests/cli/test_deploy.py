"""The commands about deployments, used as an operator and as the owner of a client would."""

import os
import re
import ssl
import stat
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from equipoise.cli import deploy as deploy_commands
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.flower import own_user_only
from equipoise.flower.local_deployment import LocalDeployment
from equipoise.flower.processes import own_user_command
from equipoise.flower.warm import launch
from tests.support.commands import equipoise_command
from tests.support.waiting import LIMIT

OWN = """
rounds = 4
[model]
name = "mlp"
[algorithm]
name = "ditto"
lr = 0.1
[deploy]
shape = [5]
outputs = 3
"""
DIGITS = """
rounds = 4
[data]
name = "digits-by-writer"
[model]
name = "softmax"
[algorithm]
name = "fedrep"
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An experiment on data that only the clients have."""
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path / "own.toml"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    (tmp_path / "digits.toml").write_text(DIGITS)
    return tmp_path / "digits.toml"


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """`deploy check` lets app.py import what lies beside it; other tests should not notice."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def deploy(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return equipoise_command("deploy", *arguments, cwd=cwd)


def good(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(folder: Path) -> dict[str, Any]:
    """Everything below a folder, without what Python keeps of compiled modules."""
    found = [p for p in folder.rglob("*") if "__pycache__" not in p.parts]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def refused(*arguments: object, cwd: Path, words: tuple[str, ...]) -> None:
    """Exit code 2, one sentence with these words, no traceback, and everything as it was."""
    before = tree(cwd)
    done = deploy(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("equipoise: ")]
    assert said == [done.stderr.splitlines()[-1]]
    for word in words:
        assert word in said[0]
    assert tree(cwd) == before


# deploy init


def test_init_writes_an_app(tmp_path: Path) -> None:
    printed = good(deploy("init", "app", cwd=tmp_path))
    assert f"The app is in app; its server will write into {tmp_path}/app-run" in " ".join(printed.split())
    assert "flwr run app SUPERLINK --stream" in printed
    assert sorted(tree(tmp_path)) == [
        "app",
        *(f"app/{n}" for n in ("README.md", "app.py", "experiment.toml", "pyproject.toml")),
    ]
    tables = tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())
    shown = {k: tables["deploy"][k] for k in ("shape", "inputs", "outputs", "targets", "target_shape")}
    expected = {"shape": [1, 28, 28], "inputs": "numbers", "outputs": 10, "targets": "classes", "target_shape": []}
    assert shown == expected
    assert tables["engine"]["kind"] == "flower"
    assert tables["algorithm"]["name"] == "ditto"
    assert Experiment.parse(tables).tables() == tables, "every setting is written out, and is read again"
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["equipoise[flower]"]
    app = project["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": "app:server", "clientapp": "app:client"}
    assert app["config"] == {"out": str(tmp_path / "app-run"), "resume": False, "back": 0}


def test_init_takes_an_experiment_and_settings(own: Path, digits: Path, tmp_path: Path) -> None:
    sets = ("--set", "algorithm.lr=0.5", "--set", "deploy.deadline=30.0", "--set", "deploy.names=['a', 'b']")
    good(deploy("init", "deep/app", own, *sets, "--out", "results/first", cwd=tmp_path))
    tables = tomllib.loads((tmp_path / "deep" / "app" / "experiment.toml").read_text())
    assert (tables["rounds"], tables["algorithm"]["lr"]) == (4, 0.5)
    assert tables["deploy"]["shape"] == [5]
    assert tables["deploy"]["outputs"] == 3
    assert tables["deploy"]["deadline"] == 30.0
    assert tables["deploy"]["names"] == ["a", "b"]
    assert "data" not in tables
    project = tomllib.loads((tmp_path / "deep" / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["out"] == str(tmp_path / "results" / "first")
    assert not (tmp_path / "results").exists()
    (tmp_path / "empty").mkdir()
    good(deploy("init", "empty", digits, cwd=tmp_path))  # a folder may be there, if nothing is in it
    tables = tomllib.loads((tmp_path / "empty" / "experiment.toml").read_text())
    assert tables["model"]["name"] == "softmax"
    assert tables["deploy"]["shape"] == [1, 28, 28]


def test_settings_of_one_app_are_not_those_of_the_next(tmp_path: Path) -> None:
    good(deploy("init", "one", "--set", "algorithm.lr=0.7", cwd=tmp_path))
    good(deploy("init", "two", cwd=tmp_path))
    assert tomllib.loads((tmp_path / "one" / "experiment.toml").read_text())["algorithm"]["lr"] == 0.7
    assert tomllib.loads((tmp_path / "two" / "experiment.toml").read_text())["algorithm"]["lr"] == 0.1


def test_what_the_user_says_of_the_data_is_not_looked_up(digits: Path, tmp_path: Path) -> None:
    sets = ("--set", "data.name=mnist", "--set", "data.partition={kind='iid'}")
    shape = ("--set", "deploy.shape=[7]", "--set", "deploy.outputs=2")
    good(deploy("init", "app", digits, *sets, *shape, cwd=tmp_path))  # and mnist is not here
    tables = tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())
    assert (tables["deploy"]["shape"], tables["deploy"]["outputs"]) == ([7], 2)


def test_a_model_of_ones_own_needs_no_section(tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text("[algorithm]\nname = 'fedavg-ft'\n[deploy]\nshape = [5]\n")
    good(deploy("init", "app", "bare.toml", cwd=tmp_path))
    assert "model" not in tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())


@pytest.mark.deployment
@pytest.mark.parametrize("algorithm", ["ditto", "fedavg-ft"])
def test_flower_builds_what_init_writes(algorithm: str, own: Path, tmp_path: Path) -> None:
    good(deploy("init", "app", own, "--set", f"algorithm.name={algorithm}", cwd=tmp_path))
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    program = Path(sys.executable).parent / "flwr"
    done = subprocess.run(
        [program, "build", "--app", "app"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [bundle] = tmp_path.glob("*.fab")
    assert f"equipoise-{algorithm}" in bundle.name
    with zipfile.ZipFile(bundle) as file:
        assert {"app.py", "experiment.toml", "pyproject.toml"} <= set(file.namelist())
        assert file.read("experiment.toml") == (tmp_path / "app" / "experiment.toml").read_bytes()


def test_init_refuses_what_cannot_work(own: Path, digits: Path, tmp_path: Path) -> None:
    def no(*arguments: object, words: tuple[str, ...]) -> None:
        refused("init", *arguments, cwd=tmp_path, words=words)

    no("app", "nothing.toml", words=("there is no file nothing.toml",))
    no("app", own, "--set", "deploy.shap=[5]", words=("unknown setting deploy.shap; did you mean 'shape'?",))
    no("app", own, "--set", "deplyo.shape=[5]", words=("unknown section deplyo; did you mean 'deploy'?",))
    no("app", own, "--set", "deploy.clients=0", words=("deploy.clients = 0 is not allowed", ">= 1"))
    no("app", own, "--set", "deploy.inputs=words", words=("deploy.inputs = 'words' is not allowed", "'symbols'"))
    for wrong in ("[0]", "[-5]"):
        no("app", own, "--set", f"deploy.shape={wrong}", words=("deploy.shape = [", "is not allowed"))
    no(
        "app",
        own,
        "--set",
        "deploy.shape=['a']",
        words=("deploy.shape = ['a'] is not allowed; it must be a list, each a whole number",),
    )
    no("app", own, "--set", "algorithm.name=dito", words=("algorithm.name = 'dito' is unknown; did you mean 'ditto'?",))
    no("app", own, "--set", "deploy.shape=[]", words=("give deploy.shape, such as [1, 28, 28], and deploy.outputs",))
    missing = ("--set", "data.name=mnist", "--set", "data.partition={kind='iid'}")
    no("app", digits, *missing, words=("train-images-idx3-ubyte", "equipoise data get mnist"))
    (tmp_path / "no-algorithm.toml").write_text("[model]\nname = 'mlp'\n")
    no("app", "no-algorithm.toml", words=("the section [algorithm] is missing",))
    (tmp_path / "no-outputs.toml").write_text(OWN.replace("outputs = 3", ""))
    no("app", "no-outputs.toml", words=("deploy.outputs is missing",))
    (tmp_path / "no.toml").write_text("[model\n")
    no("app", "no.toml", words=("no.toml is not valid TOML",))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    for file in (own, digits):
        no("full", file, words=("full is not empty; choose another folder for the app",))
    no("own.toml/app", own, words=("cannot create the folder own.toml/app",))


def test_a_model_without_shape_and_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text("[model]\nname = 'mlp'\n[algorithm]\nname = 'ditto'\n")
    words = ("the server has no data", "give deploy.shape, such as [1, 28, 28], and deploy.outputs")
    refused("init", "app", "bare.toml", cwd=tmp_path, words=words)


def test_a_model_that_does_not_take_such_samples_is_refused(own: Path, tmp_path: Path) -> None:
    refused("init", "app", own, "--set", "model.name=cnn", cwd=tmp_path, words=("model.name = 'cnn'", "(5,)"))


# deploy local, as far as it does not start anything


def test_local_refuses_a_folder_that_is_taken(own: Path, digits: Path, tmp_path: Path) -> None:
    def no(*arguments: object, words: tuple[str, ...]) -> None:
        refused("local", *arguments, cwd=tmp_path, words=words)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(DIGITS)
    no(digits, "--out", "run", words=("run already holds a run; add --resume", "another --out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    no(digits, "--out", "full", words=("full is not empty and not a run; choose another --out",))
    no("nothing.toml", "--out", "new", words=("there is no file nothing.toml",))
    no(digits, "--out", "new", "--set", "deploy.deadlin=3.0", words=("deploy.deadlin; did you mean 'deadline'?",))
    no(own, "--out", "new", words=("data",))


@pytest.mark.parametrize(
    ("said", "more", "clients"),
    [
        ("", (), 4),
        ("clients = 3", (), 3),
        ("", ("--clients", 2), 2),
        ("clients = 3", ("--clients", 3), 3),
        ("clients = 3", ("--set", "data.clients=2"), 2),
        ("clients = 3", ("--set", "data.clients=2", "--clients", 2), 2),
    ],
)
def test_local_has_as_many_clients_as_was_said(
    said: str, more: tuple[object, ...], clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(deployment: LocalDeployment, resume: bool, back: int) -> None:
        assert len(deployment.local_app.names) == clients
        raise EquipoiseError("it would start now")

    monkeypatch.setattr(LocalDeployment, "run", run)
    (tmp_path / "digits.toml").write_text(DIGITS.replace("[model]", f"{said}\n[model]"))
    done = deploy("local", "digits.toml", "--out", "new", *more, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "equipoise: it would start now"


def test_local_refuses_two_numbers_of_clients(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(DIGITS.replace("[model]", "clients = 3\n[model]"))

    def no(*arguments: object, words: str) -> None:
        refused("local", "digits.toml", "--out", "new", *arguments, cwd=tmp_path, words=(words,))

    no("--clients", 4, words="--clients 4 does not agree with data.clients = 3; leave one of them out")
    no("--clients", 3, "--set", "data.clients=5", words="--clients 3 does not agree with data.clients = 5")
    no("--set", "data.clients=65", words="data.clients = 65 would start 65 SuperNodes on this machine, and 64 are")


# deploy certificates


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates(tmp_path: Path) -> None:
    printed = good(
        deploy("certificates", "certs", "--host", "10.0.0.7", "--host", "link.org", "--days", 9, cwd=tmp_path)
    )
    assert "ca.crt (for every machine), server.pem and server.key (for the SuperLink only)" in printed
    assert sorted(tree(tmp_path)) == ["certs", "certs/ca.crt", "certs/server.key", "certs/server.pem"]
    found = certificate(tmp_path / "certs" / "server.pem")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 9
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certs" / "server.pem", tmp_path / "certs" / "server.key")
    assert stat.S_IMODE((tmp_path / "certs" / "server.key").stat().st_mode) == 0o600
    refused("certificates", "certs", cwd=tmp_path, words=("certs has certificates already; choose another folder",))


def test_certificates_for_this_machine_if_nothing_is_said(tmp_path: Path) -> None:
    good(deploy("certificates", "certs", cwd=tmp_path))
    found = certificate(tmp_path / "certs" / "server.pem")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    (tmp_path / "taken").write_text("")
    refused("certificates", "taken", cwd=tmp_path, words=("cannot create the folder taken",))


@pytest.mark.parametrize("host", ["", "a b", "münchen.de", "https://link.org", "127.0.0.1:8000", "-link.org"])
def test_hosts_that_cannot_be_meant(host: str, tmp_path: Path) -> None:
    words = (f"{host!r} is not allowed as a host", "an address, or a name")
    refused("certificates", "certs", "--host", "link.org", "--host", host, cwd=tmp_path, words=words)


@pytest.mark.parametrize("days", ["0", "3651", "long"])
def test_days_that_cannot_be_meant(days: str, tmp_path: Path) -> None:
    done = deploy("certificates", "certs", "--days", days, cwd=tmp_path)
    assert done.returncode == 2
    assert "--days" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(tmp_path) == {}


# deploy client


def test_client(tmp_path: Path) -> None:
    printed = good(deploy("client", "clients/ward", "--name", "ward 3", cwd=tmp_path))
    folder = tmp_path / "clients" / "ward"
    assert sorted(tree(folder)) == ["client.toml", "key", "key.pub"]
    assert tomllib.loads((folder / "client.toml").read_text()) == {
        "name": "ward 3",
        "data": str(folder / "data"),
        "state": str(folder / "state"),
        "unseen": False,
        "evaluate": True,
    }
    key = load_ssh_private_key((folder / "key").read_bytes(), password=None)
    assert load_ssh_public_key((folder / "key.pub").read_bytes()) == key.public_key()
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert "flwr supernode register clients/ward/key.pub SUPERLINK --name 'ward 3'" in printed
    for word in ("--superlink HOST:PORT", "--auth-supernode-private-key clients/ward/key", "clients/ward/client.toml"):
        assert word in printed
    words = ("clients/ward is a client already; choose another folder",)
    refused("client", "clients/ward", "--name", "b", cwd=tmp_path, words=words)


def test_a_client_that_takes_no_part_and_has_its_data_elsewhere(tmp_path: Path) -> None:
    good(deploy("client", "ward", "--name", "é", "--data", "there/data.npz", "--unseen", cwd=tmp_path))
    settings = tomllib.loads((tmp_path / "ward" / "client.toml").read_text(encoding="utf-8"))
    assert settings["name"] == "é"
    assert settings["data"] == str(tmp_path / "there" / "data.npz")
    assert settings["unseen"] is True


def test_a_client_with_limits_and_switches(tmp_path: Path) -> None:
    limits = ("--max-releases", "40", "--max-epsilon", "8", "--no-scores", "--no-counts")
    good(deploy("client", "ward", "--name", "a", *limits, cwd=tmp_path))
    settings = tomllib.loads((tmp_path / "ward" / "client.toml").read_text(encoding="utf-8"))
    found = {key: settings[key] for key in ("max_releases", "max_epsilon", "evaluate", "counts")}
    assert found == {"max_releases": 40, "max_epsilon": 8.0, "evaluate": False, "counts": False}
    for wrong in ("0", "-1", "inf", "nan"):
        words = ("--max-epsilon", "it must be a number above 0")
        refused("client", "other", "--name", "a", "--max-epsilon", wrong, cwd=tmp_path, words=words)


@pytest.mark.skipif(not launch.available(), reason="warm clients need Linux")
def test_a_warm_client_is_set_up_and_started_with_one_command(tmp_path: Path) -> None:
    printed = good(deploy("client", "ward 3", "--name", "ward 3", "--warm", cwd=tmp_path))
    assert "equipoise deploy supernode 'ward 3' --superlink HOST:PORT --root-certificates ca.crt" in printed
    assert "flower-supernode" not in printed
    for folder in ("ward 3/warm", "ward 3/warm/bin", "ward 3/warm/bin/flwr-clientapp"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_a_supernode_gets_the_clients_key_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch, "become_supernode", lambda *given: seen.append(given))
    refused("supernode", "ward", cwd=tmp_path, words=("ward is not a client: it has no key",))
    good(deploy("client", "ward", "--name", "a", cwd=tmp_path))
    good(deploy("supernode", "ward", "--superlink", "host:1", "--insecure", cwd=tmp_path))
    good(deploy("supernode", "ward", "--cold", "--node-config=other.toml", "--fast-poll", cwd=tmp_path))
    (warm, command), (cold, other) = seen
    assert warm.path == tmp_path / "ward" / "warm"
    own = ["--auth-supernode-private-key", "ward/key", "--node-config", "ward/client.toml"]
    assert command == own_user_command(["flower-supernode", "--superlink", "host:1", "--insecure", *own])
    assert other[: len(own_user_command([]))] == own_user_command([])
    assert cold is None
    assert other[-5:] == ["-m", "equipoise.flower.warm.fast_poll", "--node-config=other.toml", *own[:2]]


def test_a_supernode_runs_cold_where_warm_clients_are_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch, "become_supernode", lambda *given: seen.append(given))
    monkeypatch.setattr(launch, "available", lambda: False)
    monkeypatch.setattr(own_user_only, "supported", lambda: False)
    good(deploy("client", "ward", "--name", "a", cwd=tmp_path))
    done = deploy("supernode", "ward", "--insecure", cwd=tmp_path)
    good(done)
    [(folder, command)] = seen
    assert folder is None
    assert command[:2] == ["flower-supernode", "--insecure"]
    assert "warm clients need Linux 5.3 or later, so the client runs cold" in done.stderr
    assert "every user of it can reach the SuperNode's port" in done.stderr


def test_client_refuses_what_cannot_work(tmp_path: Path) -> None:
    for name in ("", "x" * 257, "a\nb", "\x1b[2J", "\udc80"):
        refused("client", "ward", "--name", name, cwd=tmp_path, words=("--name must have 1 to 256 characters",))
    (tmp_path / "taken").write_text("")
    refused("client", "taken", "--name", "a", cwd=tmp_path, words=("cannot create the folder taken",))
    done = deploy("client", "ward", cwd=tmp_path)
    assert done.returncode == 2
    assert "--name" in done.stderr


# deploy check


@pytest.fixture
def app(own: Path, tmp_path: Path) -> Path:
    """An app and a client in tmp_path/ward, which has no data yet."""
    good(deploy("init", "app", own, cwd=tmp_path))
    good(deploy("client", "ward", "--name", "ward 3", cwd=tmp_path))
    return tmp_path / "app"


def give(folder: Path, **arrays: np.ndarray) -> None:
    (folder / "data").mkdir(exist_ok=True)
    np.savez(folder / "data" / "data.npz", **arrays)


X, Y = np.random.default_rng(0).normal(size=(20, 5)), np.arange(20) % 3


def test_check_tells_what_a_client_has_and_sends(app: Path, tmp_path: Path) -> None:
    give(tmp_path / "ward", x=X, y=Y)
    before = tree(tmp_path)
    printed = good(deploy("check", "ward/client.toml", "--app", app, cwd=tmp_path))
    assert "ward 3: 14 samples for train, 2 samples for validation, 4 samples for test" in printed
    parameters = 5 * 128 + 128 + 128 * 64 + 64 + 64 * 3 + 3
    assert f"- an update of {parameters + 1:,} numbers for every order to train: w [{parameters}]" in printed
    assert "weight [1] (1 number)" in printed
    for word in ("- scores: loss, accuracy", "- sizes: ", "- counters: ", "- its name, ", "none of this is covered"):
        assert word in printed
    assert {name: b for name, b in tree(tmp_path).items() if "__pycache__" not in name} == before


def test_check_tells_what_privacy_covers_and_what_is_left_of_the_budget(app: Path, tmp_path: Path) -> None:
    give(tmp_path / "ward", x=X, y=Y)
    with (app / "experiment.toml").open("a") as file:
        file.write("\n[privacy]\nclip = 1.0\ntarget_epsilon = 8.0\n")
    before = tree(tmp_path)
    printed = good(deploy("check", "ward/client.toml", "--app", app, cwd=tmp_path))
    assert "for one, 8 for all " in printed
    assert "0 messages were released from" in printed
    assert printed.count("(not covered by privacy)") == 5
    assert {name: b for name, b in tree(tmp_path).items() if "__pycache__" not in name} == before
    (tmp_path / "ward" / "state").mkdir()
    (tmp_path / "ward" / "state" / "releases.json").write_text("{}")
    words = ("cannot be read", "so nothing is released")
    refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=words)
    with (app / "experiment.toml").open("a") as file:
        file.write('where = "central"\n')
    with (tmp_path / "ward" / "client.toml").open("a") as file:
        file.write("max_epsilon = 3.0\n")
    (tmp_path / "ward" / "state" / "releases.json").unlink()
    refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=("the client adds no noise",))


def test_check_tells_whether_forecasts_are_scored(tmp_path: Path) -> None:
    """A place gives its file of loads; of other windows nobody knows what they forecast."""
    examples = Path(__file__).parents[2] / "examples"
    good(deploy("init", "app", examples / "forecast.toml", cwd=tmp_path))
    listed, unknown = "- errors of forecasts in kW: 57 numbers per model", "its data do not say of which time series"
    good(deploy("client", "bakery", "--name", "bakery", "--data", examples / "loads" / "bakery.csv", cwd=tmp_path))
    printed = good(deploy("check", "bakery/client.toml", "--app", "app", cwd=tmp_path))
    assert "bakery: 200 samples for train, 63 samples for validation, 145 samples for test" in printed
    assert listed in printed
    assert unknown not in printed
    good(deploy("client", "ward", "--name", "ward", cwd=tmp_path))
    give(tmp_path / "ward", x=np.zeros((20, 73), np.float32), y=np.zeros((20, 24), np.float32))
    assert unknown in good(deploy("check", "ward/client.toml", "--app", "app", cwd=tmp_path))


def test_check_uses_the_apps_own_model_and_data(app: Path, tmp_path: Path) -> None:
    (app / "lazily_named_beside.py").write_text("SAMPLES = 6\n")
    (app / "app.py").write_text(
        "import torch\n"
        "from lazily_named_beside import SAMPLES\n"
        "from equipoise.flower import App\n"
        "def data(settings):\n"
        "    return {'train': (torch.zeros(settings['bed'], 5), torch.zeros(settings['bed'], dtype=torch.int64))}\n"
        "def model():\n"
        "    return torch.nn.Linear(5, 3)\n"
        "app = App(__file__, model=model, data=data, head=None)\n"
    )
    with (tmp_path / "ward" / "client.toml").open("a") as file:
        file.write("bed = 6\n")
    printed = good(deploy("check", "ward/client.toml", "--app", app, cwd=tmp_path))
    assert "ward 3: 6 samples for train, 0 samples for validation, 0 samples for test" in printed
    assert "- an update of 19 numbers for every order to train: w [18] (18 numbers), weight [1] (1 number)" in printed


def test_check_refuses_what_cannot_work(app: Path, tmp_path: Path) -> None:
    settings = tmp_path / "ward" / "client.toml"

    def no(*arguments: object, words: tuple[str, ...]) -> None:
        refused("check", *arguments, cwd=tmp_path, words=words)

    no(settings, "--app", "nowhere", words=("nowhere is not an app: it has no app.py",))
    no(settings, "--app", "ward", words=("ward is not an app: it has no app.py",))
    no("nothing.toml", "--app", app, words=("there is no file nothing.toml",))
    no(settings, "--app", app, words=(f"{tmp_path / 'ward' / 'data'} is not a folder",))
    (tmp_path / "nameless.toml").write_text("state = 'state'\ndata = 'data'\n")
    no("nameless.toml", "--app", app, words=("client.name is missing",))
    (tmp_path / "stateless.toml").write_text("name = 'a'\ndata = 'data'\n")
    no("stateless.toml", "--app", app, words=("client.state is missing",))
    (tmp_path / "unsure.toml").write_text("name = 'a'\nstate = 'state'\nunseen = 'maybe'\n")
    no("unsure.toml", "--app", app, words=("client.unseen = 'maybe' is not allowed",))
    (tmp_path / "nowhere.toml").write_text("name = 'a'\nstate = 'state'\n")
    no("nowhere.toml", "--app", app, words=("do not say where its data are",))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X[:, :4], "y": Y}, ("samples have the shape [4]", "deploy.shape = [5]")),
        ({"x": X, "y": Y + 1}, ("labels go from 1 to 3", "deploy.outputs = 3")),
        ({"x": X * np.nan, "y": Y}, ("NaN or infinity in the inputs",)),
        ({"x": X}, ("has only one of x and y",)),
        ({"x": X, "y": np.array([None] * 20)}, ("cannot be read as arrays",)),
    ],
)
def test_check_refuses_data_that_do_not_fit(
    arrays: dict[str, np.ndarray], words: tuple[str, ...], app: Path, tmp_path: Path
) -> None:
    give(tmp_path / "ward", **arrays)
    refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=(str(tmp_path / "ward" / "data"), *words))


def test_check_refuses_an_app_that_is_none(app: Path, tmp_path: Path) -> None:
    (app / "app.py").write_text("from equipoise.flower import App\n")
    refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=("app.py has no `app = App(__file__)`",))
    for content, word in (
        ("import nowhere_at_all\n", "nowhere_at_all"),
        ("1 / 0\n", "division by zero"),
        ("def (\n", ""),
    ):
        (app / "app.py").write_text(content)
        refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=("app.py cannot be imported", word))
    (app / "app.py").write_text("from equipoise.flower import App\nflower = App(__file__)\n")
    (app / "experiment.toml").unlink()
    refused("check", "ward/client.toml", "--app", app, cwd=tmp_path, words=("there is no file", "experiment.toml"))


# All of them


@pytest.mark.parametrize("missing", ["flwr", "cryptography"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "app"),
        ("local", "digits.toml", "--out", "run"),
        ("certificates", "certs"),
        ("client", "ward", "--name", "a"),
        ("check", "client.toml", "--app", "app"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_flower_a_sentence_says_how_to_install_it(
    arguments: tuple[str, ...], missing: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_commands, "find_spec", lambda name: None if name == missing else find_spec(name))
    refused(*arguments, cwd=tmp_path, words=("deployments need Flower", "pip install 'equipoise[flower]'"))


@pytest.mark.slow
def test_the_sentence_comes_from_a_real_process_too(own: Path, tmp_path: Path) -> None:
    done = equipoise_command("deploy", "init", "app", own, "--set", "deploy.shap=[5]", cwd=tmp_path, real=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "equipoise: unknown setting deploy.shap; did you mean 'shape'?\n"
    assert sorted(tree(tmp_path)) == ["own.toml"]


def test_help_tells_of_every_command(tmp_path: Path) -> None:
    shown = good(deploy("--help", cwd=tmp_path))
    for word in ("init", "local", "certificates", "client", "supernode", "check"):
        assert re.search(rf"^  {word} ", shown, re.MULTILINE)
        assert "Usage: equipoise deploy" in good(deploy(word, "--help", cwd=tmp_path))

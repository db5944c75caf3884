"""Own code by name in every command, from any folder."""

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

import equipoise as eq
from equipoise.errors import EquipoiseError
from equipoise.reporting.comparison import compare
from equipoise.runs import listing
from equipoise.runs.sweep import expand_sweep
from equipoise.storage.run_folder import read_toml
from equipoise.storage.run_index import find_runs
from tests.registry.test_own_code import plugins  # noqa: F401
from tests.support.commands import equipoise_command, one_sentence
from tests.support.own_code import own_tables, write_experiment


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports is gone after it: other tests have files of the same names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("helper", "mine", "net", "rest", "scaffolds") or name.startswith(("equipoise_own_", "scaffolds.")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experiment(tmp_path / "study")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.slow
def test_a_run_of_own_code_can_be_used_from_anywhere(file: Path, tmp_path: Path, elsewhere: Path) -> None:
    done = equipoise_command("run", "mine.toml", cwd=file.parent)
    assert done.returncode == 0, done.stderr
    run = file.parent / "runs" / "mine-Mine-seed0"
    tables = tomllib.loads((run / "run.toml").read_text())
    assert tables["written"]["folders"] == [str(file.parent)]
    for section, given in own_tables().items():
        if isinstance(given, dict):
            assert tables[section]["name"] == given["name"], "names stay as the user wrote them"

    def good(*words: object) -> str:
        done = equipoise_command(*words, cwd=elsewhere)
        assert done.returncode == 0, done.stderr
        return done.stdout

    good("run", file, "--out", run, "--resume", "--set", "rounds=3", "--quiet")
    good("run", run / "run.toml", "--out", "again", "--set", "rounds=3", "--quiet")
    assert (run / "metrics.jsonl").read_bytes() == (elsewhere / "again" / "metrics.jsonl").read_bytes()
    good("cka", run)
    assert json.loads(good("show", run / "run.toml", "--json"))["clients"] == 3
    assert "module=" in good("export", run, "--global", "--out", "global.safetensors")
    with pytest.raises(EquipoiseError, match="holds a model of your own"):  # a file never names code to run
        eq.load_model(elsewhere / "global.safetensors")
    assert len(compare(find_runs([run, elsewhere / "again"]))) == 1, "they are runs of the same settings"
    shutil.rmtree(file.parent / "code")
    done = equipoise_command("cka", run, cwd=elsewhere)
    one_sentence(done, 2, "data.name names the file 'code/blobs.py', which does not exist in", str(file.parent))


def test_own_code_of_the_command_line_is_remembered_too(file: Path, tmp_path: Path, elsewhere: Path) -> None:
    (elsewhere / "other.py").write_text((file.parent / "code" / "rest.py").read_text())
    words = ("--set", "reducer.name=other.py:MyMean", "--out", "run", "--quiet")
    assert equipoise_command("run", file, *words, cwd=elsewhere).returncode == 0
    done = equipoise_command("cka", "elsewhere/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.hiden=3", ("unknown setting model.hiden; did you mean 'hidden'?",)),
        ("model.name=code/nett.py:Net", ("model.name names the file 'code/nett.py', which does not exist",)),
        ("algorithm.name=code/net.py:Net", ("algorithm.name = ", "derives from equipoise.Algorithm")),
        ("attack.name=code/rest.py:Loudr", ("there is no Loudr in code/rest.py; did you mean 'Louder'?",)),
        ("data.folder=nowhere", ("data.folder = 'nowhere' does not exist in",)),
        ("data.partition.kind=code/rest.py:Louder", ("data.partition.kind = ", "equipoise.Partition")),
    ],
)
def test_what_is_wrong_is_one_sentence(setting: str, words: tuple[str, ...], file: Path, elsewhere: Path) -> None:
    done = equipoise_command("run", file, "--set", setting, "--out", "run", cwd=elsewhere)
    one_sentence(done, 2, *words)
    assert not (elsewhere / "run" / "run.toml").exists()


def sweep_tables() -> dict[str, object]:
    tables = own_tables(seed=[0, 1], rounds=1)
    del tables["attack"], tables["reducer"]
    halves = {"kind": "hybrid", "first": {"kind": "code/rest.py:InTurn", "start": 1}, "second": {"kind": "iid"}}
    tables["data"] |= {"wards": [["a", "b", "c"], ["a", "b"]], "clients": 4, "partition": halves}
    mine = {"name": "code/mine.py:Mine", "lr": 0.1, "rates": [0.3, 0.4], "lam": [0.0, 1.0]}
    return tables | {"algorithm": [mine, {"name": "fedavg"}], "sweep": {"tune": ["algorithm.lam"], "by": "global"}}


def test_lists_of_own_settings_are_lists_and_others_are_values(file: Path) -> None:
    every, _ = expand_sweep(sweep_tables(), folders=[file.parent])
    assert len(every) == 2 * 2 * (2 + 1)
    assert {cell.experiment.tables()["algorithm"].get("rates", [0.3, 0.4])[1] for cell in every} == {0.4}
    assert {len(cell.experiment.tables()["data"]["wards"]) for cell in every} == {2, 3}
    partition = every[0].experiment.tables()["data"]["partition"]
    assert partition["first"] == {"kind": "code/rest.py:InTurn", "min_samples": 1, "start": 1}
    assert every[0].label.startswith("Mine-")


@pytest.mark.slow
def test_a_sweep_of_own_code_is_tuned_in_worker_processes(file: Path, elsewhere: Path) -> None:
    file.write_text(tomli_w.dumps(sweep_tables() | {"seed": 0}))
    done = equipoise_command("sweep", file, "--jobs", "2", "--out", "runs", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    runs = [path for path in (elsewhere / "runs").iterdir() if path.is_dir()]
    assert len(runs) == 2 * (2 + 1)
    assert all((run / "summary.json").exists() for run in runs)
    alone = equipoise_command("sweep", file, "--out", "alone", cwd=elsewhere)
    assert alone.returncode == 0, alone.stderr
    for run in runs:
        assert (run / "metrics.jsonl").read_bytes() == (elsewhere / "alone" / run.name / "metrics.jsonl").read_bytes()


def test_own_code_is_listed_with_its_settings(file: Path) -> None:
    for kind, name, settings in (
        ("algorithms", "mine.py:Mine", {"lam": 0.5, "lr": 0.01}),
        ("models", "net.py:Net", {"hidden": 4, "head": None}),
        ("data", "blobs.py:make", {"samples": 20, "folder": None}),
        ("partitions", "rest.py:InTurn", {"start": 0}),
        ("attacks", "rest.py:Louder", {"factor": 10.0}),
        ("reducers", "rest.py:MyMean", {}),
    ):
        done = equipoise_command("list", kind, f"code/{name}", "--json", cwd=file.parent)
        assert done.returncode == 0, done.stderr
        [entry] = json.loads(done.stdout)
        found = {row["name"]: row["default"] for row in entry["parameters"]}
        assert {name: found[name] for name in settings} == settings
        assert entry["summary"]
        assert "kind" not in [row["name"] for row in entry["parameters"]]
    shown = equipoise_command("list", "models", "code/net.py:Net", cwd=file.parent).stdout
    assert "width of the hidden layer" in shown
    one_sentence(
        equipoise_command("list", "models", "code/net.py:N", cwd=file.parent), 2, "there is no N in code/net.py"
    )


def test_plug_ins_are_listed_with_their_package(plugins: Path, tmp_path: Path) -> None:  # noqa: F811
    entries = {entry["name"]: entry for entry in listing.listing("algorithms")}
    assert entries["mine"]["package"] == "scaffolds 2.1"
    assert "lam" in [row["name"] for row in entries["mine"]["parameters"]]
    assert entries["ditto"]["package"] == ""
    assert "mine" not in [entry["name"] for entry in listing.from_registries()["algorithms"]], "not in the catalogue"
    assert [entry["package"] for entry in listing.listing("algorithms", "mine")] == ["scaffolds 2.1"]
    assert "cannot be imported" in next(e["summary"] for e in listing.listing("models") if e["name"] == "lost")
    assert "it must be a class" in next(e["summary"] for e in listing.listing("reducers") if e["name"] == "odd")
    with pytest.raises(EquipoiseError, match="there is no 'mien' among the algorithms; did you mean 'mine'"):
        listing.listing("algorithms", "mien")
    done = equipoise_command("list", "algorithms", "mine", cwd=tmp_path)
    assert "from scaffolds 2.1" in done.stdout


def test_plug_ins_run_by_name(plugins: Path, file: Path, elsewhere: Path) -> None:  # noqa: F811
    done = equipoise_command("run", file, "--set", "algorithm.name=mine", "--out", "run", "--quiet", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert read_toml(elsewhere / "run" / "run.toml")["algorithm"]["name"] == "mine"


def test_papers_of_ones_own_may_name_code_beside_them(file: Path, elsewhere: Path) -> None:
    paper = elsewhere / "papers" / "toy"
    paper.mkdir(parents=True)
    (file.parent / "code").rename(paper / "code")
    scales = {name: {"rounds": 1} for name in ("smoke", "small", "paper")}
    (paper / "table1.toml").write_text(tomli_w.dumps(own_tables(scale=scales)))
    (paper / "exhibits.toml").write_text(
        'paper = "Toy"\n[[exhibit]]\nname = "table1"\ntitle = "T"\nfiles = ["table1"]\nparts = ["all"]\n'
        'rows = ["code/mine.py:Mine"]\ncolumns = [{ key = "score", score = "global" }]\n'
    )
    listed = equipoise_command("reproduce", "--papers", "papers", "--json", cwd=elsewhere)
    assert json.loads(listed.stdout)[0]["data"] == {"code/blobs.py:make": "own"}
    done = equipoise_command("reproduce", "toy-table1", "--papers", "papers", "--quiet", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "code/mine.py:Mine" in done.stdout

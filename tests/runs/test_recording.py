"""Records of runs: they have what tables need, and planned runs recognise them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from equipoise.config.defaults import default_settings
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.reporting.comparison import compare
from equipoise.runs.process_pool import execute
from equipoise.runs.recorded_runs import RecordedRuns, matches
from equipoise.runs.recording import kept_settings, record_run, settings_digest
from equipoise.runs.sweep import SweepRun, expand_sweep
from equipoise.storage.client_scores import read_client_scores
from equipoise.storage.result_records import read_records
from equipoise.storage.run_folder import RunFolder, flatten
from equipoise.storage.run_index import find_runs
from tests.support.commands import ROOT, equipoise_command, one_sentence, small

EXPERIMENTS = sorted(path for path in ROOT.glob("experiments/*/*.toml") if path.stem not in ("exhibits",))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of three runs, one of which fails."""
    folder = tmp_path_factory.mktemp("recording")
    every, _ = cells()
    execute(every, folder / "runs", None, 1, lambda cell, notes: None)
    return folder


def cells() -> tuple[list[SweepRun], Any]:
    return expand_sweep(small(rounds=30, algorithm={"lr": [0.1, 0.05, 1e30]}))


def test_a_record_has_the_figures_of_the_run_to_six_digits(place: Path) -> None:
    cell = cells()[0][0]
    folder = RunFolder(cell.folder(place / "runs"))
    record = record_run(folder.path, scale="small")
    summary = folder.read_summary()
    for kind in ("personal", "global"):
        for name in ("rmse", "rmse_std", "rmse_pooled", "worst_decile", "validation_rmse"):
            assert record.summary[kind][name] == pytest.approx(summary[kind][name], rel=1e-5)
            assert len(repr(record.summary[kind][name]).replace(".", "").strip("0")) <= 6
    for name in ("bytes_up", "bytes_down", "gradient_samples", "parameters_shared", "seconds", "dataset", "metric"):
        assert record.summary[name] == summary[name]
    clients = read_client_scores(folder.path)["trained"]
    assert record.clients == {"trained": pytest.approx(clients, rel=1e-5)}
    assert record_run(folder.path, trial=True).clients == {}
    assert record.versions.keys() == {"equipoise", "torch", "python"}
    assert (record.scale, record.seed, record.trial, record.failed) == ("small", 0, False, "")
    assert len(record.line()) < 5000
    lines = {line["round"]: line for line in folder.read_metrics()}
    assert len(lines) == 30  # more than are kept of a curve
    rounds = record.curves["round"]
    best = min(lines, key=lambda number: lines[number]["personal"]["validation_rmse"])
    assert {1, 30, best} <= set(rounds) < set(lines)
    for number, score in zip(rounds, record.curves["personal.rmse"], strict=True):
        assert score == pytest.approx(lines[number]["personal"]["rmse"], rel=1e-5)
    trained = sum(entry["train"] for entry in folder.read(folder.timings))
    assert record.curves["train_seconds"][-1] == pytest.approx(trained, rel=1e-5)


def test_diagnostics_of_any_name_are_kept(place: Path, tmp_path: Path) -> None:
    source = cells()[0][0].folder(place / "runs")
    for name in ("run.toml", "summary.json", "timings.jsonl"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    lines = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"spectral_radius": 0.5 + line["round"], "duals": {"norm": {"mean": 2.0 * line["round"]}, "name": "x"}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = record_run(tmp_path).curves
    assert curves["spectral_radius"] == [0.5 + number for number in curves["round"]]
    assert curves["duals.norm.mean"] == [2.0 * number for number in curves["round"]]
    assert "duals.name" not in curves


def test_the_comparison_of_records_is_that_of_the_runs(place: Path, tmp_path: Path) -> None:
    done = equipoise_command("record", place / "runs", "--to", "new/r.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new/r.jsonl: 3 runs added, 0 replaced, 0 unchanged" in done.stdout
    records = read_records(tmp_path / "new" / "r.jsonl")
    assert sum(bool(record.failed) for record in records) == 1
    again = equipoise_command("record", place / "runs", "--to", "new/r.jsonl", cwd=tmp_path)
    assert "0 runs added, 0 replaced, 3 unchanged" in again.stdout
    ours = compare([record.as_run(tmp_path) for record in records if not record.failed])
    theirs = compare(find_runs([place / "runs"]))
    assert len(ours) == len(theirs) == 2
    for row in ours:
        [other] = [each for each in theirs if each["settings"] == row["settings"]]
        for key, value in row.items():
            if "gini" not in key and "_variance" not in key:
                assert value == (pytest.approx(other[key], rel=1e-5) if isinstance(value, float) else other[key]), key


def test_planned_runs_are_recognised_and_others_are_not(place: Path) -> None:
    every, _ = cells()
    records = [record_run(cell.folder(place / "runs")) for cell in every]
    book = RecordedRuns({Path("r.jsonl"): records})
    for cell, record in zip(every, records, strict=True):
        found = book.find(cell.experiment)
        assert found is not None
        assert found[1] == record
        assert record.digest == settings_digest(cell.experiment)
        assert (book.run(cell.experiment) is None) == bool(record.failed)
    for more in (
        {"seed": 1},
        {"rounds": 29},
        {"participation": 3},
        {"algorithm": {"name": "ditto", "lr": 0.1, "lam": 0.7}},
        {"algorithm": {"name": "fedavg", "lr": 0.1}},
        {"engine": {"precision": "float64"}},
    ):
        for cell in expand_sweep(small(**{"rounds": 30, "algorithm": {"lr": 0.1}, **more}))[0]:
            assert book.find(cell.experiment) is None, more
    aside = {"checkpoint_every": 7, "engine": {"workers": 1}}
    assert book.find(expand_sweep(small(rounds=30, algorithm={"lr": 0.1}, **aside))[0][0].experiment) is not None


def test_runs_of_earlier_versions_are_recognised_if_what_they_lack_has_its_default(place: Path, tmp_path: Path) -> None:
    source = cells()[0][0].folder(place / "runs")
    for name in ("summary.json", "metrics.jsonl", "timings.jsonl"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tables = tomllib.loads((source / "run.toml").read_text())
    tables["written"] = {"equipoise": "0.1.0", "torch": "2.9"}
    tables["engine"]["dtype"] = tables["engine"].pop("precision")
    for key in ("weight_decay", "schedule", "nesterov"):
        del tables["algorithm"][key]
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    record = record_run(tmp_path)
    assert record.versions == {"equipoise": "0.1.0", "torch": "2.9"}
    assert record.digest == record_run(source).digest
    assert record.same_run(record_run(source))
    book = RecordedRuns({Path("r.jsonl"): [record]})
    usual, other = (
        expand_sweep(small(rounds=30, algorithm={"lr": 0.1, **more}))[0][0].experiment
        for more in ({}, {"weight_decay": 0.1})
    )
    assert book.find(usual) is not None
    assert book.find(other) is None


def test_a_setting_matches_by_value_and_a_missing_one_by_default() -> None:
    planned, defaults = {"a": 1, "b": 2.0, "c": [1]}, {"b": 2.0, "c": [1]}
    assert matches({"a": 1}, planned, defaults)
    assert matches(planned, planned, {})
    assert not matches({}, planned, defaults)  # it lacks one that has no default
    assert not matches({"a": 1}, {**planned, "b": 3.0}, defaults)
    assert not matches({"a": 1.0}, planned, defaults)  # a share and a count
    assert not matches({"a": 1, "gone": 0}, planned, defaults)  # what a removed setting did is not known


def test_a_setting_that_only_one_side_writes_matches_if_it_has_its_default() -> None:
    """Versions differ in whether defaults of a model are in its tables."""
    [cell], _ = expand_sweep(small(rounds=3, model={"name": "deq-mlp"}))
    planned, defaults = kept_settings(flatten(cell.experiment.tables())), default_settings(cell.experiment)
    keys = [key for key in planned if key.startswith("model.") and key in defaults]
    assert len(keys) > 3
    for key in keys:
        assert planned[key] == defaults[key]
        without = {name: value for name, value in planned.items() if name != key}
        assert matches(without, planned, defaults)
        assert matches(planned, without, defaults)
        assert not matches({**planned, key: "other"}, without, defaults)
        assert not matches(without, {**planned, key: "other"}, defaults)
    assert not matches({**planned, "model.gone": 0}, planned, defaults)
    empty = next(key for key, value in defaults.items() if value is None)  # such a setting is left out, and not None
    assert not matches({**planned, empty: None}, planned, defaults)


@pytest.mark.parametrize("file", EXPERIMENTS[::4], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_settings_that_are_left_out_have_the_defaults(file: Path) -> None:
    """Leaving out any setting that equals its default gives the same experiment."""
    cell = expand_sweep(tomllib.loads(file.read_text()), others=False, folders=[file.parent, file.parents[1]])[0][-1]
    experiment, tables = cell.experiment, cell.experiment.tables()
    usual = default_settings(experiment)
    settings = kept_settings(flatten(tables))
    assert any(key in usual and usual[key] == value for key, value in settings.items())
    for key, value in settings.items():
        if key in usual and usual[key] == value:
            *path, last = key.split(".")
            at = tables
            for step in path:
                at = at[step]
            at.pop(last)
    folders = [file.parent, file.parents[1]]
    tables = _without_empty(tables)
    assert Experiment.parse(tables, folders=folders).tables() == experiment.tables()


def _without_empty(tables: dict[str, Any]) -> dict[str, Any]:
    found = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in tables.items()}
    return {key: value for key, value in found.items() if value != {}}


def test_what_cannot_be_recorded_is_said(place: Path, tmp_path: Path) -> None:
    one_sentence(equipoise_command("record", place / "runs", "--to", "r.json", cwd=tmp_path), 2, "FILE.jsonl")
    one_sentence(equipoise_command("record", "nowhere", "--to", "r.jsonl", cwd=tmp_path), 2, "there is no folder")
    unfinished = cells()[0][0].folder(place / "runs")
    (tmp_path / "run").mkdir()
    for name in ("run.toml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_bytes((unfinished / name).read_bytes())
    done = equipoise_command("record", "run", "--to", "r.jsonl", cwd=tmp_path)
    one_sentence(done, 2, "there is no finished run in run")
    assert "unfinished runs skipped: 1 (run)" in done.stderr
    tables = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    tables["model"] = {"layout": "x"}
    (tmp_path / "run" / "run.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "run" / "summary.json").write_bytes((unfinished / "summary.json").read_bytes())
    with pytest.raises(EquipoiseError, match="was made from Python"):
        record_run(tmp_path / "run")

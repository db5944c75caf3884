"""Tuning with trials of their own: the seeds that are reported have no part in the choice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError
from equipoise.runs import tuning
from equipoise.runs.process_pool import execute
from equipoise.runs.recorded_runs import RecordedRuns
from equipoise.runs.recording import kept_settings, settings_digest
from equipoise.runs.sweep import SweepRun, expand_sweep
from equipoise.runs.sweep_parts import divide
from equipoise.runs.sweep_recorder import SweepRecorder
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import Choice, find_choices, trial_of, trials_of, tuned
from equipoise.storage.result_records import Record, add_records, read_records
from equipoise.storage.run_folder import flatten
from equipoise.storage.run_index import search_runs
from equipoise.storage.sweep_choices import SWEEP, record_choices, rejected_runs
from tests.support.commands import equipoise_command, is_one_sentence, one_sentence, small

APART = {"tune": ["algorithm.lr"], "tune_rounds": 2, "tune_seed": 100}


def tables(**more: Any) -> dict[str, Any]:
    algorithm = [{"name": "ditto", "lr": [1e-5, 0.05, 0.1]}, {"name": "local", "lr": [1e-5, 0.1]}]
    return small(**{"seed": [0, 1], "rounds": 4, "algorithm": algorithm, "sweep": APART, **more})


def test_trials_have_their_own_seed_and_rounds_and_each_stands_for_all_seeds_of_a_combination() -> None:
    every, sweep = expand_sweep(tables())
    trials = trials_of(every, sweep)
    assert len(every) == 10
    assert [(cell.seed, cell.experiment.schedule.rounds) for cell in trials] == [(100, 2)] * 5
    rates = [(cell.experiment.algorithm_name, cell.experiment.algorithm.lr) for cell in every]
    assert {(c.experiment.algorithm_name, c.experiment.algorithm.lr) for c in trials} == set(rates)
    assert not {(c.identity, c.seed) for c in trials} & {(c.identity, c.seed) for c in every}
    assert len({trial_of(cell, sweep).identity for cell in every}) == 5
    short, sweep = expand_sweep(tables(rounds=1))  # such as at the scale smoke: trials are not longer than the runs
    assert {cell.experiment.schedule.rounds for cell in trials_of(short, sweep)} == {1}
    same, sweep = expand_sweep(tables(sweep={"tune": ["algorithm.lr"], "tune_rounds": 2}))
    assert {(c.seed, c.experiment.schedule.rounds) for c in trials_of(same, sweep)} == {(0, 2)}


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"tune_seed": 100}, r"sweep\.tune_seed needs sweep\.tune"),
        ({"tune_rounds": 3}, r"sweep\.tune_rounds needs sweep\.tune"),
        ({**APART, "tune_seed": 1}, r"sweep\.tune_seed = 1 is one of the seeds of the runs; name another, such as 101"),
        ({**APART, "tune_rounds": 0}, r"sweep\.tune_rounds = 0 is not allowed"),
        ({**APART, "by": "unseen"}, r"sweep\.by = 'unseen' needs unseen clients in every run; set data\.unseen"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(EquipoiseError, match=words):
        expand_sweep(tables(sweep=sweep))


def test_runs_whose_values_the_same_trials_choose_are_in_one_part() -> None:
    every, sweep = expand_sweep(tables(rounds=[4, 6]))
    trials = {cell: trial_of(cell, sweep) for cell in every}
    assert len(trials_of(every, sweep)) == 5  # both numbers of rounds have the same trials
    for count in (2, 3, 7):
        parts = divide(every, sweep.together, count)
        where: dict[str, set[int]] = {}
        for number, part in enumerate(parts):
            for cell in part:
                where.setdefault(trials[cell].identity, set()).add(number)
        assert all(len(numbers) == 1 for numbers in where.values())
        assert sum(bool(part) for part in parts) == 2  # one per method


def test_honest_trials_choose_once_for_all_attacks() -> None:
    attacks = [{"name": ["none", "sign-flip"], "fraction": [0.2, 0.5]}]
    for honest, count in ((True, 5), (False, 20)):
        every, sweep = expand_sweep(tables(attack=attacks, sweep={**APART, "tune_honest": honest}))
        trials = trials_of(every, sweep)
        assert (len(every), len(trials)) == (40, count)
        assert all((trial.experiment.attack is None) == honest for trial in trials)
        where = [{trial_of(cell, sweep).identity for cell in part} for part in divide(every, sweep.together, 3)]
        assert sum(map(len, where)) == count  # no trial is in two parts
    same, sweep = expand_sweep(tables(attack=attacks, sweep={"tune": ["algorithm.lr"], "tune_honest": True}))
    assert len(trials_of(same, sweep)) == 5
    with pytest.raises(EquipoiseError, match=r"sweep\.tune_honest needs sweep\.tune"):
        expand_sweep(tables(sweep={"tune_honest": True}))


def worth(monkeypatch: pytest.MonkeyPatch, scores: dict[float, float]) -> None:
    """Let every trial be done, with these scores by rate."""
    monkeypatch.setattr(SweepResults, "done", lambda self, cell: True)
    monkeypatch.setattr(tuning, "_worth", lambda cell, by, results: (scores[cell.experiment.algorithm.lr],) * 2)


def test_the_chosen_value_is_that_of_the_best_trial_and_an_end_of_the_grid_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every, sweep = expand_sweep(tables())
    worth(monkeypatch, {1e-5: 1.0, 0.05: 3.0, 0.1: 2.0})
    ditto, local = find_choices(every, sweep, SweepResults(tmp_path))
    assert (ditto.values, ditto.grid, ditto.at_end) == (
        {"algorithm.lr": 0.05},
        {"algorithm.lr": [1e-5, 0.05, 0.1]},
        [],
    )
    assert ditto.sentence() == "ditto: lr 0.05 of 1e-05, 0.05, 0.1"
    assert local.sentence() == "local: lr 0.1 of 1e-05, 0.1; lr 0.1 is at the end of its grid"
    _, chosen = tuned(every, sweep, SweepResults(tmp_path))
    assert sorted((c.experiment.algorithm_name, c.experiment.algorithm.lr, c.seed) for c in chosen) == [
        ("ditto", 0.05, 0),
        ("ditto", 0.05, 1),
        ("local", 0.1, 0),
        ("local", 0.1, 1),
    ]


def recorded(cell: SweepRun, score: float, metric: str = "rmse", **more: Any) -> Record:
    """Return a record of a run with a score of our own, so that nothing needs to run."""
    experiment = cell.experiment
    summary = {"metric": metric, "dataset": "linear", "higher_is_better": metric != "rmse", "seconds": 1.0}
    summary |= {"bytes_up": 1, "bytes_down": 1, "gradient_samples": 1}
    summary |= {"personal": {metric: score, f"validation_{metric}": score}}
    settings = kept_settings(flatten(experiment.tables()))
    return Record(settings_digest(experiment), cell.seed, settings, **{"summary": summary, **more})


@pytest.mark.parametrize("sweep", [APART, {"tune": ["algorithm.lr"]}], ids=["own trials", "first seed"])
def test_after_a_longer_grid_only_the_new_choice_is_no_trial(sweep: dict[str, Any], tmp_path: Path) -> None:
    def described(*rates: float) -> dict[str, Any]:
        return tables(algorithm={"name": "ditto", "lr": list(rates)}, sweep=sweep)

    def flags() -> dict[tuple[float, int], bool]:
        return {(r.settings["algorithm.lr"], r.seed): r.trial for r in read_records(tmp_path / "r.jsonl")}

    scores = {0.1: 3.0, 0.2: 2.0, 0.3: 1.0}
    for rates, best in (((0.1, 0.2), 0.2), ((0.1, 0.2, 0.3), 0.3)):
        every, settings = expand_sweep(described(*rates))
        trials = trials_of(every, settings)
        there = read_records(tmp_path / "r.jsonl") if (tmp_path / "r.jsonl").exists() else []
        book = RecordedRuns({tmp_path / "r.jsonl": there})
        chosen = [cell for cell in every if cell.experiment.algorithm.lr == best]
        new = [cell for cell in (*trials, *chosen) if book.find(cell.experiment) is None]
        add_records(tmp_path / "r.jsonl", [recorded(cell, scores[cell.experiment.algorithm.lr]) for cell in new])
        (tmp_path / "s.toml").write_text(tomli_w.dumps(described(*rates)))
        done = equipoise_command("sweep", "s.toml", "--out", "runs", "--record", "r.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert names(tmp_path / "runs") == set()
        no_trials = {key for key, trial in flags().items() if not trial}
        assert no_trials == {(best, 0), (best, 1)}


def test_only_flags_of_lines_that_were_made_elsewhere_are_changed(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    every, _ = expand_sweep(tables(algorithm={"name": "ditto", "lr": [0.1, 0.2]}, seed=0, sweep={}))
    one, other = (recorded(cell, 1.0, trial=True) for cell in every)
    add_records(file, [replace(one, summary={}, failed="no memory"), other])
    results = SweepResults(tmp_path / "runs", RecordedRuns.read([file]))
    recorder = SweepRecorder(file, results)
    assert all(map(results.record, every))
    newer = recorded(every[0], 2.0, trial=True)
    add_records(file, [newer])  # by another process
    file.write_text(newer.line() + "\n")  # and someone removed the other line
    recorder.add(every, trial=False)
    assert read_records(file) == [newer]
    recorder.mark(every, every[:1])
    assert read_records(file) == [replace(newer, trial=False)]
    recorder.mark(every, every[1:])
    assert read_records(file) == [newer]


def test_variants_with_other_seeds_are_chosen_by_their_own_first_seed(tmp_path: Path) -> None:
    rates = [0.1, 0.2]
    variants = [
        {"seed": [0, 1], "algorithm": {"name": "ditto", "lr": rates}},
        {"seed": [5, 0], "algorithm": {"name": "fedavg", "lr": rates}},
        {"seed": [6, 7], "algorithm": {"name": "local", "lr": rates}},
    ]
    described = small(variant=variants, sweep={"tune": ["algorithm.lr"]})
    del described["algorithm"]
    every, sweep = expand_sweep(described)
    trials = trials_of(every, sweep)
    assert {(cell.experiment.algorithm_name, cell.seed) for cell in trials} == {
        ("ditto", 0),
        ("fedavg", 0),
        ("local", 6),
    }
    assert len(trials) == 6
    records = [recorded(cell, cell.experiment.algorithm.lr) for cell in trials]
    results = SweepResults(tmp_path, RecordedRuns({tmp_path / "r.jsonl": records}))
    chosen = tuned(every, sweep, results)[1]
    assert sorted((c.experiment.algorithm_name, c.seed) for c in chosen) == [
        *(("ditto", 0), ("ditto", 1), ("fedavg", 0), ("fedavg", 5), ("local", 6), ("local", 7))
    ]
    for count in (2, 3):
        parts = divide(every, sweep.together, count)
        apart = [trial for part in parts for trial in trials_of(part, sweep, every[0].seed)]
        assert {(c.identity, c.seed) for c in apart} == {(c.identity, c.seed) for c in trials}


def test_values_with_different_seeds_are_compared_with_a_common_one_or_not_at_all() -> None:
    def described(*seeds: list[int]) -> tuple[list[SweepRun], Any]:
        variants = [{"seed": own, "algorithm": {"name": "ditto", "lr": 0.1 * (i + 1)}} for i, own in enumerate(seeds)]
        given = small(variant=variants, sweep={"tune": ["algorithm.lr"]})
        del given["algorithm"]
        return expand_sweep(given)

    assert [cell.seed for cell in trials_of(*described([0, 1], [1, 2]))] == [1, 1]
    with pytest.raises(EquipoiseError) as caught:
        trials_of(*described([0, 1], [2, 3]))
    is_one_sentence(caught.value, "algorithm.lr have no seed in common", "sweep.tune_seed")


@pytest.mark.parametrize(("metric", "best"), [("r2", -0.5), ("rmse", -2.0)])
def test_the_score_of_a_choice_keeps_its_sign(metric: str, best: float, tmp_path: Path) -> None:
    every, sweep = expand_sweep(tables(algorithm={"name": "ditto", "lr": [0.1, 0.2]}, seed=0))
    cells = trials_of(every, sweep)
    records = [recorded(cell, score, metric) for cell, score in zip(cells, (-2.0, -0.5), strict=True)]
    [choice] = find_choices(every, sweep, SweepResults(tmp_path, RecordedRuns({tmp_path / "r.jsonl": records})))
    assert choice.score == best


@pytest.mark.parametrize(("by", "chosen"), [("personal", 0.2), ("unseen", 0.1)])
def test_clients_that_train_and_unseen_ones_may_choose_differently(by: str, chosen: float, tmp_path: Path) -> None:
    given = tables(algorithm={"name": "ditto", "lr": [0.1, 0.2]}, seed=0, sweep={**APART, "by": by})
    every, sweep = expand_sweep({**given, "data": {**given["data"], "unseen": 0.5}})
    records = []
    for cell, trained, unseen in zip(trials_of(every, sweep), (0.5, 0.9), (0.8, 0.3), strict=True):
        record = recorded(cell, trained, "accuracy")
        of_unseen = {"personal": {"validation_accuracy": unseen}}
        records.append(replace(record, summary={**record.summary, "unseen": of_unseen}))
    [choice] = find_choices(every, sweep, SweepResults(tmp_path, RecordedRuns({tmp_path / "r.jsonl": records})))
    assert choice.values == {"algorithm.lr": chosen}


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6, unique=True), st.data())
def test_a_value_is_at_an_end_exactly_if_no_tried_value_is_beyond_it(grid: list[float], data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(grid))
    choice = Choice("", "", {}, {"algorithm.lr": value}, {"algorithm.lr": sorted(grid)}, 1.0)
    inside = any(v < value for v in grid) and any(v > value for v in grid)
    assert choice.at_end == ([] if inside or len(grid) == 1 else ["algorithm.lr"])


def test_words_have_no_ends() -> None:
    choice = Choice("", "", {}, {"algorithm.begin": "own"}, {"algorithm.begin": ["own", "consensus"]}, None)
    assert choice.at_end == []
    assert choice.sentence() == "begin own of own, consensus; all trials failed or diverged"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with trials of their own, run with --record in one go."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "many.toml").write_text(tomli_w.dumps(tables()))
    done = equipoise_command("sweep", "many.toml", "--out", "whole", "--record", "whole.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*-seed*")}


def test_what_a_tuned_sweep_runs_prints_and_writes(place: Path) -> None:
    every, sweep = expand_sweep(tables())
    results = SweepResults(place / "whole")
    trials, chosen = tuned(every, sweep, results)
    assert names(place / "whole") == {cell.folder(place / "whole").name for cell in (*trials, *chosen)}
    assert len(trials) + len(chosen) == 5 + 4
    said = (place / "said.txt").read_text()
    for choice in find_choices(every, sweep, results):
        assert f"Tuned {choice.sentence()}" in said
    written = json.loads((place / "whole" / SWEEP).read_text())
    assert len(written["trials"]) == 5
    assert {tuple(c["values"].items()) for c in written["choices"].values()} == {
        tuple(choice.values.items()) for choice in find_choices(every, sweep, results)
    }
    assert rejected_runs(place / "whole") >= set(written["trials"])
    found, skipped = search_runs([place / "whole"])
    assert {run.path.name for run in found} == {cell.folder(place / "whole").name for cell in chosen}
    assert len(skipped.rejected) == 5
    records = read_records(place / "whole.jsonl")
    assert sorted(record.seed for record in records if record.trial) == [100] * 5
    assert sorted(record.seed for record in records if not record.trial) == [0, 0, 1, 1]


def test_records_are_compared_and_drawn_like_run_folders(place: Path) -> None:
    one, other = (
        json.loads(equipoise_command("compare", source, "--format", "json", cwd=place).stdout)
        for source in ("whole", "whole.jsonl")
    )
    assert len(one) == len(other) == 2
    for row in other:
        [same] = [each for each in one if each["algorithm"] == row["algorithm"]]
        assert row["personal"] == pytest.approx(same["personal"], rel=1e-5)
        assert row["seeds"] == same["seeds"] == 2
    every = json.loads(equipoise_command("compare", "whole.jsonl", "--all", "--format", "json", cwd=place).stdout)
    assert sum(row["seeds"] for row in every) == 9
    done = equipoise_command("plot", "whole.jsonl", "--out", "curves.svg", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "ditto" in (place / "curves.svg").read_text()
    one_sentence(equipoise_command("compare", "gone.jsonl", cwd=place), 2, "there is no file gone.jsonl")
    one_sentence(equipoise_command("report", "whole.jsonl", cwd=place), 2, "is a file; name the folder of a run")


@pytest.mark.parametrize("kept", [3, 9])
def test_a_sweep_that_was_cut_off_continues_from_its_records_elsewhere(place: Path, tmp_path: Path, kept: int) -> None:
    """Whatever part of the records another machine gets, it runs the rest and prints the same table."""
    lines = (place / "whole.jsonl").read_text().splitlines(keepends=True)
    first = sorted(lines, key=lambda line: "trial" not in json.loads(line))[:kept]  # trials come first
    (tmp_path / "part.jsonl").write_text("".join(line for line in lines if line in first))
    words = ["sweep", place / "many.toml", "--out", "rest", "--record", "part.jsonl"]
    done = equipoise_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(names(tmp_path / "rest")) == 9 - kept
    if kept:
        assert f"{min(kept, 5)} of 5 trials are in part.jsonl (made by version" in done.stderr
    if kept > 5:
        assert f"{kept - 5} of 4 runs are in part.jsonl" in done.stderr
    whole = (place / "said.txt").read_text()
    assert done.stdout.replace("rest", "whole") == whole

    def results(file: Path) -> list[Any]:
        found = [json.loads(record.line()) for record in read_records(file)]
        for each in found:
            each["summary"].pop("seconds")
            each["curves"].pop("train_seconds")
        return found

    assert results(tmp_path / "part.jsonl") == results(place / "whole.jsonl")


def test_a_run_that_was_a_trial_of_one_sweep_and_is_wanted_by_another_is_no_trial_any_more(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.jsonl").write_bytes((place / "whole.jsonl").read_bytes())
    (tmp_path / "one.toml").write_text(tomli_w.dumps(tables(seed=100, rounds=2, sweep={})))
    done = equipoise_command("sweep", "one.toml", "--out", "one", "--record", "r.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 of 5 runs are in r.jsonl" in done.stderr
    assert names(tmp_path / "one") == set()
    assert not any(record.trial for record in read_records(tmp_path / "r.jsonl"))


def test_a_recorded_failure_counts_as_a_failure(tmp_path: Path) -> None:
    every, sweep = expand_sweep(small(seed=[0, 1], algorithm={"lr": [0.1, 1e30]}, sweep={"tune": ["algorithm.lr"]}))
    (tmp_path / "bad.toml").write_text(
        tomli_w.dumps(small(seed=[0, 1], algorithm={"lr": [0.1, 1e30]}, sweep={"tune": ["algorithm.lr"]}))
    )
    assert equipoise_command("sweep", "bad.toml", "--record", "r.jsonl", cwd=tmp_path).returncode == 0
    results = SweepResults(tmp_path / "other", RecordedRuns.read([tmp_path / "r.jsonl"]))
    assert [results.failed(cell) for cell in every if cell.seed == 0] == [False, True]
    assert [cell.experiment.algorithm.lr for cell in tuned(every, sweep, results)[1]] == [0.1, 0.1]
    (tmp_path / "bad.toml").write_text(tomli_w.dumps(small(algorithm={"lr": [0.1, 1e30]})))
    done = equipoise_command("sweep", "bad.toml", "--out", "new", "--record", "r.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 of 2 runs failed, the first in r.jsonl/" in done.stderr
    assert "remove its line from r.jsonl to run it again" in done.stderr


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(tomli_w.dumps(tables()))
    (tmp_path / "folder").mkdir()
    for path, words in (("folder", "folder is a folder; name a file"), ("s.toml/r.jsonl", "cannot be written")):
        one_sentence(equipoise_command("sweep", "s.toml", "--out", "runs", "--record", path, cwd=tmp_path), 2, words)
        one_sentence(equipoise_command("record", "folder", "--to", path, cwd=tmp_path), 2, words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_parts_of_a_tuned_sweep_are_the_sweep(place: Path, tmp_path: Path) -> None:
    for number in (2, 3, 1):
        words = ["--shard", f"{number}/3", "--out", "parts", "--record", "parts.jsonl"]
        assert equipoise_command("sweep", place / "many.toml", *words, cwd=tmp_path).returncode == 0
    assert names(tmp_path / "parts") == names(place / "whole")
    one, other = (json.loads((folder / SWEEP).read_text()) for folder in (place / "whole", tmp_path / "parts"))
    assert one == other
    assert [(r.digest, r.seed, r.trial) for r in read_records(tmp_path / "parts.jsonl")] == [
        (r.digest, r.seed, r.trial) for r in read_records(place / "whole.jsonl")
    ]


def test_a_trial_that_is_chosen_later_is_no_trial_any_more(tmp_path: Path) -> None:
    record_choices(tmp_path, ["algorithm.lr"], "personal", {"a": True, "b": False}, ["t", "u"], {"g": {"values": 1}})
    assert rejected_runs(tmp_path) == {"b", "t", "u"}
    record_choices(tmp_path, [], "personal", {"t": True})
    assert rejected_runs(tmp_path) == {"b", "u"}
    assert json.loads((tmp_path / SWEEP).read_text())["choices"] == {"g": {"values": 1}}


def test_trials_are_chosen_by_what_the_folders_say(tmp_path: Path) -> None:
    """The other way than with --record: results of run folders alone."""
    every, sweep = expand_sweep(tables())
    results = SweepResults(tmp_path)
    execute(trials_of(every, sweep), tmp_path, None, 1, lambda cell, notes: None)
    errors = {
        (c.experiment.algorithm_name, c.experiment.algorithm.lr): results.summary(c)["personal"]["validation_rmse"]
        for c in trials_of(every, sweep)
    }
    for choice in find_choices(every, sweep, results):
        name = choice.settings["algorithm.name"]
        assert choice.values["algorithm.lr"] == min(
            (rate for method, rate in errors if method == name), key=lambda rate: errors[name, rate]
        )
        assert choice.score == pytest.approx(min(v for (method, _), v in errors.items() if method == name))

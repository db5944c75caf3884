"""Many runs from one file: which, in what order, and that what is done stays done."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from equipoise.algorithms import ALGORITHMS
from equipoise.config.experiment import override
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.runs import process_pool, sweep
from equipoise.runs.process_pool import execute
from equipoise.runs.sweep import expand_sweep, grid
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import tuned
from equipoise.storage.run_folder import RunFolder, read_toml
from tests.support.commands import ROOT, equipoise_command, small
from tests.support.forked import forked_workers
from tests.support.waiting import FOREVER, interrupted, start

EXPERIMENTS = [
    path
    for path in sorted(ROOT.glob("experiments/*/*.toml"))
    if path.stem != "exhibits"  # tests/reproduction has these
]


def test_every_combination_once_and_lists_that_are_values_stay() -> None:
    found = grid(
        {
            "seed": [0, 1],
            "data": {
                "split": [0.7, 0.1, 0.2],
                "partition": [{"kind": "iid"}, {"kind": "labels", "per_client": [2, 3]}],
            },
            "algorithm": [{"name": "flame", "lam": [0.1, 1.0]}, {"name": "local"}],
        }
    )
    assert len(found) == 2 * 3 * 3
    assert len({json.dumps(each, sort_keys=True) for each in found}) == len(found)
    assert all(each["data"]["split"] == [0.7, 0.1, 0.2] for each in found)
    assert {each["algorithm"].get("lam") for each in found} == {0.1, 1.0, None}
    several = grid({"data": {"split": [[0.7, 0.1, 0.2], [0.8, 0.0, 0.2]]}})
    assert [each["data"]["split"][0] for each in several] == [0.7, 0.8]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"seed": []}, "a list of values needs at least one"),
        ({"algorithm": {"lam": [0.1, -1.0]}}, "algorithm.lam = -1.0 is not allowed"),
        ({"sweep": {"tune": ["algorithm.lr"]}}, "sweep.tune names algorithm.lr, which has only one value"),
        ({"sweep": {"tunes": ["algorithm.lr"]}}, "unknown setting sweep.tunes"),
        ({"sweep": 3}, "sweep = 3 is not allowed; it must be a section"),
        ({"sweep": {"by": "best"}}, "sweep.by = 'best' is not allowed"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(more: dict[str, Any], words: str) -> None:
    with pytest.raises(EquipoiseError, match=words):
        expand_sweep(small(**more))


def test_what_is_listed_twice_is_run_once() -> None:
    assert len(expand_sweep(small(seed=[0, 0, 1], algorithm={"lr": [0.1, 0.1]}))[0]) == 2


def test_a_setting_on_top_changes_every_section_of_its_name() -> None:
    tables = override(small(algorithm=[{"name": "ditto"}, {"name": "local"}]), ["algorithm.lr=[0.1, 0.2]"])
    assert sorted(cell.experiment.algorithm.lr for cell in expand_sweep(tables)[0]) == [0.1, 0.1, 0.2, 0.2]


def test_a_cell_is_known_by_its_settings_not_by_its_label(tmp_path: Path) -> None:
    some, _ = expand_sweep(small(algorithm={"lam": [0.1, 1.0]}))
    (other,), _ = expand_sweep(small(algorithm={"lam": 1.0}))
    assert some[1].identity == other.identity != some[0].identity
    (tmp_path / some[1].folder(tmp_path).name).mkdir()
    assert other.folder(tmp_path) == some[1].folder(tmp_path)


@pytest.mark.slow
def test_tuning_keeps_the_best_of_the_first_seed(tmp_path: Path) -> None:
    every, settings = expand_sweep(
        small(
            seed=[3, 4],
            data={"samples": 30},
            algorithm=[{"name": "ditto", "lr": [1e-5, 0.05]}, {"name": "fedavg", "lr": 0.05}],
            sweep={"tune": ["algorithm.lr"], "by": "global"},
        )
    )
    assert len(every) == 6
    trials, rest = tuned(every, settings, SweepResults(tmp_path))
    assert [cell.seed for cell in trials] == [3, 3, 3]
    assert rest == []
    execute(trials, tmp_path, None, 1, lambda cell, notes: None)
    _, rest = tuned(every, settings, SweepResults(tmp_path))
    assert {(c.experiment.algorithm_name, c.experiment.algorithm.lr) for c in rest} == {
        ("ditto", 0.05),
        ("fedavg", 0.05),
    }
    assert sorted(cell.seed for cell in rest) == [3, 3, 4, 4]


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    every, _ = expand_sweep(small(algorithm={"lam": [0.1, 1.0]}))
    done: list[str] = []
    for _ in range(2):
        execute(every, tmp_path, None, 1, lambda cell, notes: done.append(cell.identity))
    assert done == [cell.identity for cell in every]


@pytest.mark.slow
def test_several_at_a_time_are_the_same_runs(tmp_path: Path) -> None:
    every, _ = expand_sweep(small(algorithm={"lam": [0.1, 1.0]}))
    execute(every, tmp_path / "one", None, 1, lambda cell, notes: None)
    execute(every, tmp_path / "two", None, 2, lambda cell, notes: None)
    for cell in every:
        one, two = ((cell.folder(tmp_path / jobs) / "metrics.jsonl").read_text() for jobs in ("one", "two"))
        assert one == two


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    every, _ = expand_sweep(small(algorithm={"lr": [0.1, 1e30]}))
    told: list[str] = []
    execute(every, tmp_path, None, 1, lambda cell, notes: told.extend(notes))
    assert any("failed: round" in note for note in told)
    assert every[0].done(tmp_path)
    assert every[1].failed(tmp_path)
    told.clear()
    execute(every, tmp_path, None, 1, lambda cell, notes: told.append(cell.label))
    assert told == []


def test_a_candidate_that_diverges_loses(tmp_path: Path) -> None:
    every, settings = expand_sweep(small(algorithm={"lr": [1e30, 0.05, 1e-6]}, sweep={"tune": ["algorithm.lr"]}))
    execute(every, tmp_path, None, 1, lambda cell, notes: None)
    _, chosen = tuned(every, settings, SweepResults(tmp_path))
    assert [cell.experiment.algorithm.lr for cell in chosen] == [0.05]


@pytest.mark.slow
def test_ctrl_c_with_several_at_a_time_saves_every_run(tmp_path: Path) -> None:
    """Ctrl-C reaches the parent; each run at work saves its whole rounds, and the same command goes on."""
    file = tmp_path / "long.toml"
    long = {"rounds": FOREVER, "evaluate_every": FOREVER, "checkpoint_every": FOREVER}
    file.write_text(tomli_w.dumps(small(**long, algorithm={"lam": [0.1, 1.0, 2.0]})))
    command = [sys.executable, "-m", "equipoise", "sweep", str(file), "--jobs", "2", "--out", "runs"]
    process = start(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    logs = (tmp_path / "runs").glob
    errors = interrupted(process, lambda: len([p for p in logs("*/metrics.jsonl") if p.stat().st_size > 500]) == 2)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "equipoise sweep" in errors
    saved = [list(run.glob("checkpoint/round-*.json")) for run in tmp_path.glob("runs/*")]
    assert len(saved) == 2
    assert all(saved)


@pytest.mark.slow
def test_ctrl_c_reaches_workers_that_are_still_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every, _ = expand_sweep(small(rounds=FOREVER, checkpoint_every=FOREVER, algorithm={"lam": [0.1, 1.0, 2.0]}))
    waited: list[object] = []

    def interrupt_first(*given: Any, **options: Any) -> Any:
        waited.append(given)
        if len(waited) == 1:
            raise KeyboardInterrupt  # right after the processes were created, which then load PyTorch for a second
        return wait(*given, **options)

    monkeypatch.setattr(process_pool, "wait", interrupt_first)
    with pytest.raises(Interrupted):
        execute(every, tmp_path, None, 2, nobody)
    assert not any(cell.done(tmp_path) for cell in every)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(small(seed=[0, 1])))
    result = equipoise_command("sweep", file, "--out", tmp_path / "runs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "±" in result.stdout
    for kind in ("scores", "losses", "fairness"):
        picture = tmp_path / f"{kind}.png"
        drawn = equipoise_command("plot", tmp_path / "runs", "--kind", kind, "--out", picture, cwd=tmp_path)
        assert drawn.returncode == 0, drawn.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
    none = equipoise_command("plot", "runs", "--kind", "attacks", "--out", "a.png", cwd=tmp_path)
    assert none.returncode == 2
    assert "none of these runs has malicious clients" in none.stderr


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_experiment_can_be_read(path: Path) -> None:
    found, _ = expand_sweep(read_toml(path))
    assert len({(cell.identity, cell.seed) for cell in found}) == len(found)


def test_lists_of_lists_are_one_value_where_that_is_the_setting() -> None:
    pixels = [[0, 0], [0, 1]]
    for attack in ({"name": "backdoor"}, {"name": "weight-inflation", "inner": {"name": "dba"}}):
        for value, runs in ((pixels, 1), ([pixels, pixels[:1]], 2)):
            at = attack.get("inner", attack)
            table = {
                "attack": {**attack, "inner": {**at, "pixels": value}} if "inner" in attack else {**at, "pixels": value}
            }
            assert len(sweep.grid(table)) == runs
    assert len(sweep.grid({"attack": {"name": "alie", "clients": [["a"], ["b", "c"]], "z": [0.1, 0.2]}})) == 4


def test_lists_of_settings_are_known() -> None:
    known = {"data": "split", "deploy": "names", "devices": "iterations", "": "targets"}
    assert all(key in sweep._list_settings(section, "") for section, key in known.items())
    named = {("attack", "sign-flip"): "clients", ("model", "mlp"): "hidden", ("algorithm", "knn-per"): "k"}
    assert all(key in sweep._list_settings(*section) for section, key in named.items())
    assert "lam" not in sweep._list_settings("algorithm", "flame")


def test_variants_are_laid_over_the_rest_and_scales_over_both() -> None:
    tables = small(
        variant=[
            {"algorithm": {"name": "local", "lr": [0.1, 0.2]}, "scale": {"smoke": {"algorithm": {"epochs": 3}}}},
            {"rounds": 5},
        ],
        scale={"smoke": {"rounds": 1}, "small": {"data": {"samples": 20}}},
    )
    smoke, _ = expand_sweep(tables, "smoke")
    assert [(c.experiment.algorithm_name, c.experiment.algorithm.lr, c.experiment.algorithm.epochs) for c in smoke] == [
        ("local", 0.1, 3),
        ("local", 0.2, 3),
        ("ditto", 0.1, 1),
    ]
    assert all(cell.experiment.schedule.rounds == 1 for cell in smoke)
    usual, _ = expand_sweep(tables)
    assert [cell.experiment.schedule.rounds for cell in usual] == [2, 2, 5]
    assert all(cell.experiment.data.source.samples == 20 for cell in usual)
    with pytest.raises(EquipoiseError, match="no scale 'paper'; it has smoke, small"):
        expand_sweep(tables, "paper")
    with pytest.raises(EquipoiseError, match=r"must be a list of sections, \[\[variant\]\]"):
        expand_sweep(small(variant={"rounds": 1}))


def test_a_scale_changes_every_section_of_a_name_and_replaces_what_is_named_anew() -> None:
    tables = {"algorithm": [{"name": "a", "lr": 1}, {"name": "b"}], "data": {"partition": {"kind": "x", "beta": 1}}}
    over = {"algorithm": {"lr": 2}, "data": {"partition": {"kind": "y"}}}
    assert sweep.merge_tables(tables, over) == {
        "algorithm": [{"name": "a", "lr": 2}, {"name": "b", "lr": 2}],
        "data": {"partition": {"kind": "y"}},
    }
    assert tables["algorithm"][0]["lr"] == 1  # what was there is left alone


ALIKE = [
    {"name": "fedavg", "lr": 0.1},
    {"name": "fedavg-ft", "lr": 0.1, "finetune_epochs": 2},
    {"name": "knn-per", "lr": 0.1},
]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_methods_that_train_alike_train_once_and_score_as_if_they_had_trained(jobs: int, tmp_path: Path) -> None:
    every, _ = expand_sweep(small(algorithm=ALIKE, seed=[0, 1], data={"unseen": 0.3}))
    chained = sweep.chains(every)
    assert [len(chain) for chain in chained] == [3, 3]
    with forked_workers():
        execute(every, tmp_path / "shared", None, jobs, nobody)
    for cell in every:
        execute([cell], tmp_path / cell.identity, None, 1, nobody)
        ours, own = (RunFolder(cell.folder(tmp_path / place)) for place in ("shared", cell.identity))
        written = read_toml(ours.config)["written"]
        assert ("trained" in written) == (cell.experiment.algorithm_name != "fedavg")
        skip = ("seconds", "samples_per_second", "peak_memory_mb")
        a, b = ({k: v for k, v in f.read_summary().items() if k not in skip} for f in (ours, own))
        assert a == b
        assert ours.read_metrics()[-1] == own.read_metrics()[-1]
        assert "personal" not in ours.read_metrics()[0] or "trained" not in written
        assert (ours.path / "clients.csv").read_text() == (own.path / "clients.csv").read_text()


def test_what_trains_otherwise_trains_for_itself() -> None:
    names = [name for name in ALGORITHMS if name not in ("fedavg", "fedavg-ft", "knn-per", "fedprox-ft")]
    other = [{"name": "fedavg", "lr": 0.2}, *({"name": name, "lr": 0.1} for name in names)]
    other += [{"name": "lp-proj", "lr": 0.1, "d_sub": 5}]
    every, _ = expand_sweep(small(algorithm=[*ALIKE, *other]))
    assert [len(chain) for chain in sweep.chains(every)] == [3, *(1 for _ in other)]
    pair, _ = expand_sweep(small(algorithm=[{"name": "fedprox", "mu": 0.3}, {"name": "fedprox-ft", "mu": 0.3}]))
    assert [len(chain) for chain in sweep.chains(pair)] == [2]
    later, _ = expand_sweep(small(algorithm=ALIKE, evaluate_every=[1, 2]))
    assert [len(chain) for chain in sweep.chains(later)] == [3, 3]


def nobody(cell: sweep.SweepRun, notes: list[str]) -> None:
    return


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_scoring_that_was_broken_off_begins_anew(
    alone: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the models are scored, or when the log is written and the checkpoint is not; with and without the
    other run, whose training it was."""
    every, _ = expand_sweep(small(algorithm=ALIKE))
    execute(every, tmp_path / "whole", None, 1, nobody)
    execute(every[:-1], tmp_path / "broken", None, 1, nobody)
    last, step = every[-1], {"before": "new_scores", "after": "save_checkpoint"}[where]
    with monkeypatch.context() as patch:
        whole = getattr(Simulation, step)

        def stop(self: Simulation) -> Any:
            if self.rescored or (step == "new_scores" and self.done):
                raise KeyboardInterrupt
            return whole(self)

        patch.setattr(Simulation, step, stop)
        with pytest.raises(KeyboardInterrupt):
            execute(every, tmp_path / "broken", None, 1, nobody)
    assert not last.done(tmp_path / "broken")
    if alone:
        for cell in every[:-1]:
            shutil.rmtree(cell.folder(tmp_path / "broken"))
    execute([last] if alone else every, tmp_path / "broken", None, 1, nobody)
    ours, own = (RunFolder(last.folder(tmp_path / place)).read_summary() for place in ("broken", "whole"))
    for kind in ("personal", "global", "hybrid"):
        assert ours[kind] == own[kind]


def test_a_run_of_its_own_that_was_broken_off_goes_on_by_itself(tmp_path: Path) -> None:
    """Its folder is there without a checkpoint; another's training is not mixed into it."""
    every, _ = expand_sweep(small(algorithm=ALIKE))
    last = every[-1]
    folder = last.folder(tmp_path)
    with RunFolder.at_work(folder, last.experiment.tables(), False):
        pass
    execute(every, tmp_path, None, 1, nobody)
    assert "trained" not in read_toml(folder / "run.toml")["written"]
    execute([last], tmp_path / "alone", None, 1, nobody)
    alone = RunFolder(last.folder(tmp_path / "alone"))
    assert RunFolder(folder).read_summary()["personal"] == alone.read_summary()["personal"]


def test_a_training_that_fails_fails_for_all_that_share_it(tmp_path: Path) -> None:
    every, _ = expand_sweep(small(algorithm=[{**each, "lr": 1e30, "epochs": 20} for each in ALIKE]))
    heard: list[sweep.SweepRun] = []
    execute(every, tmp_path, None, 1, lambda cell, notes: heard.append(cell))
    assert all(cell.failed(tmp_path) for cell in every)
    assert len(heard) == len(every)
    assert not (every[-1].folder(tmp_path) / "run.toml").exists()


def test_what_is_set_on_the_command_line_comes_last(tmp_path: Path) -> None:
    tables = small(
        variant=[{"algorithm": {"name": "local", "lr": 0.1}}, {"algorithm": [{"name": "ditto"}, {"name": "fedavg"}]}],
        scale={"small": {"rounds": 3}},
    )
    every, _ = expand_sweep(tables, None, ["algorithm.lr=0.5", "rounds=7"])
    assert {(c.experiment.algorithm.lr, c.experiment.schedule.rounds) for c in every} == {(0.5, 7)}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"variant": []}, "must be a list of sections"),
        ({"variant": [{"sweep": {"tune": []}}]}, "a variant cannot have a section"),
        ({"scale": {"small": {}, "paper": {"round": 3}}}, "unknown setting round"),
        ({"scale": {"small": 3}}, "must be sections, such as"),
    ],
)
def test_wrong_variants_and_scales_are_told(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(EquipoiseError, match=words):
        expand_sweep(small(**tables))


def test_a_file_without_a_small_scale_is_run_as_it_stands() -> None:
    every, _ = expand_sweep(small(scale={"smoke": {"rounds": 1}}))
    assert every[0].experiment.schedule.rounds == 2


def test_a_setting_is_a_list_only_for_those_whose_value_is_one() -> None:
    both = grid({"model": [{"name": "deq-residual", "blocks": [1, 2]}, {"name": "resnet-14", "blocks": [1, 1, 1]}]})
    assert [each["model"]["blocks"] for each in both] == [1, 2, [1, 1, 1]]

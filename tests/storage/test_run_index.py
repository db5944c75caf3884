"""Which runs are found in folders, which are skipped, and which differ only in the seed."""

import json
import shutil
from pathlib import Path

import pytest
import tomli_w
import torch
from torch import nn

import equipoise as eq
from equipoise.data.federation import from_clients
from equipoise.errors import EquipoiseError
from equipoise.runs.process_pool import execute
from equipoise.runs.sweep import expand_sweep
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import record_tuning, tuned
from equipoise.storage.run_folder import read_toml
from equipoise.storage.run_index import find_runs, grouped, search_runs
from equipoise.storage.sweep_choices import SWEEP, record_choices, rejected_runs
from tests.support.commands import equipoise_command, one_sentence, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned sweep: three values of lam with the first seed, and the best of them with the second."""
    out = tmp_path_factory.mktemp("sweep")
    tables = small(seed=[0, 1], algorithm={"lam": [0.1, 1.0, 10.0]}, sweep={"tune": ["algorithm.lam"]})
    (out / "tuned.toml").write_text(tomli_w.dumps(tables))
    done = equipoise_command("sweep", "tuned.toml", "--out", "runs", "--quiet", cwd=out)
    assert done.returncode == 0, done.stderr
    return out


def test_what_tuning_rejected_is_skipped_by_name_unless_all_is_asked_for(folder: Path) -> None:
    runs = folder / "runs"
    every, sweep = expand_sweep(read_toml(folder / "tuned.toml"))
    chosen = {cell.folder(runs).name for cell in tuned(every, sweep, SweepResults(runs))[1]}
    found, skipped = search_runs([runs])
    assert {run.path.name for run in found} == chosen
    assert len(found) == 2
    assert len(skipped.rejected) == 2
    assert (skipped.unfinished, skipped.failed) == ((), ())
    assert len(search_runs([runs], rejected=True)[0]) == len(find_runs([runs])) == 4
    rows = json.loads(equipoise_command("compare", "runs", "--format", "json", cwd=folder).stdout)
    assert [row["seeds"] for row in rows] == [2]
    done = equipoise_command("compare", *sorted(runs.glob("ditto*")), "--format", "json", cwd=folder)
    assert json.loads(done.stdout) == rows  # the same runs, named one by one
    assert "rejected runs skipped: 2 (" in done.stderr
    assert "--all" in done.stderr
    whole = equipoise_command("compare", "runs", "--all", "--format", "json", cwd=folder)
    assert (len(json.loads(whole.stdout)), whole.stderr) == (3, "")


def test_a_rejected_run_that_is_asked_for_alone_is_shown(folder: Path) -> None:
    found, skipped = search_runs([search_runs([folder / "runs"])[1].rejected[0]])
    assert len(found) == 1
    assert skipped.sentences() == []


def test_a_later_sweep_decides_again(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder / "runs", runs)
    assert rejected_runs(runs)
    every, sweep = expand_sweep(small(algorithm={"lam": [0.1, 1.0, 10.0]}))
    record_tuning(every, sweep, SweepResults(runs))  # all values are wanted
    assert not {cell.folder(runs).name for cell in every} & rejected_runs(runs)


def test_a_sweep_without_tuning_writes_no_choices(tmp_path: Path) -> None:
    every, sweep = expand_sweep(small(algorithm={"lam": [0.1, 1.0]}))
    execute(every, tmp_path, None, 1, lambda cell, notes: None)
    record_tuning(every, sweep, SweepResults(tmp_path))
    assert not (tmp_path / SWEEP).exists()


def test_nothing_is_decided_before_all_trials_are_done(tmp_path: Path) -> None:
    every, sweep = expand_sweep(small(algorithm={"lam": [0.1, 1.0]}, sweep={"tune": ["algorithm.lam"]}))
    execute(every[:1], tmp_path, None, 1, lambda cell, notes: None)
    record_tuning(every, sweep, SweepResults(tmp_path))
    assert rejected_runs(tmp_path) == frozenset()


def test_choices_that_are_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    record_choices(tmp_path, ["algorithm.lr"], "personal", {"a": True, "b": False})
    assert rejected_runs(tmp_path) == {"b"}
    for text in ("[1, 2]", "{"):
        (tmp_path / SWEEP).write_text(text)
        with pytest.raises(EquipoiseError, match=r"sweep\.json is damaged"):
            rejected_runs(tmp_path)


def test_one_unfinished_or_failed_run_among_others_is_skipped_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    source = search_runs([folder / "runs"])[0][0].path
    for name in ("good", "half", "bad"):
        shutil.copytree(source, tmp_path / name)
    for name in ("half", "bad"):
        (tmp_path / name / "summary.json").unlink()
    (tmp_path / "bad" / "failed.json").write_text('{"why": "diverged"}')
    (tmp_path / "never-began").mkdir()
    (tmp_path / "never-began" / "failed.json").write_text('{"why": "its training failed"}')
    (tmp_path / "notes").mkdir()
    for places in (["."], ["good", "half", "bad"]):
        for command in (["compare", *places, "--format", "csv"], ["plot", *places, "--out", "a.png"]):
            done = equipoise_command(*command, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "unfinished runs skipped: 1 (half)" in done.stderr
            assert f"failed runs skipped: {2 if places == ['.'] else 1} (bad" in done.stderr
    one_sentence(equipoise_command("compare", "half", cwd=tmp_path), 2, "half has no summary.json", "--resume")
    one_sentence(equipoise_command("compare", "bad", cwd=tmp_path), 2, "bad has no summary.json", "failed.json")
    one_sentence(
        equipoise_command("compare", "half", "bad", cwd=tmp_path),
        2,
        "half has no summary.json",
        "also unfinished or failed: bad",
    )


def test_an_experiment_that_is_named_run_toml_is_not_a_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(small()))
    with pytest.raises(EquipoiseError, match="holds no run"):
        search_runs([tmp_path])
    shutil.copytree(search_runs([folder / "runs"])[0][0].path, tmp_path / "runs" / "one")
    assert [run.path for run in find_runs([tmp_path])] == [tmp_path / "runs" / "one"]
    done = equipoise_command("compare", "runs/one/run.toml", cwd=tmp_path)
    one_sentence(done, 2, "is a file", "such as runs/one")


def samples(seed: int, clients: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, 20, 4, generator=generator)
    return [(each, (each.sum(1) > 0).long()) for each in x]


def train(out: Path, clients: object, seed: int, **more: object) -> None:
    eq.train(nn.Linear(4, 2), clients, eq.FedAvg(lr=0.1), rounds=1, seed=seed, out=out, **more)


def own_split(data: list, seed: int) -> list[dict]:
    """The same samples, split by the user."""
    found = []
    for x, y in data:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, test = order[:15], order[15:]
        found.append({"train": (x[train], y[train]), "test": (x[test], y[test])})
    return found


@pytest.mark.parametrize("kind", ["split by the user", "unseen clients", "clients chosen by the seed", "drawn data"])
def test_runs_from_python_whose_seed_draws_from_the_same_data_are_one_group(kind: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        out = tmp_path / str(seed)
        if kind == "split by the user":
            train(out, own_split(samples(0), seed), seed)
        elif kind == "unseen clients":
            train(out, samples(0, clients=6), seed, unseen=0.3)
        elif kind == "drawn data":
            federation = eq.load_data("linear", clients=3, samples=12, seed=seed)
            module = nn.Linear(federation.x.shape[1], 1)
            eq.train(module, federation, eq.FedAvg(lr=0.1), rounds=1, seed=seed, out=out, loss="squared")
        else:
            federation = eq.load_data("digits-by-writer", clients=3, seed=seed)
            module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
            eq.train(module, federation, eq.FedAvg(lr=0.1), rounds=1, seed=seed, out=out)
    runs = find_runs([tmp_path])
    assert runs[0].drawn != runs[1].drawn
    assert [len(group) for group in grouped(runs)] == [2]


def test_other_data_are_another_group_and_a_copy_is_not_another_seed(tmp_path: Path) -> None:
    train(tmp_path / "a", samples(0), 0)
    train(tmp_path / "b", samples(1), 1)
    train(tmp_path / "c", samples(0), 1, split=(0.5, 0.0, 0.5))
    assert [len(group) for group in grouped(find_runs([tmp_path]))] == [1, 1, 1]
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    assert [len(group) for group in grouped(find_runs([tmp_path / "a", tmp_path / "d"]))] == [1]


def test_a_problem_does_not_depend_on_the_order_of_samples_but_on_every_one_of_them() -> None:
    def problem(data: list) -> str:
        return from_clients(data).problem()

    data = samples(0)
    same = [(x.flip(0), y.flip(0)) for x, y in data]
    other = [(x.clone(), y) for x, y in data]
    other[1][0][3, 2] += 1
    swapped = [data[1], data[0], data[2]]
    assert problem(data) == problem(same)
    assert len({problem(data), problem(other), problem(swapped)}) == 3

"""Paired comparison of runs, against numpy by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.errors import EquipoiseError
from equipoise.reporting.paired import paired_cells, paired_differences, paired_table
from equipoise.storage.client_scores import TRAINED, UNSEEN, read_client_scores
from equipoise.storage.run_index import FinishedRun
from tests.support.finished_runs import finished

CLIENTS = [f"c{k}" for k in range(6)]


def run(
    folder: Path, name: str, scores: np.ndarray, seed: int = 0, kind: str = "personal", **more: float
) -> FinishedRun:
    """A run in a folder, with its clients' scores; c5 is unseen."""
    made = finished(name, float(scores.mean()), seed, metric="rmse", higher=False, kind=kind, **more)
    path = folder / f"{name}-{seed}-{'-'.join(map(str, more.values()))}"
    path.mkdir(parents=True)
    lines = [f"{c},{str(c == 'c5').lower()},{value}" for c, value in zip(CLIENTS, scores, strict=True)]
    (path / "clients.csv").write_text("\n".join([f"client,unseen,{kind}_test_metric", *lines]) + "\n")
    return replace(made, path=path)


def test_differences_are_averaged_over_seeds_and_cuts_before_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys = [(seed, cut) for seed in (0, 1) for cut in (0.5, 0.7)]
    scores = {(name, *key): rng.uniform(size=6) for name in ("local", "ditto") for key in keys}
    runs = {key: run(tmp_path, key[0], value, key[1], data__cut=key[2]) for key, value in scores.items()}
    references = [each for key, each in runs.items() if key[0] == "local"]
    [found] = paired_differences(list(runs.values()), references)
    by_client = np.mean([scores["ditto", *key][:5] - scores["local", *key][:5] for key in keys], axis=0)
    assert found.difference == pytest.approx(by_client.mean())
    assert found.standard_error == pytest.approx(by_client.std(ddof=1) / np.sqrt(5))
    assert (found.clients, found.pairs, found.better) == (5, 4, int((by_client < 0).sum()))
    assert found.algorithm == "ditto"


def test_only_runs_with_the_same_seed_and_data_are_paired(tmp_path: Path) -> None:
    ones = np.ones(6)
    reference = run(tmp_path, "local", ones, seed=0, data__cut=0.5)
    near = run(tmp_path, "fedavg", ones + 1, seed=0, kind="global", data__cut=0.5)
    others = [run(tmp_path, "fedavg", ones + 9, seed=1, data__cut=0.5), run(tmp_path, "fedavg", ones, data__cut=0.9)]
    [found] = paired_differences([near, *others], [reference])
    assert (found.difference, found.standard_error, found.pairs) == (1.0, 0.0, 1)
    with pytest.raises(EquipoiseError, match="no run has the same seed and data"):
        paired_differences(others, [reference])


def test_the_reference_is_one_method(tmp_path: Path) -> None:
    runs = [run(tmp_path, name, np.ones(6)) for name in ("local", "ditto")]
    with pytest.raises(EquipoiseError, match="several methods or settings"):
        paired_differences(runs, runs)


def test_unseen_clients_are_compared_apart(tmp_path: Path) -> None:
    runs = [run(tmp_path, name, scores) for name, scores in (("local", np.ones(6)), ("ditto", np.arange(6.0)))]
    [found] = paired_differences(runs, runs[:1], UNSEEN)
    assert (found.difference, found.standard_error, found.clients, found.better) == (4.0, None, 1, 0)
    bare = [replace(each, recorded_clients={TRAINED: {"c0": 1.0}}) for each in runs]
    with pytest.raises(EquipoiseError, match="no unseen client in common"):
        paired_differences(bare, bare[:1], UNSEEN)


def test_records_are_paired_by_the_scores_of_clients_that_they_have(tmp_path: Path) -> None:
    runs = [run(tmp_path, name, scores) for name, scores in (("local", np.ones(6)), ("ditto", np.arange(6.0)))]
    records = [replace(each, recorded_clients=each.client_scores(), path=Path("r.jsonl")) for each in runs]
    assert paired_differences(records, records[:1]) == paired_differences(runs, runs[:1])
    with pytest.raises(EquipoiseError, match="no scores of single clients"):
        paired_differences([replace(each, recorded_clients={}) for each in records], records[:1])


def test_malicious_clients_and_clients_without_a_score_do_not_count(tmp_path: Path) -> None:
    lines = ["client,unseen,malicious,personal_test_metric", "a,false,true,9", "b,false,false,", "c,false,false,0.5"]
    (tmp_path / "clients.csv").write_text("\n".join(lines) + "\n")
    assert read_client_scores(tmp_path) == {TRAINED: {"c": 0.5}}
    with pytest.raises(EquipoiseError, match=r"has no clients\.csv"):
        read_client_scores(tmp_path / "none")


def test_tables_show_the_difference_with_its_error(tmp_path: Path) -> None:
    reference = run(tmp_path, "local", np.arange(6.0))
    found = paired_differences([run(tmp_path, "ditto", np.arange(6.0) * 2)], [reference])
    head, [line] = paired_cells(found)
    assert dict(zip(head, line, strict=True))["difference"] == "+2 ± 0.71"
    assert "reference: runs/local" in paired_table(found, "runs/local").note

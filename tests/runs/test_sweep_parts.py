"""A sweep in parts: together they are the sweep, and no part needs another."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError
from equipoise.runs.process_pool import execute
from equipoise.runs.sweep import Sweep, SweepRun, chains, expand_sweep
from equipoise.runs.sweep_parts import SweepPart, divide
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import group, record_tuning, tuned
from equipoise.storage.sweep_choices import SWEEP
from tests.support.commands import is_one_sentence, small

ALIKE = [{"name": "fedavg-ft"}, {"name": "knn-per"}, {"name": "ditto", "lam": [0.1, 1.0]}]
TUNED = {"tune": ["algorithm.lr"], "by": "global"}
SAME_BYTES = ("run.toml", "metrics.jsonl", "clients.csv")


@cache
def runs(seeds: int, rates: int, tune: bool) -> tuple[list[SweepRun], Sweep]:
    tables = small(
        seed=list(range(seeds)), algorithm=[{**each, "lr": [0.1 / (k + 1) for k in range(rates)]} for each in ALIKE]
    )
    return expand_sweep(tables | ({"sweep": TUNED} if tune else {}))


def key(cell: SweepRun) -> tuple[str, int]:
    return cell.identity, cell.seed


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.booleans(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_parts_are_a_partition_that_keeps_together_what_belongs_together(
    seeds: int, rates: int, tune: bool, count: int, random: Any
) -> None:
    every, sweep = runs(seeds, rates, tune)
    parts = divide(every, sweep.tune, count)
    assert len(parts) == count
    assert sorted(key(cell) for part in parts for cell in part) == sorted(map(key, every))
    where = {key(cell): number for number, part in enumerate(parts) for cell in part}
    for chain in chains(every):
        assert len({where[key(cell)] for cell in chain}) == 1
    if tune:
        choices: dict[str, set[int]] = {}
        for cell in every:
            choices.setdefault(group(cell, sweep.tune), set()).add(where[key(cell)])
        assert all(len(numbers) == 1 for numbers in choices.values())
    else:
        trainings = [len(chains(part)) for part in parts]
        assert max(trainings) - min(trainings) <= 1
    shuffled = random.sample(every, len(every))  # the order of the file does not matter
    for number, part in enumerate(parts, 1):
        assert sorted(map(key, SweepPart(number, count).select(shuffled, sweep.tune))) == sorted(map(key, part))


def test_one_part_is_the_sweep() -> None:
    every, sweep = runs(2, 2, True)
    assert SweepPart(1, 1).select(every, sweep.tune) == every


@pytest.mark.parametrize("text", ["0/8", "9/8", "x", "", "1", "1/", "/8", "-1/8", "1/0", "1.5/8", "1/8/2", "²/8"])
def test_a_part_that_does_not_exist_gets_one_sentence(text: str) -> None:
    with pytest.raises(EquipoiseError) as error:
        SweepPart.parse(text)
    is_one_sentence(error.value, "--shard", "such as 2/8")


def test_parts_are_read() -> None:
    assert SweepPart.parse("2/8") == SweepPart(2, 8)
    assert SweepPart.parse(" 8/8 ") == SweepPart(8, 8)


def run_all(every: list[SweepRun], sweep: Sweep, out: Path, first: int) -> None:
    """Do what `equipoise sweep` does with these runs."""
    execute(tuned(every, sweep, SweepResults(out), first)[0], out, None, 1, lambda cell, notes: None)
    record_tuning(every, sweep, SweepResults(out), first)
    execute(tuned(every, sweep, SweepResults(out), first)[1], out, None, 1, lambda cell, notes: None)


@pytest.mark.slow
@pytest.mark.parametrize("tune", [False, True])
def test_all_parts_together_are_the_sweep(tune: bool, tmp_path: Path) -> None:
    """The runs of seed 9 lack the first seed of the sweep, so the trials of their choice have seed 9."""
    base = small(data={"samples": 20}, **({"sweep": TUNED} if tune else {}))
    base["algorithm"] = [{"name": "fedavg-ft"}, {"name": "knn-per"}, {"name": "ditto"}]
    base["algorithm"] = [{**each, "lr": [1e-5, 0.05]} for each in base["algorithm"]]
    base["variant"] = [{"seed": [0, 1]}, {"seed": 9, "data": {"name": "linear", "clients": 4, "samples": 20}}]
    every, sweep = expand_sweep(base)
    first = every[0].seed
    run_all(every, sweep, tmp_path / "whole", first)
    for number in (3, 1, 4, 2):
        run_all(SweepPart(number, 4).select(every, sweep.tune), sweep, tmp_path / "parts", first)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert any("seed1" in name for name in names)
    assert any("seed9" in name for name in names)
    assert (SWEEP in names) == tune
    for name in names:
        one, other = tmp_path / "whole" / name, tmp_path / "parts" / name
        if one.is_dir():
            for file in SAME_BYTES:
                assert (one / file).read_bytes() == (other / file).read_bytes(), (name, file)
        elif name == SWEEP:
            assert json.loads(one.read_text()) == json.loads(other.read_text())


def test_an_empty_part_writes_nothing(tmp_path: Path) -> None:
    every, sweep = expand_sweep(small(algorithm={"lr": [0.1, 0.2]}, sweep=TUNED))
    both, empty = divide(every, sweep.tune, 2)
    assert both == every  # all candidates of the one choice
    run_all(empty, sweep, tmp_path, every[0].seed)
    assert list(tmp_path.iterdir()) == []

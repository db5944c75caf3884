"""Rolling origins (data.cut) and newcomers with a short history (data.unseen_history)."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.config.experiment import Experiment
from equipoise.data.config import DataSection, load_data
from equipoise.data.federation import Federation
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from equipoise.runs.sweep import expand_sweep
from tests.support.datafiles import load

HOURS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("loads")
    rng = np.random.default_rng(0)
    rows = [f"2016-{7 + h // 720:02d}-{1 + h // 24 % 30:02d} {h % 24:02d}:00," for h in range(HOURS)]
    loads = np.cumsum(rng.normal(size=(HOURS, 6)), axis=0)
    lines = [row + ",".join(f"{v:.4f}" for v in values) for row, values in zip(rows, loads, strict=True)]
    (found / "table.csv").write_text("\n".join(["time,a,b,c,d,e,f", *lines]))
    return found


def targets(pool: Pool, part: int, horizon: int) -> set[int]:
    """The places of the first client's values that the samples of a part forecast."""
    assert pool.series is not None
    first = pool.series.target[(pool.owner == 0) & (pool.part == part)]
    return set((first[:, None] + np.arange(horizon)).ravel().tolist())


@pytest.mark.parametrize("horizon", [1, 6])
@pytest.mark.parametrize("settings", [{}, {"lags": [48]}, {"layout": "sequence", "stride": 2}])
def test_a_later_cut_trains_on_more_and_tests_on_other_values(
    horizon: int, settings: dict[str, Any], folder: Path
) -> None:
    options = {"path": str(folder / "table.csv"), "horizon": horizon, "test_span": 40, **settings}
    pools = [load("loads", folder, cut=cut, **options) for cut in (0.6, 0.7, 0.8, 0.9)]
    for pool, cut in zip(pools, (240, 280, 320, 360), strict=True):
        assert pool.series is not None
        tested = targets(pool, 2, horizon)
        assert (min(tested), max(tested)) >= (cut, cut + 40 - 2)
        assert max(tested) < cut + 40
        assert max(targets(pool, 0, horizon)) < min(targets(pool, 1, horizon)) <= max(targets(pool, 1, horizon)) < cut
        assert pool.series.begins[1] == cut + 40  # what follows the test part is not there
    for one, two in pairwise(pools):
        assert not targets(one, 2, horizon) & targets(two, 2, horizon)
        assert targets(one, 0, horizon) < targets(two, 0, horizon)


def test_the_test_part_is_the_same_with_other_inputs(folder: Path) -> None:
    options = {"path": str(folder / "table.csv"), "cut": 0.75, "test_span": 50}
    one = load("loads", folder, **options)
    for settings in ({"lags": [120]}, {"window": 60}, {"calendar": ["hour"], "layout": "sequence"}):
        other = load("loads", folder, **options, **settings)
        assert np.array_equal(one.series.target[one.part == 2], other.series.target[other.part == 2])  # type: ignore


def test_a_cut_is_at_the_same_time_for_all_clients_of_a_table(tmp_path: Path) -> None:
    """A client whose loads begin later has the same test part."""
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00,{0 if h < 50 else h % 7 + 1},{h % 5 + 1}" for h in range(200)]
    (tmp_path / "electricity.csv").write_text("\n".join(["date,late,OT", *rows]))
    pool = load("electricity", tmp_path, cut=0.5, test_span=24, window=4)
    facts = pool.series
    assert facts is not None
    tested = [facts.target[(pool.owner == k) & (pool.part == 2)] for k in range(2)]
    times = [[facts.time(k, place) for place in tested[k]] for k in range(2)]
    assert times[0] == times[1]


def test_a_test_part_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"data.cut = 0.9 leaves 40 values of 'a' .* not data.test_span = 41"):
        load("loads", folder, path=str(folder / "table.csv"), cut=0.9, test_span=41)


def test_origins_are_a_sweep(folder: Path) -> None:
    tables = {
        "data": {"name": "loads", "path": "table.csv", "cut": [0.6, 0.8], "test_span": 40, "lags": [48]},
        "model": {"name": "linear"},
        "algorithm": {"name": "fedavg"},
        "seed": [0, 1],
    }
    runs, _ = expand_sweep(tables, folders=[folder])
    found = [(run.seed, run.experiment.data.source.cut) for run in runs]  # type: ignore[union-attr]
    assert sorted(found) == [(0, 0.6), (0, 0.8), (1, 0.6), (1, 0.8)]
    assert isinstance(runs[0].experiment, Experiment)


def newcomers(folder: Path, history: int | None, **settings: Any) -> Federation:
    given = {"unseen_history": history} if history else {}
    options = {"window": 12, "lags": [24], **settings, **given}
    return load_data("loads", path=str(folder / "table.csv"), data=folder, unseen=0.4, **options)


@pytest.mark.parametrize("settings", [{}, {"horizon": 3}, {"cut": 0.8, "test_span": 60}, {"layout": "sequence"}])
def test_newcomers_learn_from_their_last_values_only(settings: dict[str, Any], folder: Path) -> None:
    whole, horizon = newcomers(folder, None, **settings), settings.get("horizon", 1)
    reach = 12 - 1 + 24 if "layout" in settings else 24
    raw = np.loadtxt(folder / "table.csv", delimiter=",", skiprows=1, usecols=range(1, 7))
    for history in (60, 120):
        short = newcomers(folder, history, **settings)
        assert short.unseen == whole.unseen
        assert short.names == whole.names
        one, two = whole.series, short.series
        assert one is not None
        assert two is not None
        for i, name in enumerate(short.names):
            places = [two.target[part[i]] - two.begins[i] for part in (short.train, short.validation, short.test)]
            before = [one.target[part[i]] - one.begins[i] for part in (whole.train, whole.validation, whole.test)]
            assert np.array_equal(places[2], before[2])
            if name not in short.unseen:
                assert all(map(np.array_equal, places, before))
                assert np.array_equal(short.x[short.train[i]], whole.x[whole.train[i]])
                continue
            since = places[2].min() - history
            learned = np.concatenate(places[:2])
            assert learned.min() == since + reach
            assert learned.max() + horizon <= places[2].min()
            assert len(places[0])
            assert len(places[1])
            past = raw[since : two.trained_until[i], i]
            np.testing.assert_allclose([two.shift[i], two.size[i]], [past.min(), np.ptp(past)])
            assert two.trained_until[i] == places[0].max() + horizon
            truth = raw[places[2][:, None] + np.arange(horizon), i]
            np.testing.assert_allclose(two.unscaled(short.y[short.test[i]].numpy(), i), truth, atol=1e-4)


def test_a_history_with_everything_changes_nothing_for_those_who_train(folder: Path) -> None:
    whole, short = newcomers(folder, None), newcomers(folder, HOURS)
    for i, name in enumerate(whole.names):
        assert np.array_equal(whole.x[whole.test[i]], short.x[short.test[i]]) or name in whole.unseen


def test_histories_that_are_not_possible(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"data.unseen_history = 24 is too short: .* must be at least 25"):
        newcomers(folder, 24)
    for section, message in (
        ({"name": "loads"}, "data.unseen_history needs data.unseen"),
        ({"name": "mnist", "unseen": 0.5}, "for time series; mnist has none, unlike electricity, loads"),
        ({"name": "loads", "unseen": 0.5, "partition": {"kind": "iid"}}, "kind = 'iid' mixes them"),
    ):
        with pytest.raises(EquipoiseError, match=message):
            DataSection.parse({**section, "unseen_history": 9})
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00," + f"{h % 7 if h < 100 else 5}," * 3 + "1" for h in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["time,a,b,c,d", *rows]))
    with pytest.raises(EquipoiseError, match="leaves no unseen client a sample to train on"):
        load_data("loads", path=str(tmp_path / "t.csv"), window=2, unseen=0.4, unseen_history=9)


def test_newcomers_of_whom_nothing_can_be_learned_are_left_out(tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00,{h % 7},{h % 5},{h % 7 if h < 50 else 5}" for h in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["time,a,b,c", *rows]))
    for seed in range(20):
        options = {"path": str(tmp_path / "t.csv"), "window": 2, "unseen": 0.6, "seed": seed}
        if load_data("loads", **options).unseen == {"a", "c"}:
            short = load_data("loads", **options, unseen_history=9)
            assert (short.names, short.unseen) == (("a", "b"), {"a"})
            assert short.notes == ("1 unseen clients are left out: nothing can be learned from their last 9 values",)
            return
    pytest.fail("no seed draws a and c")

"""Runs under attack beside their controls, as a table, a heat map and curves."""

import json
from pathlib import Path

import pytest

from equipoise.reporting import plots
from equipoise.reporting.attack_table import attack_cells, attack_rows, telling
from equipoise.reporting.comparison import compare
from equipoise.reporting.comparison_table import cells
from equipoise.reporting.html.attack_maps import grids, successes
from equipoise.storage.run_index import FinishedRun
from tests.support.finished_runs import finished

MEASURE = {"target": 2, "source": None, "samples": "1 in (0, 0)"}


def attacked(
    score: float, attack: str, seed: int = 0, success: float | None = None, reducer: str = "weighted-mean", **more
) -> FinishedRun:
    names = {"attack__name": attack, "attack__fraction": 0.2, "reducer__name": reducer}
    run = finished("fedavg", score, seed, kind="global", **names, **more)
    run.summary["malicious"] = [f"client-{seed}"]
    run.summary["global"]["accuracy_pooled"] = score - 0.01
    if success is not None:
        run.summary["global"]["attack_success"] = success
        run.summary["attack_measure"] = MEASURE
    return run


RUNS = [
    attacked(0.9, "none", success=0.02),
    attacked(0.8, "backdoor", success=0.7),
    attacked(0.5, "ipm", attack__epsilon=4.0),
    attacked(0.85, "none", reducer="median"),
    attacked(0.84, "ipm", reducer="median", attack__epsilon=4.0),
]


def rows_by(runs: list[FinishedRun]) -> dict[tuple[str, str], dict]:
    return {(row["attack"], row["defence"]): row for row in attack_rows(runs)}


def test_damage_price_success_and_floor() -> None:
    rows = rows_by(RUNS)
    assert rows["backdoor", "weighted-mean"]["damage"] == pytest.approx(0.1)
    assert (rows["backdoor", "weighted-mean"]["success"], rows["backdoor", "weighted-mean"]["floor"]) == (0.7, 0.02)
    assert rows["ipm", "median"]["control"] == 0.85
    assert rows["ipm", "median"]["price"] == pytest.approx(0.05)
    assert rows["ipm", "weighted-mean"]["floor"] is None  # it has no target
    assert rows["none", "median"]["damage"] is None
    assert telling(list(rows.values()))


def test_a_control_has_the_same_malicious_clients() -> None:
    other = attacked(0.9, "none")
    other.summary["malicious"] = ["client-3"]
    assert rows_by([other, RUNS[2]])["ipm", "weighted-mean"]["damage"] is None
    assert attack_rows([finished("fedavg", 0.9)]) == []


def test_seeds_are_averaged_and_attacks_told_apart_by_their_settings() -> None:
    runs = [attacked(score, "ipm", seed, attack__epsilon=4.0) for seed, score in enumerate((0.5, 0.7))]
    runs += [attacked(0.9, "none", seed) for seed in (0, 1)]
    runs += [attacked(0.8, "ipm", attack__epsilon=0.5)]
    rows = rows_by(runs)
    assert {attack for attack, _ in rows} == {"none", "ipm epsilon=4.0", "ipm epsilon=0.5"}
    row = rows["ipm epsilon=4.0", "weighted-mean"]
    assert (row["damage"], row["damage_std"]) == (pytest.approx(0.3), pytest.approx(0.2 / 2**0.5))
    head, body = attack_cells([row])
    assert dict(zip(head, body[0], strict=True))["damage"] == "30.00 ± 14.14"


def test_attacks_against_defences_are_a_map() -> None:
    [grid] = grids(RUNS)
    trace = grid["data"][0]
    assert (trace["y"], trace["x"]) == (["none", "backdoor", "ipm"], ["weighted-mean", "median"])
    assert trace["z"] == [[90.0, 85.0], [80.0, None], [50.0, 84.0]]
    assert trace["text"][1][0] == "80.0 → 70%"
    assert "damage 10.0, floor 2%" in trace["customdata"][1][0]
    assert grids(RUNS[:3]) == grids(RUNS[3:4]) == []
    json.dumps(grid)


def test_success_is_beside_its_floor() -> None:
    [chart] = successes(RUNS)
    bars, floors = chart["data"]
    assert (bars["x"], floors["x"]) == ([2.0, 70.0], [2.0])
    assert floors["y"] == [bars["y"][1]]
    assert successes(RUNS[2:]) == []


def test_controls_are_faint_lines_of_every_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[str, float | None]] = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: drawn.append((k["label"], k.get("alpha"))) or plot(self, *a, **k)
    )
    plots.draw("attacks", [*RUNS[:3], finished("fedavg", 0.95, kind="global")], tmp_path / "a.svg")
    assert drawn == [("fedavg (global), no attack", 0.4), ("fedavg (global)", None)] * 2  # backdoor and ipm


def test_fairness_has_deviations_over_seeds_and_the_pooled_score() -> None:
    runs = [attacked(0.5, "ipm", 0), attacked(0.7, "ipm", 1)]
    head, body = cells(compare(runs), fairness=True)
    found = dict(zip(head, body[0], strict=True))
    assert found["pooled"] == "59.00 ± 14.14"
    assert found["worst"] == "30.00 ± 7.07"
    assert found["Gini"] == "0.1000 ± 0.0000"

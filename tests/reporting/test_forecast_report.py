"""Forecasts in tables and in the report, from summaries alone."""

from dataclasses import replace
from typing import Any

from equipoise.reporting.comparison import compare
from equipoise.reporting.forecast_table import forecast_cells, forecast_note, has_forecasts
from equipoise.reporting.html.chart import Method
from equipoise.reporting.html.forecasts import by_step
from equipoise.storage.run_index import FinishedRun
from tests.support.finished_runs import finished

FIGURES = {"mae": 2.0, "rmse": 3.0, "wape": 0.25, "mase": 0.5, "skill": 0.1, "mae_pooled": 2.5, "steps": [1.0, 3.0]}


def forecasts(algorithm: str, seed: int = 0, mae: float = 2.0, **more: Any) -> FinishedRun:
    """A run with forecasts."""
    run = finished(algorithm, 0.5, seed, metric="rmse", higher=False)
    naive = {name: {**FIGURES, "mae": 4.0, "steps": [4.0, 4.0]} for name in ("last", "daily", "weekly")}
    own = {**FIGURES, "mae": mae, "steps": [mae - 1, mae + 1]}
    return replace(run, summary={**run.summary, "forecast": {"unit": "kW", "personal": own, **naive, **more}})


def test_naive_forecasts_come_once_for_all_methods() -> None:
    runs = [forecasts("ditto"), forecasts("ditto", seed=1, mae=4.0), forecasts("local", unseen={"personal": FIGURES})]
    rows = compare(runs)
    head, body = forecast_cells(rows)
    assert [line[:2] for line in body] == [
        *(["naive", kind] for kind in ("last", "daily", "weekly")),
        ["ditto", "personal"],
        ["local", "personal"],
        ["local", "unseen personal"],
    ]
    assert dict(zip(head, body[3], strict=True))["MAE"] == "3 ± 1.4"
    assert dict(zip(head, body[4], strict=True))["WAPE %"] == "25.0"
    assert "coverage %" not in head
    assert "Unit: kW" in forecast_note(rows)


def test_rows_have_the_same_columns_where_some_runs_have_no_forecasts() -> None:
    rows = compare([forecasts("ditto"), finished("digits", 0.9)])
    assert rows[0].keys() == rows[1].keys()
    assert rows[1]["forecast_personal_mae"] is None
    assert [line[0] for line in forecast_cells(rows)[1]] == ["naive"] * 3 + ["ditto"]
    assert not has_forecasts(compare([finished("digits", 0.9)]))


def test_the_report_draws_errors_by_step() -> None:
    chart = by_step([Method(0, "ditto", [forecasts("ditto"), forecasts("ditto", seed=1, mae=4.0)])])
    assert chart is not None
    assert [trace["name"] for trace in chart["data"]] == [
        "ditto (personal)", "naive: last", "naive: daily", "naive: weekly",
    ]  # fmt: skip
    assert (chart["data"][0]["x"], chart["data"][0]["y"]) == ([1, 2], [2.0, 4.0])
    assert chart["layout"]["yaxis"]["title"]["text"] == "mean absolute error (kW)"
    assert by_step([Method(0, "digits", [finished("digits", 0.9)])]) is None

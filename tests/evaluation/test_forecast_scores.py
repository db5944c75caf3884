"""Scores of forecasts, against numpy by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.evaluation.forecast_errors import ForecastErrors
from equipoise.evaluation.forecast_scores import ClientForecastScores
from equipoise.evaluation.forecaster import Forecaster
from tests.support import series


def by_hand(forecast: np.ndarray, actual: np.ndarray, weekly: np.ndarray, scale: float) -> dict[str, float]:
    """The figures of forecasts of all values, by their definitions."""
    error, there = np.abs(forecast - actual), np.isfinite(weekly)
    return {
        "mae": error.mean(),
        "rmse": np.sqrt((error**2).mean()),
        "wape": error.sum() / np.abs(actual).sum(),
        "mase": error.mean() / scale,
        "skill": 1 - error[there].mean() / np.abs(weekly - actual)[there].mean(),
    }


def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of forecast.csv by client and model."""
    with (folder / "forecast.csv").open(newline="") as file:
        return {(row["client"], row["model"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[eq.Result, Path]:
    """A run of Ditto with an unseen client."""
    folder = tmp_path_factory.mktemp("run") / "ditto"
    data = series.federation(clients=4, unseen=("c3",))
    algorithm = eq.Ditto(lr=0.2, batch=20)
    torch.manual_seed(0)
    return eq.train(nn.Linear(24, 2), data, algorithm, loss="squared", rounds=3, out=folder), folder


def test_scores_are_those_of_numpy(run: tuple[eq.Result, Path]) -> None:
    result, folder = run
    facts, data = result.federation.series, result.federation
    assert facts is not None
    found, expected = rows(folder), {}
    for who, name in enumerate(data.names):
        own = data.test[who]
        actual = data.y[own].numpy().astype(np.float64) * facts.size[who] + facts.shift[who]
        weekly = facts.naive("weekly", own) * facts.size[who] + facts.shift[who]
        x = data.x[torch.from_numpy(own)].numpy()
        forecast = result.predict(name, x).astype(np.float64) * facts.size[who] + facts.shift[who]
        expected[name] = by_hand(forecast, actual, weekly, facts.naive_error(who))
        for figure, value in expected[name].items():
            assert float(found[name, "personal"][figure]) == pytest.approx(value, rel=1e-5), figure
        naive = by_hand(weekly, actual, weekly, facts.naive_error(who))
        assert float(found[name, "weekly"]["mae"]) == pytest.approx(naive["mae"], rel=1e-6)
        assert float(found[name, "weekly"]["skill"]) == 0
        for step in range(2):
            by_step = np.abs(forecast - actual)[:, step].mean()
            assert float(found[name, "personal"][f"mae_{step + 1}"]) == pytest.approx(by_step, rel=1e-5)
    summary = result.summary["forecast"]
    trained = [expected[name] for name in ("c0", "c1", "c2")]
    for figure in ("mae", "rmse", "wape", "mase", "skill"):
        assert summary["personal"][figure] == pytest.approx(np.mean([e[figure] for e in trained]), rel=1e-5)
        assert summary["unseen"]["personal"][figure] == pytest.approx(expected["c3"][figure], rel=1e-5)
    assert summary["unit"] == "kW"
    assert {"personal", "global", "last", "daily", "weekly"} <= summary.keys()
    assert summary == json.loads((folder / "summary.json").read_text())["forecast"]


def test_pooled_figures_are_those_of_all_values_together(run: tuple[eq.Result, Path]) -> None:
    result, _ = run
    data, facts = result.federation, result.federation.series
    assert facts is not None
    errors, values = [], []
    for who in range(3):
        own = data.test[who]
        actual = data.y[own].numpy() * facts.size[who] + facts.shift[who]
        x = data.x[torch.from_numpy(own)].numpy()
        errors.append(result.predict(who, x) * facts.size[who] + facts.shift[who] - actual)
        values.append(actual)
    error, value, figures = np.concatenate(errors), np.concatenate(values), result.summary["forecast"]["personal"]
    assert figures["mae_pooled"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert figures["rmse_pooled"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert figures["wape_pooled"] == pytest.approx(np.abs(error).sum() / np.abs(value).sum(), rel=1e-5)


def test_intervals_of_test_samples_are_scored(run: tuple[eq.Result, Path]) -> None:
    result, folder = run
    coverage = [float(rows(folder)[name, "personal"]["coverage"]) for name in ("c0", "c1", "c2")]
    assert result.summary["forecast"]["personal"]["coverage"] == pytest.approx(np.mean(coverage))
    assert np.mean(coverage) > 0.7  # validation samples come before test samples, so they are not exchangeable
    assert "coverage" not in result.summary["forecast"]["weekly"]


def test_figures_that_the_samples_do_not_define_are_left_out() -> None:
    actual, nothing = np.ones((3, 2)), np.full((3, 2), np.nan)
    errors = ForecastErrors.of(actual + 1, actual, nothing, np.full(3, np.nan))
    figures = errors.figures()
    assert figures == {"mae": 1.0, "rmse": 1.0, "wape": 1.0, "mase": None, "skill": None}
    assert ForecastErrors.of(nothing, actual, nothing, np.ones(3)).figures()["mae"] is None
    short = series.federation(hours=150)
    result = eq.train(nn.Linear(24, 2), short, "local", loss="squared", rounds=1)
    summary = result.summary["forecast"]
    assert (summary["personal"]["skill"], summary["personal"]["skill_clients"]) == (None, 0)
    assert summary["weekly"]["mae_clients"] == 0


class Diverged(nn.Module):
    """A model whose outputs are no numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x), 2), torch.nan)


def test_a_model_that_diverged_is_not_taken_for_one_without_forecasts(run: tuple[eq.Result, Path]) -> None:
    simulation = run[0].simulation
    forecaster = Forecaster(simulation.task, Diverged(), simulation.federation, 0)
    errors, intervals = ClientForecastScores(simulation.federation, 0).of_model(forecaster)
    assert errors.figures()["mae"] == np.inf
    assert errors.values.tolist() == [len(simulation.federation.test[0])] * 2
    assert intervals["coverage"] == 0


def test_data_without_series_have_no_forecasts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = {name: (rng.normal(size=(30, 3)), rng.normal(size=(30, 1))) for name in "ab"}
    result = eq.train(nn.Linear(3, 1), clients, "local", loss="squared", rounds=1, out=tmp_path / "run")
    assert "forecast" not in result.summary
    assert not (tmp_path / "run" / "forecast.csv").exists()


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_scores_are_the_same_bytes_with_any_number_of_threads_and_when_resumed(mode: str, tmp_path: Path) -> None:
    data = series.federation(clients=4, unseen=("c3",))

    def train(folder: str, rounds: int = 2, workers: int = 1, resume: bool = False) -> bytes:
        torch.manual_seed(0)
        eq.train(
            nn.Linear(24, 6),
            data,
            eq.FedAvgFT(lr=0.1, batch=20),
            loss="pinball",
            rounds=rounds,
            mode=mode,
            workers=workers,
            out=tmp_path / folder,
            resume=resume,
        )
        found = (tmp_path / folder / "summary.json").read_text()
        return (tmp_path / folder / "forecast.csv").read_bytes() + json.dumps(json.loads(found)["forecast"]).encode()

    whole = train("whole")
    assert train("threads", workers=3) == whole
    train("resumed", rounds=1)
    assert train("resumed", workers=2, resume=True) == whole

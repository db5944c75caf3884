"""The commands that show forecasts: predict, plot --kind forecast, compare with its table of forecasts."""

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.runs.launch import reopen
from tests.support.commands import equipoise_command
from tests.support.datafiles import electricity

HORIZON = 3
TABLES = f"""
rounds = 1
[data]
name = "electricity"
horizon = {HORIZON}
split = [0.5, 0.3, 0.2]
[model]
name = "mlp"
hidden = [8]
[algorithm]
name = "ditto"
lr = 0.1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with loads, a run on them, and a run on digits."""
    folder = tmp_path_factory.mktemp("forecasts")
    (folder / "data").mkdir()
    electricity(folder / "data" / "electricity.csv.gz", clients=2, hours=300)
    (folder / "loads.toml").write_text(TABLES)
    done = equipoise_command("run", "loads.toml", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predict_writes_the_forecasts_of_test_windows(place: Path) -> None:
    done = equipoise_command("predict", "run", "--client", "OT", "--out", "f.csv", "--level", "0.8", cwd=place)
    assert done.returncode == 0, done.stderr
    found, result = lines(place / "f.csv"), reopen(place / "run")[0]
    data, facts = result.federation, result.federation.series
    assert facts is not None
    own = data.test[1]
    assert len(found) == len(own) * HORIZON
    expected = result.predict("OT", data.x[torch.from_numpy(own)].numpy()) * facts.size[1] + facts.shift[1]
    table = {name: np.array([float(line[name]) for line in found]) for name in ("forecast", "lower", "upper", "actual")}
    assert np.allclose(table["forecast"], expected.ravel(), rtol=1e-5)
    assert (table["lower"] <= table["forecast"]).all()
    assert (table["forecast"] <= table["upper"]).all()
    series = facts.values[facts.begins[1] :].astype(float) * facts.size[1] + facts.shift[1]
    for line in found[:7]:
        at = int((datetime.fromisoformat(line["time"]) - facts.time(1, int(facts.begins[1]))).total_seconds() // 3600)
        assert datetime.fromisoformat(line["time"]) - datetime.fromisoformat(line["issued"]) == timedelta(
            hours=int(line["step"])
        )
        assert float(line["actual"]) == pytest.approx(series[at], rel=1e-5)
        assert float(line["naive_weekly"]) == pytest.approx(series[at - 168], rel=1e-5)


def test_predict_next_forecasts_what_follows_the_data(place: Path) -> None:
    done = equipoise_command("predict", "run", "--next", "--global", cwd=place)
    assert done.returncode == 0, done.stderr
    found, result = list(csv.DictReader(done.stdout.splitlines())), reopen(place / "run")[0]
    facts = result.federation.series
    assert facts is not None
    assert [line["client"] for line in found] == ["0"] * HORIZON + ["OT"] * HORIZON
    end = facts.begins[1]
    x = facts.values[end - 24 : end][None]
    expected = result.predict(None, x)[0] * facts.size[0] + facts.shift[0]
    assert np.allclose([float(line["forecast"]) for line in found[:HORIZON]], expected, rtol=1e-5)
    assert {line["actual"] for line in found} == {""}
    assert datetime.fromisoformat(found[0]["issued"]) == facts.time(0, int(end) - 1)


def test_intervals_that_are_infinite_are_explained(place: Path) -> None:
    done = equipoise_command("predict", "run", "--client", "0", "--level", "0.999", "--out", "f.csv", cwd=place)
    assert "the intervals of 0 are infinite: it has" in done.stderr
    assert {line["upper"] for line in lines(place / "f.csv")} == {"inf"}


def test_plot_draws_forecasts(place: Path) -> None:
    for words in (("--client", "OT", "--days", "2"), ()):
        done = equipoise_command("plot", "run", "--kind", "forecast", *words, "--out", "f.svg", cwd=place)
        assert done.returncode == 0, done.stderr
        text = (place / "f.svg").read_text()
        assert all(word in text for word in ("actual", "weekly naive", "90% interval", "kW", "OT"))


def test_compare_has_a_table_of_forecasts(place: Path) -> None:
    done = equipoise_command("compare", "run", cwd=place)
    forecasts = json.loads((place / "run" / "summary.json").read_text())["forecast"]
    assert "Forecasts" in done.stdout
    assert f"{forecasts['weekly']['mae']:.4g}" in done.stdout
    text = equipoise_command("compare", "run", "--format", "md", cwd=place).stdout
    assert f"| naive | weekly | {forecasts['weekly']['mae']:.4g} |" in text
    [row] = json.loads(equipoise_command("compare", "run", "--format", "json", cwd=place).stdout)
    assert row["forecast_personal_mae"] == forecasts["personal"]["mae"]
    assert row["forecast_unit"] == "kW"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("predict run --client nobody", "there is no client 'nobody'"),
        ("predict run --level 1", "level = 1.0 is not allowed"),
        ("plot run run --kind forecast --out f.png", "name one run folder"),
        ("plot run --client OT --out f.png", "--client is for --kind forecast"),
        ("compare run --paired run", "another method or settings"),
    ],
)
def test_mistakes_get_one_sentence(words: str, sentence: str, place: Path) -> None:
    done = equipoise_command(*words.split(), cwd=place)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_of_other_data_have_no_forecasts(place: Path) -> None:
    text = TABLES.replace('name = "electricity"', 'name = "linear"\nclients = 3').replace(f"horizon = {HORIZON}", "")
    (place / "linear.toml").write_text(text.replace("split = [0.5, 0.3, 0.2]", ""))
    assert equipoise_command("run", "linear.toml", "--out", "linear", cwd=place).returncode == 0
    done = equipoise_command("predict", "linear", cwd=place)
    assert done.returncode == 2
    assert "the run does not forecast time series" in done.stderr

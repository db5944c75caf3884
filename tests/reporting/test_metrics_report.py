"""Several metrics in comparisons and reports, with means over clients beside pooled figures."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

import equipoise as eq
from equipoise.reporting import comparison, comparison_table
from equipoise.reporting import html as pages
from equipoise.reporting.html import per_class
from equipoise.reporting.html.clients import Clients
from equipoise.storage.run_index import FinishedRun, find_runs
from tests.reporting.test_html_report import own_clients
from tests.support.browser import open_page
from tests.support.commands import equipoise_command
from tests.support.problems import small_mlp

METRICS = ["accuracy", "macro-f1", "per-class-recall", "confusion-matrix"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One method with two seeds and several metrics, and one with the usual metric."""
    folder = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {"rounds": 2, "participation": 1.0}
    for seed in (0, 1):
        algorithm = eq.Ditto(lr=0.1, batch=5)
        out = folder / f"ditto{seed}"
        eq.train(small_mlp(), own_clients(), algorithm, seed=seed, metric=METRICS, out=out, **settings)
    eq.train(small_mlp(), own_clients(), eq.FedAvg(lr=0.1, batch=5), out=folder / "fedavg", **settings)
    return folder


@pytest.fixture
def runs(folder: Path) -> list[FinishedRun]:
    return find_runs([folder])


def test_rows_have_means_and_pooled_figures_of_every_metric(runs: list[FinishedRun]) -> None:
    ditto, fedavg = comparison.compare(runs)
    seeds = [run.summary["personal"] for run in runs[:2]]
    assert comparison.other_metrics(runs) == ["macro-f1"]
    assert ditto["personal_pooled"] == pytest.approx(np.mean([s["accuracy_pooled"] for s in seeds]))
    assert ditto["personal_macro-f1"] == pytest.approx(np.mean([s["macro-f1"] for s in seeds]))
    assert ditto["personal_macro-f1_pooled"] == pytest.approx(np.mean([s["macro-f1_pooled"] for s in seeds]))
    assert ditto["personal_macro-f1_std"] == pytest.approx(np.std([s["macro-f1"] for s in seeds], ddof=1))
    assert fedavg["global_macro-f1"] is None
    assert fedavg["global_pooled"] is not None


def test_every_format_of_a_comparison_has_every_metric(folder: Path, tmp_path: Path) -> None:
    table = equipoise_command("compare", folder, cwd=tmp_path).stdout
    assert "pooled" in table
    assert "macro-f1" in table
    markdown = equipoise_command("compare", folder, "--format", "md", cwd=tmp_path).stdout
    lines = [line for line in markdown.splitlines() if "| macro-f1 |" in line]
    assert len(lines) == 3  # personal, global, hybrid of one method
    rows = list(
        csv.DictReader(io.StringIO(equipoise_command("compare", folder, "--format", "csv", cwd=tmp_path).stdout))
    )
    found = json.loads(equipoise_command("compare", folder, "--format", "json", cwd=tmp_path).stdout)
    assert float(rows[0]["personal_macro-f1_pooled"]) == found[0]["personal_macro-f1_pooled"]
    assert rows[1]["global_macro-f1"] == ""


def test_runs_of_older_versions_have_no_pooled_column(runs: list[FinishedRun]) -> None:
    old = runs[2]
    old.summary["global"] = {k: v for k, v in old.summary["global"].items() if not k.endswith("_pooled")}
    old.summary.pop("metrics")
    text = comparison_table.as_text(comparison.compare([old]), "md")
    assert "pooled" not in text


def test_the_page_shows_pooled_scores_and_further_metrics(runs: list[FinishedRun]) -> None:
    (problem,) = pages.scenes(runs)
    charts = {chart["id"]: chart for chart in pages.drawn(problem, Clients())}
    assert {"scores", "pooled", "metric-macro-f1", "recalls"} <= charts.keys()
    traces = [t for t in charts["pooled"]["data"] if t.get("hoverinfo") != "skip" and t["meta"]["kind"] == "personal"]
    last = np.mean([run.metrics[-1]["personal"]["accuracy_pooled"] for run in runs[:2]])
    assert traces[0]["y"][-1] == pytest.approx(100 * last)
    names, rows = pages.table([problem])
    assert {"personal", "personal pooled", "personal macro-f1", "personal macro-f1 pooled"} <= set(names)
    f1 = rows[0]["cells"]["personal macro-f1"]
    assert rows[0]["shown"]["personal macro-f1"].startswith(f"{f1:.4f} ± ")
    assert rows[0]["shown"]["personal pooled"].startswith(f"{100 * rows[0]['cells']['personal pooled']:.2f} ± ")
    assert rows[1]["shown"]["global macro-f1"] == "–"


def test_a_confusion_matrix_is_a_map_with_counts_of_all_clients_and_seeds(runs: list[FinishedRun]) -> None:
    (problem,) = pages.scenes(runs)
    charts = per_class.confusion(problem.methods)
    assert [chart["data"][0]["meta"]["kind"] for chart in charts] == ["personal", "global", "hybrid"]
    (cells,) = charts[0]["data"]
    counts = np.sum([run.summary["personal"]["confusion-matrix_pooled"] for run in runs[:2]], axis=0)
    assert cells["text"] == [[str(n) for n in row] for row in counts]
    np.testing.assert_allclose(cells["z"], counts / counts.sum(1, keepdims=True))
    assert counts.sum() == 2 * sum(len(part["test"][1]) for part in own_clients())
    recalls = per_class.recalls(problem.methods)
    assert recalls is not None
    pooled = [run.summary["personal"]["per-class-recall_pooled"] for run in runs[:2]]
    assert recalls["data"][0]["y"] == pytest.approx(np.mean(pooled, axis=0))


def test_a_browser_draws_the_confusion_matrix(chromium: Browser, runs: list[FinishedRun], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    pages.write(runs, out, "Runs")
    opened = open_page(chromium, out)
    opened.page.wait_for_selector("[data-chart=confusion-0-personal] svg.main-svg", state="attached")
    figure = opened.page.locator("figure", has=opened.page.locator("[data-chart=confusion-0-personal]"))
    figure.locator("summary").click()
    figure.locator("details table").wait_for()  # it is made when the details open
    assert figure.locator("tbody tr").count() == 9
    assert opened.errors == []
    opened.page.context.close()

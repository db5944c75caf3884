"""Metrics by name, as functions and of one's own code; errors for what does not fit."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.metrics import METRICS, Metric, SetMetric, find_metrics, fitting_metrics, lookup

LABELS = torch.zeros(2, dtype=torch.int64)
OUTPUT, TARGET = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]]), torch.tensor([1, 2])


def top_two(output: Tensor, target: Tensor) -> Tensor:
    return (output.topk(2, 1).indices == target[:, None]).any(1).double()


def share_of_class_one(output: Tensor, target: Tensor) -> float:
    return float(np.mean(output.argmax(1).numpy() == 1))


def my_error(output: Tensor, target: Tensor) -> float:
    return 0.0


def fitted(given: Any, output: Tensor = OUTPUT, target: Tensor = TARGET) -> tuple[Any, ...]:
    return fitting_metrics(given, "own", output, target).metrics


def test_a_function_is_a_mean_over_samples_or_of_the_whole_set_by_what_it_returns() -> None:
    mean, whole = fitted([top_two, share_of_class_one])
    assert (type(mean), type(whole)) == (Metric, SetMetric)
    assert [mean.name, whole.name] == ["top_two", "share_of_class_one"]
    assert mean.score(OUTPUT, TARGET) == 0.5
    assert whole.score(OUTPUT, TARGET) == 0.5


def test_a_function_that_is_undefined_on_two_samples_is_of_the_whole_set() -> None:
    def picky(output: Tensor, target: Tensor) -> float:
        if len(target) < 3:
            raise ValueError("only one class present")
        return 0.25

    (metric,) = fitted(picky)
    assert metric.score(OUTPUT[[0, 1, 1]], TARGET[[0, 1, 1]]) == 0.25
    with pytest.raises(eq.EquipoiseError, match=r"'picky' fails on outputs .*only one class present.*return NaN"):
        metric.score(OUTPUT, TARGET)


def test_by_default_the_metric_belongs_to_the_targets() -> None:
    assert fitted(None) == (METRICS["accuracy"],)
    assert fitted(()) == (METRICS["accuracy"],)
    assert fitted(None, torch.zeros(2, 1), torch.zeros(2)) == (METRICS["rmse"],)


def test_own_code_by_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import equipoise as eq\n"
        "def agreement(outputs, targets):\n    return (outputs.argmax(1) == targets).float()\n"
        "wrong = eq.Metric('wrong', lambda o, t: (o.argmax(1) != t).float(), higher_is_better=False)\n"
        "number = 3\n"
    )
    agreement, wrong = fitted([f"{file}:agreement", f"{file}:wrong"])
    assert agreement.score(OUTPUT, TARGET) == 1 - wrong.score(OUTPUT, TARGET)
    assert (agreement.higher_is_better, wrong.higher_is_better) == (True, False)
    with pytest.raises(eq.EquipoiseError, match="did you mean 'agreement'"):
        find_metrics(f"{file}:agrement")
    with pytest.raises(eq.EquipoiseError, match="of type int; it must be a function"):
        find_metrics(f"{file}:number")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("macro-f", "unknown metric 'macro-f' .*did you mean 'macro-f1'?"),
        ("zzz", "unknown metric 'zzz' .*available: accuracy, auroc"),
        (3, "a metric is 3, of type int; it must be a name"),
        (["accuracy", "accuracy"], "two metrics are named 'accuracy'"),
        (["confusion-matrix", "accuracy"], "'confusion-matrix' is not one number, so it cannot be the first metric"),
        (["per-class-recall"], "'per-class-recall' is not one number"),
        (my_error, "not clear whether higher values of the metric 'my_error' are better"),
        (lambda o, t: 0.0, "a function without a name needs one"),
        (Metric("loss", top_two), "cannot be named 'loss'"),
        ([Metric("a", top_two), Metric("a_std", top_two)], "cannot be named 'a_std'"),
    ],
)
def test_names_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(eq.EquipoiseError, match=message):
        find_metrics(given)


@pytest.mark.parametrize(
    ("given", "output", "target", "message"),
    [
        (
            "macro-f1",
            torch.zeros(2, 1),
            torch.zeros(2),
            "'macro-f1' needs classes.*for numbers: rmse, mse, mae",
        ),
        ("accuracy", torch.zeros(2, 1), LABELS, "at least two outputs"),
        ("r2", torch.zeros(2, 3), torch.zeros(2), "'r2' compares numbers, but the model gives 3 per sample"),
        (
            ["accuracy", "confusion-matrix"],
            torch.zeros(2, 300),
            torch.zeros(2, dtype=torch.int64),
            "at most 256 classes",
        ),
        (Metric("rows", lambda o, t: o), OUTPUT, TARGET, re.escape("returns shape (2, 3); it must be one number")),
        (Metric("typo", lambda o, t: o.nothing), OUTPUT, TARGET, "'typo' fails on outputs .*AttributeError"),
    ],
)
def test_what_does_not_fit_is_said(given: Any, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(eq.EquipoiseError, match=message):
        fitting_metrics(given, "own", output, target)


def test_plug_ins_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", f"{__name__}:top_two", "equipoise.metrics"),
        EntryPoint("broken", "nowhere_at_all:f", "equipoise.metrics"),
    ]
    monkeypatch.setattr(lookup, "entry_points", lambda group: points if group == "equipoise.metrics" else [])
    (metric,) = find_metrics(["theirs"])
    assert metric.score(OUTPUT, TARGET) == 0.5
    with pytest.raises(eq.EquipoiseError, match="'broken' is a plug-in that cannot be imported"):
        find_metrics("broken")
    with pytest.raises(eq.EquipoiseError, match="did you mean 'theirs'"):
        find_metrics("their")

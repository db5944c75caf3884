"""Several metrics in a deployment: the same as in the simulator, and nothing impossible is believed."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.algorithms import ALGORITHMS
from equipoise.flower.codec import RejectedMessage
from equipoise.flower.protocol import answer_shapes
from equipoise.flower.reported_scores import ReportedScores
from equipoise.losses import fitting_loss
from equipoise.metrics import MetricCollection, fitting_metrics
from tests.support.flower_memory import WALL, deployed, in_both_engines, run, same, table
from tests.support.problems import classification, small_mlp
from tests.support.tampering import announced

BY_CLASS = ["accuracy", "macro-f1", "balanced-accuracy", "per-class-recall", "confusion-matrix"]


def collection(*names: str) -> MetricCollection:
    return fitting_metrics(names, "cross-entropy", torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_engines_agree_on_metrics_of_classes(tmp_path: Path) -> None:
    federation = classification().holding_out(0.2, 0)
    algorithm = ALGORITHMS["ditto"](lr=0.05, batch=4)
    over_flower, simulated = in_both_engines(
        tmp_path, algorithm, federation, small_mlp(), metrics=BY_CLASS, participation=0.5
    )
    for ours, theirs in zip(over_flower.lines, simulated.lines, strict=True):
        same(ours, theirs)
    ours, theirs = over_flower.summary(), simulated.summary()
    same({k: ours[k] for k in theirs if k not in WALL}, {k: v for k, v in theirs.items() if k not in WALL})
    assert "macro-f1_pooled" in ours["hybrid"]
    assert sum(map(sum, ours["personal"]["confusion-matrix_pooled"])) == 5 * 3
    heads = [(tmp_path / name / "clients.csv").read_text().splitlines()[0] for name in ("flower", "simulated")]
    assert heads[0] == heads[1]
    rows = [list(csv.DictReader((tmp_path / name / "clients.csv").open())) for name in ("flower", "simulated")]
    for one, other in zip(*rows, strict=True):
        same(_numbers(one), _numbers(other))


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    return {key: float(value) if value.replace(".", "").isdigit() else value for key, value in row.items()}


def test_what_needs_predictions_is_not_pooled_by_the_server(tmp_path: Path) -> None:
    algorithm = ALGORITHMS["fedavg"](lr=0.05, batch=4)
    names = ["auroc", "accuracy", "calibration-error", "macro-f1"]
    over_flower, simulated = in_both_engines(
        tmp_path, algorithm, classification(), small_mlp(), metrics=names, participation=1.0
    )
    ours, theirs = over_flower.summary()["global"], simulated.summary()["global"]
    assert theirs.keys() - ours.keys() == {"auroc_pooled", "calibration-error_pooled", "macro-f1_pooled"}
    same(ours, {key: theirs[key] for key in ours})
    assert ours["accuracy_pooled"] is not None


def test_a_client_sends_a_confusion_matrix_only_if_it_is_asked_for(tmp_path: Path) -> None:
    app, _ = deployed(tmp_path, classification(), small_mlp(), table(ALGORITHMS["ditto"]()))
    schema = announced(app)
    shapes = answer_shapes(schema, collection("accuracy", "macro-f1", "auroc"))
    assert not any(name.startswith("confusion.") for name in shapes)
    assert shapes["scores.personal"] == ((6,), torch.float64)
    shapes = answer_shapes(schema, collection(*BY_CLASS))
    assert shapes["confusion.personal"] == ((3, 3), torch.int64)
    assert shapes["scores.personal"] == ((4 + 2 + 3,), torch.float64)


def test_metrics_of_the_app_replace_those_of_the_experiment(tmp_path: Path) -> None:
    app, grid = deployed(
        tmp_path / "app", classification(), small_mlp(), table(ALGORITHMS["fedavg"]()), metrics=["auroc"], rounds=1
    )

    def agreement(output: Tensor, target: Tensor) -> float:
        return float((output.argmax(1) == target).double().mean())

    app.own["metric"] = ["accuracy", agreement]
    found = run(app, grid, tmp_path / "out").summary()
    assert found["metric"] == "accuracy"
    assert found["global"]["agreement"] == pytest.approx(found["global"]["accuracy"])


def honest() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Five test samples of two classes, for macro-f1, auroc and recalls."""
    row = torch.tensor([0.7, 0.5, 0.8, 0.6, 0.55, math.nan, 0.5, 1.0, math.nan], dtype=torch.float64)
    matrix = torch.tensor([[1, 1, 0], [0, 3, 0], [0, 0, 0]])
    return {"sizes": torch.tensor([10, 4, 5]), "personal": row}, {"personal": matrix}


METRICS = collection("accuracy", "macro-f1", "auroc", "per-class-recall", "confusion-matrix")


def add(scores: dict[str, Tensor], confusion: dict[str, Tensor]) -> ReportedScores:
    reported = ReportedScores(METRICS)
    reported.add("a", scores, confusion, 0, False)
    return reported


def test_an_honest_client_is_believed() -> None:
    found = add(*honest()).summary()["personal"]
    assert found["accuracy_pooled"] == 0.6
    assert (found["auroc"], found["auroc_clients"]) == (None, 0)
    assert found["macro-f1_pooled"] == pytest.approx((2 / 3 + 6 / 7) / 2)
    assert found["per-class-recall_pooled"] == [0.5, 1.0, None]
    assert found["per-class-recall_clients"] == [1, 1, 0]


@pytest.mark.parametrize(
    ("column", "value"),
    [(3, 7.0), (4, 7.0), (4, -0.1), (5, 1.1), (6, 2.0), (2, math.nan), (2, -1.0), (3, math.nan), (5, math.inf)],
)
def test_an_impossible_score_is_rejected(column: int, value: float) -> None:
    scores, confusion = honest()
    scores["personal"][column] = value
    with pytest.raises(RejectedMessage) as error:
        add(scores, confusion)
    assert error.value.reason == "scores"


def test_a_loss_of_the_users_own_may_be_negative() -> None:
    scores, confusion = honest()
    scores["personal"][2] = -1.0
    reported = ReportedScores(METRICS, least_loss=-math.inf)
    reported.add("a", scores, confusion, 0, False)
    assert reported.summary()["personal"]["loss"] == -1.0
    assert (fitting_loss("cross-entropy", *PAIR).least, fitting_loss(lambda o, t: o.sum(), *PAIR).least) == (
        0,
        -math.inf,
    )


PAIR = torch.zeros(2, 3), torch.zeros(2).long()


@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor([[1, 1, 0], [0, 4, 0], [0, 0, 0]]),
        torch.tensor([[-1, 3, 0], [0, 3, 0], [0, 0, 0]]),
        torch.tensor([[2**62, 2**62, 2**62], [2**62, 5, 0], [0, 0, 0]]),
        None,
    ],
)
def test_an_impossible_confusion_matrix_is_rejected(matrix: Tensor | None) -> None:
    scores, _ = honest()
    with pytest.raises(RejectedMessage):
        add(scores, {} if matrix is None else {"personal": matrix})


def test_scores_survive_a_restart_of_the_server() -> None:
    before = add(*honest())
    after = ReportedScores(METRICS)
    after.restore(before.facts(), before.tensors())
    assert after.summary() == before.summary()
    for one, other in zip(after.tables()[3].values(), before.tables()[3].values(), strict=True):
        np.testing.assert_array_equal(one, other)
    other = ReportedScores(collection("accuracy"))
    other.restore(before.facts(), before.tensors())
    assert other.rows == {}

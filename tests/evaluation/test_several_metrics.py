"""Several metrics in a run: means over clients beside pooled figures, undefined scores, resuming, bounded memory."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.algorithms import Ditto, FedAvg, KnnPer, Local
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.evaluation import evaluator, kept_predictions
from equipoise.evaluation.figures import summarize
from equipoise.executors.base import ClientModel
from equipoise.metrics import METRICS, SetMetric
from equipoise.runs.result import Result
from tests.support.problems import classification, linear_module, metrics, simulation, small_mlp

COMMON = {"lr": 0.1, "epochs": 2, "batch": 4}
NUMBERS = ["macro-f1", "balanced-accuracy", "auroc", "average-precision", "calibration-error"]
ALL = ["accuracy", *NUMBERS, "per-class-recall", "confusion-matrix"]


def top_two(output: Tensor, target: Tensor) -> float:
    return float((output.topk(2, 1).indices == target[:, None]).any(1).double().mean())


def one_class_client(clients: int = 5) -> Federation:
    """Clients of different sizes, of which the third has test samples of one class only."""
    rng = np.random.default_rng(1)
    parts = []
    for i in range(clients):
        x = rng.normal(size=(30 + 7 * i, 5))
        y = (x @ rng.normal(size=(5, 3))).argmax(1)
        cut = 20 + 3 * i
        if i == 2:
            y[cut:] = 1
        parts.append({"train": (x[:10], y[:10]), "validation": (x[10:cut], y[10:cut]), "test": (x[cut:], y[cut:])})
    return from_clients(parts)


def finished(federation: Federation | None = None, **more: Any) -> Simulation:
    settings = {"metric": ALL, "participation": 1.0, "rounds": 3, **more}
    run = simulation(settings.pop("algorithm", Ditto(**COMMON)), federation or one_class_client(), **settings)
    run.run()
    return run


def outputs(run: Simulation, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Outputs of the models that are handed out, and targets, of each client's test samples."""
    result, found = Result(run), []
    module_of = {"personal": result.personal, "global": lambda i: result.global_model(), "hybrid": result.hybrid}[kind]
    for who in range(len(run.federation)):
        x, y = run.federation.gather(torch.from_numpy(run.federation.test[who]))
        with torch.no_grad():
            found.append((module_of(who)(x), y))
    return found


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_figures_are_those_of_the_models_that_are_handed_out(mode: str) -> None:
    run = finished(mode=mode, metric=[*ALL, top_two])
    summary, columns = run.summary(), Result(run).score_columns
    for kind in ("personal", "global", "hybrid"):
        pairs = outputs(run, kind)
        whole = torch.cat([o for o, _ in pairs]), torch.cat([y for _, y in pairs])
        for metric in run.task.metrics.metrics:
            if isinstance(metric, SetMetric) and metric.form != "number":
                continue
            own = np.array([metric.score(*pair) for pair in pairs])
            figures, name = summary[kind], metric.name
            column = "test_metric" if name == "accuracy" else f"test_{name}"
            found = Result(run).scores()[kind][:, columns.index(column)]
            np.testing.assert_allclose(found, own, rtol=1e-9)
            assert figures[name] == pytest.approx(np.nanmean(own))
            assert figures[f"{name}_std"] == pytest.approx(np.nanstd(own))
            assert figures[f"{name}_pooled"] == pytest.approx(metric.score(*whole))
        matrix = np.zeros((3, 3), dtype=int)
        np.add.at(matrix, (whole[1].numpy(), whole[0].argmax(1).numpy()), 1)
        assert summary[kind]["confusion-matrix_pooled"] == matrix.tolist()
        recall = matrix.diagonal() / matrix.sum(1)
        assert summary[kind]["per-class-recall_pooled"] == pytest.approx(recall.tolist())
        assert summary[kind]["accuracy_pooled"] == pytest.approx(matrix.trace() / matrix.sum())


def test_pooled_and_mean_are_equal_for_clients_of_one_size_and_differ_otherwise() -> None:
    even = finished(classification(), metric=None)  # three test samples each
    for kind in ("personal", "global"):
        figures = even.summary()[kind]
        assert figures["accuracy_pooled"] == pytest.approx(figures["accuracy"])
        assert figures["loss_pooled"] == pytest.approx(figures["loss"])
    figures = finished(metric=None).summary()["global"]
    assert figures["accuracy_pooled"] != pytest.approx(figures["accuracy"])


def test_a_score_that_the_samples_do_not_define_is_left_out_and_counted(tmp_path: Path) -> None:
    run = finished(folder=tmp_path / "run")
    figures = run.summary()["personal"]
    assert (figures["auroc_clients"], figures["macro-f1_clients"]) == (4, 5)
    assert figures["per-class-recall_clients"][1] == 5
    assert figures["per-class-recall_clients"][0] == 4
    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    assert rows[2]["personal_test_auroc"] == ""
    assert rows[2]["personal_test_per-class-recall_0"] == ""
    values = [float(row["personal_test_auroc"]) for row in rows if row["personal_test_auroc"]]
    assert figures["auroc"] == pytest.approx(np.mean(values))
    assert figures["auroc_pooled"] is not None


def test_a_model_that_diverged_does_not_vanish_from_a_mean() -> None:
    test = np.array([[1.0, 0.5], [np.nan, -np.inf], [1.0, np.nan]])
    figures = summarize(test, np.empty(0), METRICS["auroc"])
    assert figures["auroc"] is None
    assert figures["auroc_clients"] == 2
    assert summarize(test[2:], test[2:, 1], METRICS["auroc"])["auroc"] is None
    assert summarize(test[[0, 2]], test[[0, 2], 1], METRICS["auroc"])["validation_auroc"] == 0.5


def test_files_of_a_run_have_every_metric(tmp_path: Path) -> None:
    run = finished(folder=tmp_path / "run", federation=one_class_client().holding_out(0.2, 0))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metric"] == "accuracy"
    assert list(summary["metrics"]) == ALL
    assert summary["metrics"]["calibration-error"] == {"higher_is_better": False}
    assert summary["metrics"]["confusion-matrix"] == {"higher_is_better": None}
    assert len(summary["personal"]["confusion-matrix_pooled"]) == 3
    assert "auroc_pooled" in summary["unseen"]["personal"]
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        for name in ["accuracy", *NUMBERS]:
            assert {name, f"{name}_std", f"{name}_pooled"} <= line["personal"].keys()
        assert not any(isinstance(value, list) for value in line["personal"].values())
    head = (tmp_path / "run" / "clients.csv").read_text().splitlines()[0].split(",")
    columns = [*Result(run).score_columns]
    assert columns[:6] == [
        *("validation_loss", "validation_metric", "test_loss", "test_metric", "test_macro-f1", "test_balanced-accuracy")
    ]
    assert [name for name in head if name.startswith("personal_")] == [f"personal_{c}" for c in columns]


def test_the_first_metric_decides() -> None:
    run = finished(metric=["calibration-error", "accuracy"], rounds=5)
    tables = Result(run).scores()
    mine, common = tables["personal"], tables["global"]
    chosen = np.where((mine[:, 0] <= common[:, 0])[:, None], mine, common)  # by the loss on validation samples
    np.testing.assert_array_equal(tables["hybrid"][:, 1], chosen[:, 1])
    summary = run.summary()
    assert (summary["metric"], summary["higher_is_better"]) == ("calibration-error", False)
    assert summary["hybrid"]["validation_calibration-error"] == pytest.approx(np.nanmean(chosen[:, 1]))
    assert summary["hybrid"]["worst_decile"] >= summary["hybrid"]["best_decile"]


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_nothing_depends_on_an_interruption(mode: str, tmp_path: Path) -> None:
    """Predictions of clients that did not train since are part of checkpoints."""
    settings: dict[str, Any] = {"mode": mode, "metric": [*ALL, top_two], "participation": 2, "checkpoint_every": 3}
    run = simulation(Ditto(**COMMON), one_class_client(), folder=tmp_path / "run", rounds=5, **settings)
    run.run()
    lines, summary = metrics(tmp_path / "run"), (tmp_path / "run" / "clients.csv").read_bytes()
    for path in (tmp_path / "run" / "checkpoint").glob("*000005*"):
        path.unlink()
    again = simulation(Ditto(**COMMON), one_class_client(), folder=tmp_path / "run", new=False, rounds=5, **settings)
    again.resume()
    assert again.done == 3
    again.run()
    assert metrics(tmp_path / "run") == lines
    assert (tmp_path / "run" / "clients.csv").read_bytes() == summary
    assert again.summary()["hybrid"] == run.summary()["hybrid"]


def test_threads_stacks_and_numbers_of_workers_agree() -> None:
    runs = [finished(mode=mode, workers=w) for mode, w in (("threads", 1), ("threads", 2), ("stacked", 1))]
    assert runs[0].lines == runs[1].lines
    for a, b in zip(runs[0].lines, runs[2].lines, strict=True):
        for kind in ("personal", "global", "hybrid"):
            assert a[kind] == pytest.approx(b[kind], rel=1e-9, abs=1e-12)


def test_a_run_resumed_with_other_metrics_is_scored_again(tmp_path: Path) -> None:
    """Also one whose checkpoint has no names of metrics, as those of older versions."""
    federation = one_class_client()
    settings: dict[str, Any] = {"folder": tmp_path / "run", "rounds": 2, "participation": 2}
    simulation(Ditto(**COMMON), federation, **settings).run()
    manifest = next((tmp_path / "run" / "checkpoint").glob("round-000002.json"))
    assert json.loads(manifest.read_text())["facts"]["scores"]["training"]["metrics"] == ["accuracy"]
    again = simulation(Ditto(**COMMON), federation, new=False, metric=["accuracy", "auroc"], **settings)
    again.resume()
    assert again.done == 2
    again.run()
    assert again.summary()["personal"]["auroc_pooled"] is not None
    fresh = simulation(
        Ditto(**COMMON), federation, metric=["accuracy", "auroc"], **{**settings, "folder": tmp_path / "fresh"}
    )
    fresh.run()
    assert again.summary()["personal"] == pytest.approx(fresh.summary()["personal"])
    facts, tensors = fresh.scores.training.facts(), fresh.scores.training.tensors()
    older = {key: value for key, value in facts.items() if key != "metrics"}
    narrow = {key: t[:, :4] if key.endswith("scores") else t for key, t in tensors.items()}
    assert fresh.new_scores().training.restore(older, tensors)
    assert not fresh.new_scores().training.restore(older, narrow)


def test_outputs_that_are_too_many_are_not_pooled_and_not_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finished(mode="stacked")
    federation = one_class_client()
    most = 3 * int((federation.validation.lengths + federation.test.lengths).max())
    for module in (evaluator, kept_predictions):
        monkeypatch.setattr(module, "MOST_OUTPUTS", most)
    asked: list[int] = []
    run = simulation(Ditto(**COMMON), one_class_client(), metric=ALL, mode="stacked", participation=1.0, rounds=3)
    one, many = run.executor.score_pieces, run.executor.score

    def score_pieces(vector: Tensor, pieces: list[np.ndarray], buffers: Tensor | None = None) -> Any:
        asked.append(3 * sum(map(len, pieces)))
        return one(vector, pieces, buffers)

    def score(models: list[ClientModel], indices: list[np.ndarray]) -> Any:
        asked.append(3 * sum(map(len, indices)))
        return many(models, indices)

    monkeypatch.setattr(run.executor, "score_pieces", score_pieces)
    monkeypatch.setattr(run.executor, "score", score)
    run.run()
    assert max(asked) <= most
    figures, expected = run.summary()["personal"], whole.summary()["personal"]
    assert "auroc_pooled" not in figures
    assert "outputs" not in run.scores.training.tables["personal"].kept.arrays
    for name in (*NUMBERS, "macro-f1_pooled", "calibration-error_pooled"):
        assert figures[name] == pytest.approx(expected[name], rel=1e-9)
    for module in (evaluator, kept_predictions):
        monkeypatch.setattr(module, "MOST_OUTPUTS", most - 1)
    with pytest.raises(EquipoiseError, match=r"'client-4' has .* samples with 3 outputs each, more than"):
        simulation(Local(**COMMON), one_class_client(), metric=["accuracy", "auroc"])


def test_texts_keep_one_number_per_position(tmp_path: Path) -> None:
    class PerPosition(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 4, 2)), rng.integers(0, 3, (20, 4))) for _ in range(3)]
    run = finished(
        from_clients(clients), module=PerPosition(), algorithm=FedAvg(lr=0.1), metric=["accuracy", "macro-f1"]
    )
    kept = run.scores.training.tables["global"].kept.arrays
    assert {name: array.shape for name, array in kept.items()} == {"classes": (12, 4)}
    output, target = (torch.cat(parts) for parts in zip(*outputs(run, "global"), strict=True))
    expected = METRICS["macro-f1"].score(output.flatten(0, 1), target.flatten())
    assert run.summary()["global"]["macro-f1_pooled"] == pytest.approx(expected)


def test_numbers_have_metrics_too() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (5, 20, 30)]  # the first has one test sample
    run = finished(
        from_clients(clients),
        module=linear_module(),
        algorithm=Local(lr=0.01),
        loss="squared",
        metric=["rmse", "mae", "r2", "mse"],
    )
    figures = run.summary()["personal"]
    pairs = outputs(run, "personal")
    output, target = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    for name in ("rmse", "mae", "r2", "mse"):
        assert figures[f"{name}_pooled"] == pytest.approx(METRICS[name].score(output, target))
    assert figures["r2_clients"] == 2
    assert figures["r2"] == pytest.approx(np.mean([METRICS["r2"].score(*pair) for pair in pairs[1:]]))


def test_knn_per_chooses_by_the_first_metric() -> None:
    for metric in ("macro-f1", "auroc"):
        run = finished(metric=[metric, "accuracy"], algorithm=KnnPer(lr=0.1, batch=4))
        assert np.isfinite(run.summary()["personal"][metric])


def test_labels_beyond_the_outputs_are_said_with_a_loss_of_ones_own() -> None:
    federation = classification()
    wrong = replace(federation, y=federation.y + 1, classes=4)

    def own(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    with pytest.raises(EquipoiseError, match="there is a label 3, and the model has only 3 outputs"):
        simulation(Local(**COMMON), wrong, loss=own, metric=["accuracy", "macro-f1"])


def test_targets_beyond_the_metric_are_said() -> None:
    with pytest.raises(EquipoiseError, match="macro-f1 is at most 1"):
        simulation(Local(**COMMON), metric="macro-f1", targets=(1.5,))


def test_a_metric_of_ones_own_that_fails_is_said() -> None:
    def fails(output: Tensor, target: Tensor) -> float:
        raise ValueError("no such thing")

    with pytest.raises(EquipoiseError, match=r"the metric 'fails' fails on outputs .*: ValueError: no such thing"):
        finished(metric=["accuracy", fails])


def test_the_usual_metric_keeps_nothing() -> None:
    run = simulation(Local(**COMMON))
    assert not run.task.metrics.needs
    (scores,) = run.executor.score_pieces(run.task.w0, [np.arange(3)])
    run.close()
    assert scores.predictions is None
    assert scores.values.shape == (2, 3)


def test_train_takes_names_metrics_and_functions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 30, 5)).astype("float32")
    clients = [(each, (each[:, :3]).argmax(1)) for each in x]
    wrong = eq.Metric("wrong", lambda o, t: (o.argmax(1) != t).double(), higher_is_better=False)
    result = eq.train(
        small_mlp(), clients, eq.Ditto(lr=0.1), rounds=2, metric=[wrong, "accuracy", top_two], out=tmp_path / "run"
    )
    assert result.summary["metric"] == "wrong"
    figures = result.summary["personal"]
    for end in ("", "_pooled"):
        assert figures[f"wrong{end}"] == pytest.approx(1 - figures[f"accuracy{end}"])
        assert 0 <= figures[f"top_two{end}"] <= 1
    one = eq.train(small_mlp(), clients, eq.Ditto(lr=0.1), rounds=2, metric="macro-f1")
    assert set(one.metrics[-1]["global"]) >= {"macro-f1", "macro-f1_pooled", "validation_macro-f1", "loss_pooled"}

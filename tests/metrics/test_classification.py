"""Metrics of classifiers beside second methods: formulas in numpy, and definitions by pairs of samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.metrics import METRICS, Predictions, SetMetric, keep

CLASSES = 4


def predictions(output: Tensor, target: Tensor) -> Predictions:
    return Predictions(keep({"classes", "confidence", "outputs"}, output, target), output.shape[-1])


def value(name: str, output: Tensor, target: Tensor) -> np.ndarray:
    metric = METRICS[name]
    assert isinstance(metric, SetMetric)
    return metric.value(predictions(output, target))


@st.composite
def samples(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Outputs with ties, and targets that may lack classes."""
    n, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    levels = draw(st.sampled_from([2, 5, 1000]))
    output = torch.from_numpy(rng.integers(0, levels, (n, CLASSES)) / levels * 4)
    present = draw(st.sets(st.integers(0, CLASSES - 1), min_size=1))
    return output, torch.from_numpy(rng.choice(sorted(present), n))


@given(samples())
def test_confusion_matrix_counts_pairs(given: tuple[Tensor, Tensor]) -> None:
    output, target = given
    expected = np.zeros((CLASSES, CLASSES))
    for t, p in zip(target.tolist(), output.argmax(1).tolist(), strict=True):
        expected[t, p] += 1
    np.testing.assert_array_equal(value("confusion-matrix", output, target), expected)


@given(samples())
def test_recall_balanced_accuracy_and_f1_by_their_formulas(given: tuple[Tensor, Tensor]) -> None:
    output, target = given
    p, t = output.argmax(1).numpy(), target.numpy()
    recall = [np.mean(p[t == c] == c) if (t == c).any() else np.nan for c in range(CLASSES)]
    np.testing.assert_allclose(value("per-class-recall", output, target), recall)
    assert value("balanced-accuracy", output, target) == pytest.approx(np.nanmean(recall))
    scores = []
    for c in range(CLASSES):
        if not ((t == c).any() or (p == c).any()):
            continue
        precision = np.mean(t[p == c] == c) if (p == c).any() else 0.0
        r = np.mean(p[t == c] == c) if (t == c).any() else 0.0
        scores.append(2 * precision * r / (precision + r) if precision + r else 0.0)
    assert value("macro-f1", output, target) == pytest.approx(np.mean(scores))
    import torchmetrics.functional.classification as tm  # takes a second, which is for who runs this test only

    assert value("macro-f1", output, target) == pytest.approx(float(tm.multiclass_f1_score(output, target, CLASSES)))


@given(samples())
def test_auroc_is_the_chance_of_the_right_order(given: tuple[Tensor, Tensor]) -> None:
    """Of a sample of the class and one of another, the first has the higher probability; ties count half."""
    output, target = given
    found = value("auroc", output, target)
    present = target.unique()
    if len(present) < 2:
        assert np.isnan(found)
        return
    chances = []
    for c in present.tolist():
        score = output.softmax(1)[:, c].numpy()
        own, other = score[(target == c).numpy()], score[(target != c).numpy()]
        chances.append(np.mean((own[:, None] > other) + 0.5 * (own[:, None] == other)))
    assert float(found) == pytest.approx(np.mean(chances), abs=1e-6)


@given(samples())
def test_average_precision_is_the_area_under_its_steps(given: tuple[Tensor, Tensor]) -> None:
    output, target = given
    found = value("average-precision", output, target)
    present = target.unique()
    if len(present) < 2:
        assert np.isnan(found)
        return
    areas = []
    for c in present.tolist():
        score, own = output.softmax(1)[:, c].numpy(), (target == c).numpy()
        area, before = 0.0, 0.0
        for threshold in np.unique(score)[::-1]:
            taken = score >= threshold
            recall = (taken & own).sum() / own.sum()
            area += (recall - before) * (taken & own).sum() / taken.sum()
            before = recall
        areas.append(area)
    assert float(found) == pytest.approx(np.mean(areas), abs=1e-6)


@given(samples())
def test_calibration_error_by_bins(given: tuple[Tensor, Tensor]) -> None:
    output, target = given
    probability = output.softmax(1).numpy()
    confidence, right = probability.max(1), output.argmax(1).numpy() == target.numpy()
    edges = np.linspace(0, 1, 16, dtype=np.float32).astype(np.float64)  # 1 has a bin of its own
    bins = np.searchsorted(edges, confidence, side="right")
    error = sum(abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in np.unique(bins)) / len(bins)
    assert float(value("calibration-error", output, target)) == pytest.approx(error, abs=1e-6)


@given(samples(), st.integers(0, 40))
def test_predictions_of_parts_are_those_of_the_whole(given: tuple[Tensor, Tensor], cut: int) -> None:
    output, target = given
    whole = predictions(output, target)
    parts = [part for part in (whole[:cut], whole[cut:]) if len(part.arrays["targets"])]
    again = Predictions.concatenate(parts)
    for metric in METRICS.values():
        if isinstance(metric, SetMetric) and metric.targets == "classes":
            np.testing.assert_array_equal(metric.value(again), metric.value(whole))


def test_a_score_per_position_is_that_of_all_positions() -> None:
    torch.manual_seed(0)
    output, target = torch.randn(6, 5, CLASSES), torch.randint(0, CLASSES, (6, 5))
    for name in ("macro-f1", "auroc", "calibration-error", "confusion-matrix"):
        flat = value(name, output.flatten(0, 1), target.flatten())
        np.testing.assert_array_equal(value(name, output, target), flat)
    last = value("macro-f1", output[:, -1], target[:, 0])  # one target for all positions: the last one counts
    assert value("macro-f1", output, target[:, 0]) == last


def test_outputs_that_are_not_finite_are_the_worst_and_not_undefined() -> None:
    output, target = torch.zeros(4, CLASSES), torch.tensor([0, 1, 2, 3])
    output[2, 1] = torch.nan
    assert value("auroc", output, target) == -np.inf
    assert value("calibration-error", output, target) == np.inf


def test_every_metric_says_what_it_is_for_and_which_way_is_better() -> None:
    lower = {name for name, metric in METRICS.items() if not metric.higher_is_better}
    assert lower == {"calibration-error", "rmse", "mse", "mae", "pinball", "interval-width"}
    numbers = {name for name, metric in METRICS.items() if metric.targets == "numbers"}
    assert numbers == {"rmse", "mse", "mae", "r2"}
    assert all(metric.targets != "any" for metric in METRICS.values())


def test_one_number_of_threads_or_another_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    output, target = torch.randn(60_000, 3), torch.randint(0, 3, (60_000,))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([value(name, output, target) for name in ("auroc", "calibration-error")])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*found)

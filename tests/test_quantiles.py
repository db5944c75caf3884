"""The pinball loss: what minimises it, and its place in a run."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.losses import fitting_loss, squared_error
from equipoise.metrics import METRICS, fitting_metrics
from equipoise.quantiles import Pinball


def samples(n: int = 200) -> Tensor:
    """Skewed numbers, so that quantiles are not symmetric around the mean."""
    return torch.from_numpy(np.random.default_rng(0).exponential(size=(n, 1)))


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_the_pinball_loss_is_smallest_at_the_quantile(quantile: float) -> None:
    y = samples()
    pinball = Pinball(tuple(sorted({quantile, 0.5})))
    at = pinball.quantiles.index(quantile)
    tried = torch.linspace(0, 5, 2001, dtype=torch.float64)
    outputs = torch.zeros(len(tried), len(pinball.quantiles), dtype=torch.float64)
    outputs[:, at] = tried
    losses = [float(pinball(row.expand(len(y), -1), y).mean()) for row in outputs]
    assert float(tried[int(np.argmin(losses))]) == pytest.approx(float(y.quantile(quantile)), abs=0.02)


def test_the_loss_of_the_median_is_half_the_absolute_error() -> None:
    output, target = torch.randn(7, 3), torch.randn(7, 3)
    assert torch.allclose(Pinball((0.5,))(output, target), (output - target).abs().mean(-1) / 2)


def test_the_loss_is_the_definition_written_out() -> None:
    pinball, rng = Pinball((0.2, 0.5, 0.7)), np.random.default_rng(1)
    output, target = rng.normal(size=(4, 2, 3)), rng.normal(size=(4, 2))
    expected = [
        np.mean([max(q * (y - f), (q - 1) * (y - f)) for f3, y in zip(o, t, strict=True)
                 for q, f in zip(pinball.quantiles, f3, strict=True)])
        for o, t in zip(output, target, strict=True)
    ]  # fmt: skip
    found = pinball(torch.from_numpy(output.reshape(4, 6)), torch.from_numpy(target))
    assert np.allclose(found, expected)


def test_sorting_quantiles_that_cross_never_raises_the_loss() -> None:
    pinball, target = Pinball(), torch.randn(500, 4)
    output = torch.randn(500, 12)
    ordered = pinball.ordered(output)
    assert (ordered.diff(dim=-1) >= 0).all()
    assert (pinball(ordered.flatten(1), target) <= pinball(output, target) + 1e-6).all()
    assert torch.equal(pinball.point(output), ordered[..., 1])


@pytest.mark.parametrize("quantiles", [(), (0.5, 0.1), (0.1, 0.9), (0.0, 0.5), (0.5, 1.0), ("a",), (0.5, 0.5), 3])
def test_quantiles_that_cannot_be_forecast_are_refused(quantiles: object) -> None:
    with pytest.raises(eq.EquipoiseError, match=r"ascending order, with 0\.5 among them"):
        Pinball(quantiles)  # type: ignore[arg-type]


def test_a_model_needs_one_output_per_number_and_quantile() -> None:
    with pytest.raises(eq.EquipoiseError, match="needs 6: 3 quantiles of each of the 2 numbers"):
        fitting_loss("pinball", torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(eq.EquipoiseError, match="whole numbers"):
        fitting_loss("pinball", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


def test_metrics_of_quantiles_and_of_their_medians() -> None:
    pinball, output, target = Pinball((0.1, 0.5, 0.9)), torch.randn(50, 6), torch.randn(50, 2)
    names = ["pinball", "coverage", "interval-width", "rmse", "mae", "r2"]
    metrics = fitting_metrics(names, "own", output, target, pinball)
    found = {metric.name: metric.score(output, target) for metric in metrics.metrics}
    quantiles = output.reshape(50, 2, 3).sort(-1).values
    inside = (quantiles[..., 0] <= target) & (target <= quantiles[..., 2])
    assert found["coverage"] == pytest.approx(float(inside.float().mean()))
    assert found["interval-width"] == pytest.approx(float((quantiles[..., 2] - quantiles[..., 0]).mean()))
    assert found["rmse"] == pytest.approx(float(squared_error(quantiles[..., 1], target).mean().sqrt()))
    assert found["mae"] == pytest.approx(METRICS["mae"].score(quantiles[..., 1], target))
    assert found["r2"] == pytest.approx(METRICS["r2"].score(quantiles[..., 1], target))
    assert fitting_metrics(None, "own", output, target, pinball).first.name == "pinball"


def test_metrics_of_quantiles_need_quantiles_and_do_not_decide_alone() -> None:
    with pytest.raises(eq.EquipoiseError, match="needs loss = 'pinball'"):
        fitting_metrics(["rmse", "coverage"], "squared", torch.zeros(4, 1), torch.zeros(4, 1))
    with pytest.raises(eq.EquipoiseError, match="put 'pinball' before it"):
        eq.train(nn.Linear(2, 3), clients(), "fedavg", loss="pinball", metric="coverage")


def clients(number: int = 3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Clients with numbers that depend on inputs, with noise."""
    rng, made = np.random.default_rng(0), {}
    for k in range(number):
        x = rng.normal(size=(60, 2)).astype("float32")
        made[f"c{k}"] = x, (x @ np.array([[1.0], [k]]) + rng.normal(size=(60, 1))).astype("float32")
    return made


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_runs_learn_quantiles(mode: str) -> None:
    result = eq.train(
        nn.Linear(2, 3), clients(), eq.Local(lr=0.5, epochs=20), loss="pinball", rounds=10, mode=mode,
        metric=["pinball", "coverage"], progress=False, evaluate_every=10,
    )  # fmt: skip
    x, y = clients()["c1"]
    quantiles = Pinball().ordered(torch.from_numpy(result.predict("c1", x)))[:, 0].numpy()
    shares = [(y[:, 0] <= quantiles[:, k]).mean() for k in range(3)]
    assert shares == pytest.approx([0.1, 0.5, 0.9], abs=0.1)


def test_saved_results_know_their_quantiles(tmp_path: object) -> None:
    pinball = eq.Pinball((0.05, 0.5, 0.95))
    result = eq.train(nn.Linear(2, 3), clients(), "ditto", loss=pinball, metric=["pinball", "mae"], rounds=1)
    result.save(f"{tmp_path}/saved")
    again = eq.load_result(f"{tmp_path}/saved", module=nn.Linear(2, 3))
    adapted = [each.adapt({"d": clients()["c2"]}).summary["personal"] for each in (result, again)]
    assert adapted[0] == adapted[1]
    assert adapted[0]["pinball"] > 0


def test_methods_that_predict_from_targets_are_refused() -> None:
    with pytest.raises(eq.EquipoiseError, match="which are no quantiles"):
        eq.train(nn.Sequential(nn.Linear(2, 3)), clients(), "learn2pfed", loss="pinball", head="0")


def test_files_name_loss_and_quantiles() -> None:
    base = {"algorithm": {"name": "ditto"}, "model": {"name": "softmax"}, "data": {"name": "electricity"}}
    parsed = Experiment.parse({**base, "loss": "pinball", "quantiles": [0.25, 0.5, 0.75]})
    assert parsed.schedule.pinball == Pinball((0.25, 0.5, 0.75))
    assert Experiment.parse({**base, "loss": "pinball"}).schedule.outputs_per_number == 3
    assert "loss" not in Experiment.parse(base).tables()
    with pytest.raises(eq.EquipoiseError, match="quantiles are forecast with loss = 'pinball'"):
        Experiment.parse({**base, "quantiles": [0.5]})
    with pytest.raises(eq.EquipoiseError, match=r"0\.5 among them"):
        Experiment.parse({**base, "loss": "pinball", "quantiles": [0.1, 0.9]})

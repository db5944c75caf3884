"""Which model is scored, on what, and how often."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.algorithms import Ditto, FedAvg, FedAvgFT, FedRep, Flame, Local
from equipoise.data.federation import RaggedIndices, from_clients
from equipoise.errors import EquipoiseError
from equipoise.evaluation.scoreboard import Scoreboard, summarize
from equipoise.metrics import METRICS, MetricCollection
from equipoise.models.base import BodyAndHead
from equipoise.runs.result import Result
from tests.support.problems import classification, linear_module, simulation

COMMON = {"lr": 0.05, "epochs": 2, "batch": 4}


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_scores_are_those_of_the_models_that_are_handed_out(mode: str) -> None:
    run = simulation(Ditto(**COMMON), mode=mode, participation=1.0)
    run.run()
    result = Result(run)
    federation = run.federation
    for kind, module_of in (("personal", result.personal), ("global", lambda i: result.global_model())):
        for who in range(len(federation)):
            for column, split in ((0, "validation"), (2, "test")):
                indices = torch.from_numpy(getattr(federation, split)[who])
                found = result.scores()[kind][who, column : column + 2]
                if not len(indices):
                    assert np.isnan(found).all()
                    continue
                x, y = federation.gather(indices)
                with torch.no_grad():
                    output = module_of(who)(x)
                assert found[0] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-9)
                assert found[1] == pytest.approx((output.argmax(1) == y).double().mean().item())


def test_hybrid_is_the_better_on_validation_and_personal_without_one() -> None:
    run = simulation(Ditto(**COMMON), participation=1.0)
    run.run()
    tables = run.scores.training.board().tables()
    for who in range(6):
        better = tables["global"][who, 0] < tables["personal"][who, 0]  # False where there is no validation
        expected = tables["global" if better else "personal"][who]
        np.testing.assert_array_equal(tables["hybrid"][who], expected)
    assert np.isnan(tables["hybrid"][1, 1])  # this client has no validation samples, and is scored all the same
    assert not np.isnan(tables["hybrid"][1, 3])


def test_models_that_are_right_as_often_are_told_apart_by_their_loss() -> None:
    personal = np.array([[0.9, 0.5, 1.0, 0.2], [0.1, 0.5, 1.0, 0.6], [0.3, 0.5, 1.0, 0.4], [np.nan] * 2 + [1.0, 0.1]])
    shared = np.array([[0.2, 0.5, 1.0, 0.8], [0.7, 0.5, 1.0, 0.3], [0.3, 0.5, 1.0, 0.9], [np.nan] * 2 + [1.0, 0.7]])
    metrics = MetricCollection((METRICS["accuracy"],), 3)
    validates, every = np.array([True, True, True, False]), np.ones(4, dtype=bool)
    scored = {"personal": personal, "global": shared}
    board = Scoreboard(metrics, validates, every, np.full(4, 10), scored)
    assert board.takes_global().tolist() == [True, False, False, False]  # equal losses, or none: personal
    assert board.summary()["hybrid"]["accuracy"] == pytest.approx((0.8 + 0.6 + 0.4 + 0.1) / 4)
    oracle = Scoreboard(metrics, validates, every, np.full(4, 10), scored, select="test")
    assert oracle.takes_global().tolist() == [True, False, True, True]


def test_an_oracle_chooses_on_test_and_is_called_so() -> None:
    run = simulation(Flame(lr=0.3, epochs=3, batch=4), rounds=6, participation=1.0, select="test")
    run.run()
    tables = run.scores.tables()
    assert "hybrid" not in tables
    best = np.maximum(tables["personal"][:, 3], tables["global"][:, 3])
    np.testing.assert_array_equal(tables["oracle"][:, 3], best)
    assert run.summary()["oracle"]["accuracy"] >= run.summary()["personal"]["accuracy"]


def test_figures_of_fairness() -> None:
    scores = np.array([0.5, 0.6, 0.9, 1.0])
    test = np.stack([np.array([4.0, 3.0, 2.0, 1.0]), scores], axis=1)
    figures = summarize(test, np.empty(0), METRICS["accuracy"])
    assert figures["accuracy_variance"] == pytest.approx(scores.var())
    assert figures["loss_variance"] == pytest.approx(1.25)
    assert (figures["worst_decile"], figures["best_decile"]) == (0.5, 1.0)
    differences = np.abs(scores[:, None] - scores).mean()
    assert figures["gini"] == pytest.approx(differences / 2 / scores.mean())
    even = summarize(np.full((5, 2), 0.7), np.empty(0), METRICS["accuracy"])
    assert even["gini"] == pytest.approx(0)
    errors = summarize(test, np.empty(0), METRICS["rmse"])
    assert (errors["worst_decile"], errors["best_decile"]) == (1.0, 0.5)


def test_no_hybrid_without_validation_samples() -> None:
    federation = classification()
    empty = RaggedIndices([np.empty(0, np.int64)] * 6)
    run = simulation(Ditto(**COMMON), replace(federation, validation=empty))
    run.run()
    assert {"personal", "global"} <= set(run.summary())
    assert "hybrid" not in run.summary()


@pytest.mark.parametrize(
    ("algorithm", "kinds"),
    [(Local, {"personal"}), (FedAvg, {"global"}), (FedAvgFT, {"personal", "global", "hybrid"}), (FedRep, {"personal"})],
)
def test_only_models_that_a_method_has_are_reported(algorithm: type, kinds: set[str]) -> None:
    run = simulation(algorithm(**COMMON))
    run.run()
    assert set(run.scores.training.board().tables()) == kinds


def test_a_model_that_did_not_change_is_not_scored_again() -> None:
    run = simulation(Local(**COMMON), participation=2)
    run.advance()
    first = run.scores.training.scored
    assert first == 6
    for _ in range(3):
        run.advance()
    assert run.scores.training.scored == first + 3 * 2  # only those who trained
    run.close()


def test_accuracy_is_the_unweighted_mean_over_clients_with_test_samples() -> None:
    table = np.array([[0.1, 0.5, 1.0, 1.0], [np.nan, np.nan, 3.0, 0.0], [0.1, 0.7, np.nan, np.nan]])
    figures = summarize(table[:2, 2:], table[[0, 2], 1], METRICS["accuracy"])
    assert figures["accuracy"] == 0.5
    assert figures["accuracy_std"] == 0.5
    assert figures["loss_variance"] == 1.0
    assert figures["worst_decile"] == 0.0
    assert figures["validation_accuracy"] == pytest.approx(0.6)


def test_worst_decile_is_the_highest_for_errors() -> None:
    table = np.zeros((20, 4))
    table[:, 3] = np.arange(20)
    assert summarize(table[:, 2:], table[:, 1], METRICS["rmse"])["worst_decile"] == 18.5
    assert summarize(table[:, 2:], table[:, 1], METRICS["accuracy"])["worst_decile"] == 0.5


def test_regression_is_scored_by_rmse() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 3)), rng.normal(size=20)) for _ in range(3)]
    run = simulation(Local(lr=0.01), from_clients(clients), linear_module(), loss="squared", participation=1.0)
    run.run()
    x, y = run.federation.gather(torch.from_numpy(run.federation.test[1]))
    with torch.no_grad():
        error = (Result(run).personal(1)(x).squeeze(1) - y).square().mean().sqrt().item()
    assert run.scores.training.board().tables()["personal"][1, 3] == pytest.approx(error, rel=1e-9)
    assert "rmse" in run.summary()["personal"]


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return BodyAndHead(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 3))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_survive_a_resume(buffers, tmp_path) -> None:
    settings = {"module": batch_norm(), "participation": 3, "rounds": 6, "checkpoint_every": 3, "mode": "auto"}
    federation = from_clients(
        [(np.random.default_rng(i).normal(size=(30, 5)) + i, np.arange(30) % 3) for i in range(5)]
    )
    algorithm = FedAvg(lr=0.05, batch=7, buffers=buffers)
    run = simulation(algorithm, federation, folder=tmp_path / "run", **settings)
    assert run.mode == "threads"  # statistics differ by client, so clients are not stacked
    run.run()
    means = [run.store.get(i)["buffers"][:6] for i in range(5)]
    assert (means[4] - means[0]).abs().max() > 0.1  # each client's own
    assert ("buffers" in run.schema.up) == (buffers == "average")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "run" / "checkpoint").glob("*000006*"):
        path.unlink()
    again = simulation(algorithm, federation, folder=tmp_path / "run", new=False, **settings)
    again.resume()
    assert again.done == 3
    again.run()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


class FunctionalDropout(nn.Module):
    """Draws from torch's global stream, where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("make", [lambda: BodyAndHead(nn.Dropout(0.5), nn.Linear(5, 3)), FunctionalDropout])
def test_dropout_comes_from_the_seed_whatever_the_threads(make, tmp_path) -> None:
    torch.manual_seed(0)
    module = make()
    lines = []
    for workers in (1, 2, 2):
        torch.manual_seed(workers)
        run = simulation(Ditto(**COMMON), module=module, workers=workers, mode="auto", participation=1.0)
        assert run.mode == "threads"
        run.run()
        lines.append(run.lines)
    assert lines[0] == lines[1] == lines[2]


def test_what_cannot_be_stacked_is_said() -> None:
    for module, why in ((BodyAndHead(nn.Dropout(0.5), nn.Linear(5, 3)), "dropout"), (batch_norm(), "buffers")):
        with pytest.raises(EquipoiseError, match=f"'stacked' is not possible here, because .*{why}.*; use 'threads'"):
            simulation(Local(**COMMON), module=module, mode="stacked")


def test_dropout_is_at_work_in_training_and_off_in_scoring() -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 3)
    with_dropout, without = (
        simulation(Local(**COMMON), module=BodyAndHead(body, head), participation=1.0)
        for body in (nn.Dropout(0.5), nn.Identity())
    )
    with_dropout.run()
    without.run()
    assert not torch.equal(with_dropout.store.get(0).v, without.store.get(0).v)
    result = Result(with_dropout)
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(result.personal(0)(x), result.personal(0)(x))

"""Models and data that are out of the ordinary, each of which once went wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.data.federation import from_clients
from equipoise.executors.stacked_trainer import StackWorker
from equipoise.models.base import BodyAndHead
from tests.support.odd_models import CLIENTS, module
from tests.support.problems import classification, simulation

NUMBERS = [(x, x @ np.ones(4, "float32")) for x, _ in CLIENTS]


@pytest.mark.parametrize("higher", [True, False])
def test_a_metric_of_ones_own_says_which_way_is_better(higher: bool) -> None:
    mae = eq.Metric("mae", lambda o, t: (o.squeeze(-1) - t).abs(), higher_is_better=higher)
    algorithm = eq.Ditto(lr=0.05, batch=5, lam=0.01)
    result = eq.train(module(1), NUMBERS, algorithm, head=None, loss="squared", metric=mae, rounds=8)
    worst, best = (result.summary["personal"][f"{which}_decile"] for which in ("worst", "best"))
    assert worst < best if higher else worst > best
    assert "mae" in result.summary["hybrid"]
    with pytest.raises(eq.EquipoiseError, match="higher_is_better"):
        eq.train(module(1), NUMBERS, algorithm, head=None, loss="squared", metric=mae.function, rounds=1)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_frozen_parameters_stay(mode: str) -> None:
    given = module()
    given[0].requires_grad_(False)
    result = eq.train(given, CLIENTS, eq.Ditto(lr=0.1, batch=5), head=None, rounds=2, mode=mode)
    assert result.summary["parameters_shared"] == 18
    for trained in (result.personal(0), result.global_model()):
        assert torch.equal(trained[0].weight, given[0].weight)
        assert not torch.equal(trained[2].weight, given[2].weight)


class Moody(nn.Module):
    """Another function in training than in use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(2 * x if self.training else x)


class Choosy(nn.Module):
    """Decides by its data, which cannot be batched over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if x.sum() > 0 else -self.head(x)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x).tanh())))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, :1].reshape(-1, 1, 1, 1) * torch.ones(3, 3, dtype=x.dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Moody, Tied, Images])
def test_odd_models_are_the_same_stacked_and_threaded(make: type) -> None:
    torch.manual_seed(0)
    given = make()
    runs = [simulation(eq.FedRep(lr=0.05, batch=4), module=given, mode=mode) for mode in ("threads", "stacked")]
    for run in runs:
        run.run()
    torch.testing.assert_close(runs[0].server.phi, runs[1].server.phi, rtol=1e-9, atol=1e-11)
    one, two = (run.scores.training.board().tables()["personal"] for run in runs)
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


def test_what_cannot_be_batched_is_left_to_threads() -> None:
    run = simulation(eq.FedAvg(lr=0.05, batch=4), module=Choosy(), mode="auto")
    assert run.mode == "threads"
    run.run()


def test_one_clients_bad_sample_does_not_reach_another_through_the_padding() -> None:
    parts = [(x.copy(), y) for x, y in CLIENTS]
    parts[0][0][:] = np.nan
    for mode in ("threads", "stacked"):
        run = simulation(eq.FedAvg(batch=7), from_clients(parts), module(), head=None, participation=1.0, mode=mode)
        run.run()
        assert [line["left_out"] for line in run.lines] == [1] * 4


def test_a_client_that_is_done_stands_still_whatever_its_padding_does() -> None:
    """Client 0 has one step. What overflows in the padding of later steps must not reach it."""
    run = simulation(eq.Local(lr=0.05, batch=4), mode="stacked")
    work = run.executor._trainer(StackWorker(run.executor.module), 1, [steps_job(i) for i in (0, 5)], "batches")
    step, taken = work.step, []

    def overflowing(v: torch.Tensor, *others: object) -> None:
        step(v, *others)
        taken.append(v[0].clone())
        if len(taken) > 1:
            v[0] = torch.nan

    work.step = overflowing
    with torch.no_grad():
        end = work.descend(run.task.w0.expand(2, -1), epochs=1)
    run.close()
    assert len(taken) > 1
    assert torch.equal(end[0], taken[0])
    assert not torch.equal(end[0], run.task.w0)


def steps_job(who: int):
    from equipoise.executors.base import ClientJob

    return ClientJob(who, eq.State(), eq.State())


def test_names_of_any_kind_are_the_same_names() -> None:
    names = ["a", "b", "c", "d"]
    kinds = (names, np.array(names))
    runs = [eq.train(module(), CLIENTS, eq.FedAvg(), head=None, rounds=2, names=kind) for kind in kinds]
    assert runs[0].metrics == runs[1].metrics
    assert eq.train(module(), CLIENTS, eq.FedAvg(), head=None, rounds=1, names=[3, "x", 2, 0]).clients[0] == "3"


class Masked(nn.Module):
    """A constant with infinities, and a large whole number, that no training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
        self.register_buffer("number", torch.tensor(16777217))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.mask.clamp(min=-1e4)


def test_constant_buffers_are_no_clients_business() -> None:
    result = eq.train(Masked(), CLIENTS, eq.Ditto(), head=None, rounds=2)
    assert result.summary["mode"] == "stacked"
    assert result.summary["left_out"] == 0
    assert result.personal(0).number.item() == 16777217
    assert torch.isinf(result.global_model().mask[2])


def test_the_global_model_with_buffers_is_some_clients() -> None:
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    result = eq.train(given, CLIENTS, eq.FedAvg(lr=0.1, batch=4, buffers="local"), head=None, rounds=3)
    with pytest.raises(eq.EquipoiseError, match="name a client to use its buffers"):
        result.global_model()
    federation = result.federation
    x, y = federation.gather(torch.from_numpy(federation.test[1]))
    with torch.no_grad():
        found = (result.global_model(1)(x).argmax(1) == y).float().mean().item()
    assert result.scores()["global"][1, 3] == pytest.approx(found)


def test_a_score_that_is_nan_shows() -> None:
    parts = [{"train": (x, y), "test": (x.copy(), y)} for x, y in NUMBERS]
    parts[2]["test"][0][0] = np.nan
    run = simulation(eq.Local(), from_clients(parts), module(1), head=None, loss="squared", rounds=1)
    run.run()
    result = eq.Result(run)
    assert result.summary["personal"]["rmse"] is None
    assert json.loads(json.dumps(result.metrics, allow_nan=False))
    assert np.isnan(result.scores()["personal"][2, 3])


def test_clients_without_any_test_samples_are_trained_all_the_same(tmp_path: Path) -> None:
    for mode in ("threads", "stacked"):
        parts = [{"train": part} for part in CLIENTS]
        result = eq.train(module(), parts, eq.Ditto(), head=None, rounds=1, mode=mode, out=tmp_path / mode)
        assert result.summary["personal"] == {}


def test_a_pull_may_be_the_vector_itself() -> None:
    run = simulation(eq.Local(lr=0.1, batch=4))

    def ends(pull) -> torch.Tensor:
        work = lambda own, job: run.executor._work(own, 1, job, "batches").descend(run.task.w0, pull=pull)  # noqa: E731
        return next(iter(run.executor.pool.each(work, [steps_job(5)])))

    assert torch.equal(ends(lambda v: v), ends(lambda v: 1.0 * v))
    run.close()


def test_all_is_dropped() -> None:
    run = simulation(eq.FedAvg(lr=0.1), module=BodyAndHead(nn.Dropout(1.0), nn.Linear(5, 3)))
    run.run()
    assert run.counters.left_out == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": NUMBERS}, "cross-entropy' needs classes as whole numbers"),
        ({"module": module(2)}, "there is a label 2, and the model has only 2 outputs; it needs 3"),
        ({"clients": NUMBERS, "loss": "squared"}, "the model gives 3 numbers per sample and the targets have 1"),
        ({"split": (0.5, 0.1, 0.1)}, "must be three fractions"),
        ({"split": (0.8, 0.2)}, "must be three fractions"),
        (
            {"algorithm": eq.FedRep(), "head": "head"},
            "FedRep needs to know the model's head; name the submodule",
        ),
        ({"rounds": 0}, "rounds = 0 is not allowed; it must be a whole number >= 1"),
        ({"mode": "stack"}, "mode = 'stack' is not allowed; it must be 'auto'"),
        ({"loss": lambda o, t: o @ t}, "the loss fails on outputs"),
    ],
)
def test_mistakes_in_python_get_a_sentence_too(options: dict, message: str) -> None:
    settings = {"module": module(), "clients": CLIENTS, "algorithm": eq.FedAvg(), "head": None, "rounds": 1, **options}
    with pytest.raises(eq.EquipoiseError, match=message):
        eq.train(settings.pop("module"), settings.pop("clients"), settings.pop("algorithm"), **settings)


def test_wrong_settings_of_an_algorithm_get_a_sentence() -> None:
    with pytest.raises(eq.EquipoiseError, match=r"Ditto.lr = -1 is not allowed; it must be a number > 0"):
        eq.Ditto(lr=-1)
    with pytest.raises(eq.EquipoiseError, match=r"unknown setting Ditto.lamb; did you mean 'lam'"):
        eq.Ditto(lamb=1)


class NeverOne(nn.Linear):
    """Fails on a single sample, for reasons of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("one is not enough")
        return super().forward(x)


def test_a_model_that_fails_on_a_batch_is_said() -> None:
    with pytest.raises(eq.EquipoiseError, match="fails on a batch of 1 samples"):
        eq.train(NeverOne(4, 3), CLIENTS, eq.FedAvg(batch=13), head=None, rounds=1, mode="threads")  # 14 = 13 + 1


def test_a_last_batch_of_one_sample_is_dropped_where_batch_norm_cannot_train_on_it() -> None:
    given = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    result = eq.train(given, CLIENTS, eq.FedAvg(batch=13), head=None, rounds=1)  # 14 = 13 + 1
    sizes = result.federation.train.lengths
    assert 14 in sizes
    assert result.summary["gradient_samples"] == sum(n - (n % 13 == 1) for n in sizes)
    with pytest.raises(eq.EquipoiseError, match=r"algorithm.batch = 1 is not allowed: the model has BatchNorm"):
        eq.train(given, CLIENTS, eq.FedAvg(batch=1), head=None, rounds=1)
    x, y = CLIENTS[0]
    poor = {"train": (x[:1], y[:1]), "test": (x, y)}
    with pytest.raises(eq.EquipoiseError, match="client 'client-1' has one training sample, and the model has Batch"):
        eq.train(given, [CLIENTS[0], poor], eq.FedAvg(), head=None, rounds=1)


def test_from_clients_checks_before_it_trains() -> None:
    federation = from_clients(CLIENTS)
    assert federation.fingerprint() != from_clients(CLIENTS[:3]).fingerprint()
    assert classification().fingerprint(splits=True) != classification().fingerprint()

"""Schedules of learning rates, against closed forms and torch's own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.errors import EquipoiseError
from equipoise.optimizers import RateSchedule
from equipoise.settings import read
from tests.support.problems import simulation

ROUNDS = 25


def factors(schedule: RateSchedule, rounds: int = ROUNDS) -> list[float]:
    return [schedule.factor(round, rounds) for round in range(1, rounds + 1)]


def of_torch(make: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_they_are_torchs() -> None:
    of = torch.optim.lr_scheduler
    pairs = [
        (RateSchedule(), lambda o: of.ConstantLR(o, factor=1.0)),
        (RateSchedule(kind="step", every=4, ratio=0.5), lambda o: of.StepLR(o, 4, 0.5)),
        (RateSchedule(kind="exponential", ratio=0.9), lambda o: of.ExponentialLR(o, 0.9)),
        (RateSchedule(kind="cosine", final=0.1), lambda o: of.CosineAnnealingLR(o, ROUNDS - 1, 0.1)),
    ]
    for ours, theirs in pairs:
        assert factors(ours) == pytest.approx(of_torch(theirs), rel=1e-12)


@given(st.sampled_from(["constant", "step", "exponential", "cosine"]), st.integers(0, 10), st.integers(1, 30))
def test_warm_up_comes_before_any_of_them(kind: str, warmup: int, rounds: int) -> None:
    with_it = factors(RateSchedule(kind=kind, warmup=warmup), rounds)
    without = factors(RateSchedule(kind=kind), max(rounds - warmup, 1))
    assert with_it[:warmup] == [k / warmup for k in range(1, warmup + 1)][:rounds]
    assert with_it[warmup:] == pytest.approx(without[: max(rounds - warmup, 0)])
    assert all(0 <= f <= 1 for f in with_it)


def test_a_setting_is_a_kind_a_table_or_a_function() -> None:
    assert eq.FedAvg(schedule="cosine").schedule == RateSchedule(kind="cosine")
    assert eq.FedAvg(schedule={"kind": "step", "every": 3}).schedule.every == 3
    own = eq.FedAvg(schedule=lambda round, rounds: round / rounds)
    assert factors(own.schedule, 4) == [0.25, 0.5, 0.75, 1.0]
    table = eq.FedAvg(schedule={"kind": "step", "every": 3, "warmup": 2}).table()["schedule"]
    assert table == {"kind": "step", "warmup": 2, "every": 3, "ratio": 0.1}
    assert read(eq.FedAvg, {"schedule": table}, "algorithm").schedule.warmup == 2


def test_a_function_may_be_named_by_its_place(tmp_path) -> None:
    file = tmp_path / "rates.py"
    file.write_text("def falling(round, rounds):\n    return 1 / round\nnumber = 3\n")
    algorithm = read(eq.FedAvg, {"schedule": f"{file}:falling"}, "algorithm")
    assert factors(algorithm.schedule, 3) == [1, 1 / 2, 1 / 3]
    assert algorithm.table()["schedule"] == {"kind": "function", "warmup": 0, "function": f"{file}:falling"}
    assert read(eq.FedAvg, algorithm.table(), "algorithm").schedule.factor(4, 9) == 1 / 4
    with pytest.raises(EquipoiseError, match=r"algorithm.schedule.function = .*:number' is not a function"):
        read(eq.FedAvg, {"schedule": f"{file}:number"}, "algorithm")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": "cosin"}, "algorithm.schedule.kind = 'cosin' is not allowed; it must be 'constant', 'step'"),
        ({"schedule": {"kind": "step", "evry": 3}}, "unknown setting algorithm.schedule.evry; did you mean 'every'?"),
        ({"schedule": 3}, "algorithm.schedule = 3 is not allowed; it must be 'constant', 'step', .* or a table"),
        ({"schedule": {"kind": "step", "ratio": 0.0}}, "algorithm.schedule.ratio = 0.0 is not allowed"),
        ({"nesterov": True}, "algorithm.nesterov = true needs algorithm.optimizer = 'sgd' and algorithm.momentum > 0"),
        ({"weight_decay": -1.0}, "algorithm.weight_decay = -1.0 is not allowed; it must be a number >= 0"),
    ],
)
def test_mistakes_get_a_sentence(settings: dict, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        read(eq.FedAvg, settings, "algorithm")


def test_a_function_that_returns_nonsense_is_stopped() -> None:
    with pytest.raises(EquipoiseError, match="returns nan for round 1; a factor must be 0 or more"):
        simulation(eq.FedAvg(schedule=lambda round, rounds: math.nan)).run()


def test_the_rate_of_every_round_is_logged() -> None:
    run = simulation(eq.FedAvg(lr=0.2, batch=4, schedule={"kind": "exponential", "ratio": 0.5}), rounds=3)
    run.run()
    assert [line["lr"] for line in run.lines] == [0.2, 0.1, 0.05]


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (lambda round, rounds: None, "fails for round 1 of 4: TypeError"),
        (lambda round, rounds: 1 / (round - 2) ** 2, "fails for round 2 of 4: ZeroDivisionError"),
        (lambda round: 1.0, "fails for round 1 of 4: TypeError"),
    ],
)
def test_a_function_that_fails_is_told_before_the_first_round(schedule: object, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        simulation(eq.FedAvg(schedule=schedule))


def test_a_run_that_is_extended_is_told_that_its_rates_change(tmp_path) -> None:
    options = {"clients": [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(2)], "out": tmp_path / "run"}
    module = torch.nn.Linear(3, 2)
    eq.train(module, algorithm=eq.FedAvg(schedule="cosine"), rounds=2, head=None, **options)
    with pytest.warns(eq.RunWarning, match="which was 2 and is now 4"):
        eq.train(module, algorithm=eq.FedAvg(schedule="cosine"), rounds=4, head=None, resume=True, **options)


def test_adapting_needs_no_schedule(tmp_path) -> None:
    clients = {name: (torch.randn(20, 3), torch.arange(20) % 2) for name in "ab"}
    algorithm = eq.FedAvgFT(schedule=lambda round, rounds: 0.5)
    eq.train(torch.nn.Linear(3, 2), clients, algorithm, rounds=1, head=None, out=tmp_path / "run")
    loaded = eq.load_result(tmp_path / "run", torch.nn.Linear(3, 2))
    assert loaded.adapt({"c": clients["a"]}).summary["personal"]

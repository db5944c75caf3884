"""Optimizers of the server, against closed forms and limits."""

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.errors import EquipoiseError
from equipoise.optimizers.server_optimizer import Memory, ServerOptimizer


def random(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(count)]


def after(optimizer: ServerOptimizer, x: Tensor, deltas: list[Tensor]) -> Tensor:
    memory: Memory = {}
    for delta in deltas:
        x, memory = optimizer.step(x, x + delta, memory)
    return x


def test_without_momentum_at_rate_one_it_is_the_mean_itself() -> None:
    x, mean = random(2)
    found, memory = ServerOptimizer(kind="sgd", lr=1.0, beta1=0.0).step(x, mean, {})
    assert found is mean
    assert not memory


def test_momentum_after_two_rounds() -> None:
    x, one, two = random(3)
    found = after(ServerOptimizer(kind="sgd", lr=0.3, beta1=0.8), x, [one, two])
    torch.testing.assert_close(found, x + 0.3 * ((1 + 0.8) * one + two), rtol=1e-12, atol=1e-12)
    found = after(ServerOptimizer(kind="sgd", lr=0.3, beta1=0.8, nesterov=True), x, [one, two])
    looked_ahead = (one + 0.8 * one) + (two + 0.8 * (0.8 * one + two))
    torch.testing.assert_close(found, x + 0.3 * looked_ahead, rtol=1e-12, atol=1e-12)


def test_it_is_torchs_sgd_on_the_negative_change() -> None:
    x, *deltas = random(5)
    parameter = x.clone().requires_grad_()
    theirs = torch.optim.SGD([parameter], lr=0.2, momentum=0.7, nesterov=True)
    for delta in deltas:
        parameter.grad = -delta
        theirs.step()
    ours = after(ServerOptimizer(kind="sgd", lr=0.2, beta1=0.7, nesterov=True), x, deltas)
    torch.testing.assert_close(ours, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_adagrad_is_torchs() -> None:
    x, *deltas = random(5)
    parameter = x.clone().requires_grad_()
    theirs = torch.optim.Adagrad([parameter], lr=0.2, initial_accumulator_value=0.3, eps=0.01)
    for delta in deltas:
        parameter.grad = -delta
        theirs.step()
    ours = after(ServerOptimizer(kind="adagrad", lr=0.2, tau=0.01, v0=0.3), x, deltas)
    torch.testing.assert_close(ours, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_the_first_steps_of_yogi_and_adam_from_zero_are_equal_and_the_second_are_not() -> None:
    x, *deltas = random(3)
    adam, yogi = (ServerOptimizer(kind=kind, v0=0.0) for kind in ("adam", "yogi"))
    torch.testing.assert_close(after(adam, x, deltas[:1]), after(yogi, x, deltas[:1]), rtol=1e-12, atol=0)
    assert not torch.allclose(after(adam, x, deltas), after(yogi, x, deltas))
    assert torch.allclose(adam.step(x, x + deltas[0], {})[1]["v"], 0.01 * deltas[0].square())


def test_adam_without_memory_moves_by_signs() -> None:
    x, delta = random(2)
    found = after(ServerOptimizer(kind="adam", lr=0.1, beta1=0.0, beta2=0.0, v0=0.0, tau=1e-12), x, [delta])
    torch.testing.assert_close(found, x + 0.1 * delta.sign(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_where_nothing_is_adaptive_it_is_sgd(kind: str) -> None:
    x, *deltas = random(4)
    tau = 1e8
    found = after(ServerOptimizer(kind=kind, lr=0.4 * tau, beta1=0.0, tau=tau, v0=0.0), x, deltas)
    torch.testing.assert_close(found, x + 0.4 * sum(deltas), rtol=1e-6, atol=1e-6)


def test_v_begins_at_the_square_of_tau() -> None:
    x, delta = random(2)
    _, memory = ServerOptimizer(kind="adagrad", tau=0.5).step(x, x + delta, {})
    torch.testing.assert_close(memory["v"], 0.25 + delta.square())


def test_a_setting_is_a_kind_or_a_table_and_shows_every_default() -> None:
    assert eq.FedAvg(server_optimizer="none").table() == eq.FedAvg().table()
    assert "server_optimizer" not in eq.FedAvg().table()
    table = eq.FedAvg(server_optimizer="yogi").table()["server_optimizer"]
    assert table == {"kind": "yogi", "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "v0": 1e-6}
    assert eq.FedAvg(server_optimizer=table).table()["server_optimizer"] == table
    momentum = eq.FedAvg(server_optimizer="sgd").table()["server_optimizer"]
    assert momentum == {"kind": "sgd", "lr": 1.0, "beta1": 0.9, "nesterov": False}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"kind": "sgd", "tau": 0.1}, r"algorithm.server_optimizer.tau has no effect with the kind 'sgd'"),
        ({"kind": "adam", "nesterov": True}, r"algorithm.server_optimizer.nesterov has no effect with the kind 'adam'"),
        ({"kind": "sgd", "beta1": 0.0, "nesterov": True}, r"nesterov = true needs .*beta1 > 0"),
        ({"kind": "lamb"}, r"algorithm.server_optimizer.kind = 'lamb' is not allowed; it must be 'sgd', 'adagrad'"),
        ("lamb", r"algorithm.server_optimizer.kind = 'lamb' is not allowed"),
        (3, r"server_optimizer = 3 is not allowed; it must be 'none', 'sgd'"),
    ],
)
def test_bad_settings_are_sentences(value: object, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        eq.FedAvg(server_optimizer=value)


@pytest.mark.parametrize("name", ["local", "fedadmm", "feddyn", "fedproto", "fedamp", "least-squares"])
def test_methods_without_a_mean_refuse_it(name: str) -> None:
    with pytest.raises(EquipoiseError, match=r"server_optimizer is not possible with \w+, whose server does not"):
        eq.ALGORITHMS[name](server_optimizer="adam")

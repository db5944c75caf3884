"""Canaries: what they hear is close to what the accountant says, and more wherever the engine or the accountant err."""

from typing import Any

import pytest

from equipoise.engine.canaries import CanaryRun, run_canaries
from equipoise.privacy import mechanisms
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Noise, Privacy, clip, gaussian
from equipoise.state import State

SLOW = [pytest.param(where, True, marks=pytest.mark.slow) for where in ("local", "central")]
WAYS = [("local", False), ("central", False), *SLOW]
EPSILON, ROUNDS = 8.0, 3


def heard(where: str = "local", last: bool = False, **more: Any) -> CanaryRun:
    privacy = Privacy(clip=0.5, target_epsilon=EPSILON, where=where)
    sigma = privacy.noise(ReleaseCount(ROUNDS))
    return run_canaries(privacy, sigma, ROUNDS, seed=5, last=last, canaries=300, **more)


@pytest.mark.parametrize(("where", "last"), WAYS)
def test_the_noise_of_the_engine_is_worth_what_the_accountant_says(where: str, last: bool) -> None:
    found = heard(where, last)
    assert found.guarantee["epsilon_run"] == pytest.approx(EPSILON)
    assert found.guarantee["releases"] == ROUNDS
    bound = found.bound(0.95)
    assert 0.5 * EPSILON < bound.gaussian_epsilon <= EPSILON
    assert 0 < bound.epsilon <= EPSILON


@pytest.mark.parametrize(("where", "last"), WAYS)
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_noise_that_is_halved_or_switched_off_is_noticed(
    where: str, last: bool, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gaussian.__call__

    def less(self: gaussian, message: State, noise: Noise) -> State:
        return honest(gaussian(left * self.sigma), message, noise)

    monkeypatch.setattr(gaussian, "__call__", less)
    found = heard(where, last)
    assert found.guarantee["epsilon_run"] == pytest.approx(EPSILON)
    assert found.bound(0.95).gaussian_epsilon > EPSILON


def test_messages_that_are_not_clipped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms.clip, "__call__", lambda self, message, noise=None: message)
    assert clip(1.0)(State()) == State()
    assert heard().bound(0.95).gaussian_epsilon > EPSILON


@pytest.mark.parametrize("where", ["local", "central"])
def test_an_accountant_that_takes_the_sensitivity_for_half_of_what_it_is_is_noticed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ReleaseCount.epsilon
    privacy = Privacy(clip=0.5, sigma=1.0, where=where)
    monkeypatch.setattr(ReleaseCount, "epsilon", lambda self, z, delta: right(self, 2 * z, delta))
    found = run_canaries(privacy, 1.0, ROUNDS, seed=5, canaries=300)
    assert found.bound(0.95).gaussian_epsilon > found.guarantee["epsilon_run"]


def test_the_strict_bound_notices_the_lack_of_noise_too(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = Privacy(clip=0.5, target_epsilon=1.0)
    sigma = privacy.noise(ReleaseCount(ROUNDS))
    monkeypatch.setattr(gaussian, "__call__", lambda self, message, noise: message)
    found = run_canaries(privacy, sigma, ROUNDS, seed=5, canaries=300)
    assert found.bound(0.95).epsilon > 2 * found.guarantee["epsilon_run"]


@pytest.mark.slow
def test_secret_cohorts_hide_more_than_those_that_everyone_is_in() -> None:
    everyone, sampled = heard("central"), heard("central", participation=0.3)
    assert sampled.guarantee["epsilon_run"] < everyone.guarantee["epsilon_run"]
    assert sampled.scores.auc < everyone.scores.auc
    assert sampled.bound(0.95).epsilon <= sampled.guarantee["epsilon_run"]

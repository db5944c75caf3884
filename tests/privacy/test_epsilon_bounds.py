"""Empirical bounds of epsilon: against closed forms, and against the accountant, which they do not use."""

import numpy as np
import pytest
from scipy.stats import binom, norm

from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.epsilon_bounds import (
    epsilon_bound,
    epsilon_of_distance,
    least_distances,
    least_epsilons,
    upper_limits,
)
from equipoise.privacy.membership import MembershipScores, each_against_others, likelihood_ratios


def test_with_the_upper_limit_so_few_hits_have_the_stated_probability() -> None:
    hits = np.array([0, 1, 7, 19])
    np.testing.assert_allclose(binom.cdf(hits, 20, upper_limits(hits, 20, 0.03)), 0.03, rtol=1e-9)
    assert upper_limits(np.array([20]), 20, 0.03) == 1.0


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.2, 1e-5), (3.0, 1e-3)])
def test_the_best_attack_on_gaussian_noise_has_the_epsilon_of_the_accountant(mu: float, delta: float) -> None:
    thresholds = np.linspace(-10, 14, 200_001)
    false, missed = norm.sf(thresholds), norm.cdf(thresholds - mu)
    accounted = ReleaseCount(1).epsilon(1 / mu, delta)
    assert least_epsilons(false, missed, delta).max() == pytest.approx(accounted, rel=1e-3)
    assert epsilon_of_distance(mu, delta) == pytest.approx(accounted, rel=1e-6)
    inside = np.abs(thresholds) < 3
    np.testing.assert_allclose(least_distances(false, missed)[inside], mu, rtol=1e-8)


def test_nothing_is_learned_from_errors_of_a_coin() -> None:
    assert epsilon_of_distance(0.0, 1e-5) == 0
    rates = np.linspace(0.01, 0.99, 9)
    np.testing.assert_allclose(least_epsilons(rates, 1 - rates, 1e-5), 0)
    np.testing.assert_allclose(least_distances(rates, 1 - rates), 0, atol=1e-12)


def test_a_bound_is_wrong_no_more_often_than_it_says() -> None:
    """Scores of members and others come from one distribution, so every bound above zero is wrong."""
    wrong = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores = MembershipScores(rng.normal(size=60), rng.normal(size=60))
        wrong += epsilon_bound(scores, 1e-5, 0.9, rng).epsilon > 0
    assert wrong <= 10


def test_figures_are_those_of_counting_pairs_and_thresholds() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 40) + 2.0, rng.integers(0, 9, 30) * 1.0  # with many equal scores
    scores = MembershipScores(members, others)
    above, equal = members[:, None] > others, members[:, None] == others
    assert scores.auc == pytest.approx((above + equal / 2).mean())
    rates = [((others >= t).mean(), (members >= t).mean()) for t in range(12)]
    assert scores.advantage == pytest.approx(max(true - false for false, true in rates))
    for rate in (0.0, 0.1, 0.5):
        assert scores.true_positives_at(rate) == max(true for false, true in rates if false <= rate)


@pytest.mark.parametrize("runs", [6, 64])
def test_likelihood_ratios_are_those_of_the_fitted_normal_distributions(runs: int) -> None:
    rng = np.random.default_rng(1)
    inside = rng.permuted(np.tile([True, False], (5, runs // 2)), axis=1).T
    shadows = rng.normal(size=(runs, 5)) * [1, 2, 3, 1, 2] + np.where(inside, 1.5, 0)
    observed = rng.normal(size=5)
    expected = []
    for k in range(5):
        logs = []
        for there in (inside, ~inside):
            apart = [shadows[there[:, j], j] - shadows[there[:, j], j].mean() for j in range(5)]
            own = apart[k] if runs >= 64 else np.concatenate(apart)
            freedom = len(own) - (1 if runs >= 64 else 5)
            mean = shadows[there[:, k], k].mean()
            logs.append(norm.logpdf(observed[k], mean, np.sqrt((own**2).sum() / freedom)))
        expected.append(logs[0] - logs[1])
    np.testing.assert_allclose(likelihood_ratios(observed, shadows, inside), expected, rtol=1e-10)


def test_each_run_is_attacked_with_the_others_alone() -> None:
    rng = np.random.default_rng(2)
    inside = np.array([[True, False], [False, True]] * 3)
    values = rng.normal(size=(6, 2))
    found = each_against_others(values, inside)
    rest = np.arange(6) != 4
    expected = likelihood_ratios(values[4], values[rest], inside[rest])
    assert expected[0] in found.members
    assert expected[1] in found.others
    assert len(found.members) == len(found.others) == 6

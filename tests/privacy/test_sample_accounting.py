"""Sample-level accounting: equal to closed forms where there are any, and to dp-accounting's figures elsewhere."""

import math

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.sample_accounting import NoisedStep, SampleReleases


@given(st.integers(1, 40), st.integers(1, 5), st.floats(0.5, 30))
@settings(max_examples=30)
def test_steps_whose_batches_are_known_compose_exactly(steps: int, gradients: int, z: float) -> None:
    found = SampleReleases({NoisedStep(1.0, gradients): steps})
    assert found.epsilon(z, 1e-5) == ReleaseCount(steps * gradients).epsilon(z, 1e-5)
    assert found.noise(3.0, 1e-5) == pytest.approx(ReleaseCount(steps * gradients).noise(3.0, 1e-5))


def test_poisson_sampling_is_accounted_for_as_by_dp_accounting() -> None:
    rate, steps, z = 0.05, 100, 1.5
    reference = dp.pld.PLDAccountant(value_discretization_interval=1e-4)
    reference.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)
    found = SampleReleases({NoisedStep(rate): steps}).epsilon(z, 1e-5)
    assert found == pytest.approx(reference.get_epsilon(1e-5), rel=2e-3)
    renyi = dp.rdp.RdpAccountant()
    renyi.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)
    assert found < renyi.get_epsilon(1e-5)  # which is a looser bound


def test_abadi_et_al() -> None:
    # Sec. 3: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5 give 1.26; what is known since makes it less.
    assert 0.9 < SampleReleases({NoisedStep(0.01): 10_000}).epsilon(4.0, 1e-5) < 1.26


def test_several_gradients_of_one_draw_are_one_mechanism_and_not_several_draws() -> None:
    one_draw = SampleReleases({NoisedStep(0.1, 4): 25}).epsilon(2.0, 1e-5)
    assert one_draw == pytest.approx(SampleReleases({NoisedStep(0.1): 25}).epsilon(1.0, 1e-5), rel=1e-2)
    assert one_draw > SampleReleases({NoisedStep(0.1): 100}).epsilon(2.0, 1e-5)


def test_the_noise_for_a_target_meets_it_and_little_less_does_not() -> None:
    steps = SampleReleases({NoisedStep(0.1): 5}) + SampleReleases({NoisedStep(1.0): 1})
    z = steps.noise(2.0, 1e-5)
    assert steps.epsilon(z, 1e-5) <= 2.0 < steps.epsilon(0.99 * z, 1e-5)


def test_sampling_never_costs_more_than_no_secret() -> None:
    for z in (1e-5, 5.0):
        assert SampleReleases({NoisedStep(0.9): 20}).epsilon(z, 1e-5) <= ReleaseCount(20).epsilon(z, 1e-5)


def test_nothing_released_reveals_nothing() -> None:
    assert SampleReleases().epsilon(0.0, 1e-5) == SampleReleases().noise(1.0, 1e-5) == 0
    assert SampleReleases({NoisedStep(0.1): 3}).times(0) == SampleReleases()
    assert SampleReleases({NoisedStep(0.1): 3}).epsilon(0.0, 1e-5) == math.inf
    assert SampleReleases({NoisedStep(0.1, 2): 3}).times(2).gaussians == 12

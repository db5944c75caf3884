"""Correlated noise: it is C^-1 z, and hides a client as the sensitivity of C says."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from equipoise.algorithms import FedAvg, Flame, Learn2pFed
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.correlated_noise import (
    CorrelatedReleases,
    best_bands,
    error_of_sums,
    inverse,
    next_noise,
    sensitivity,
    square_root,
)
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import Mean
from equipoise.state import RoundUploads, State, Upload
from tests.support.problems import simulation


def matrix(c: tuple[float, ...], rounds: int) -> np.ndarray:
    """C itself."""
    column = np.zeros(rounds)
    column[: min(len(c), rounds)] = c[:rounds]
    return np.tril(toeplitz(column))


def test_the_coefficients_are_those_of_the_root_of_the_matrix_of_ones() -> None:
    rounds = 9
    root = matrix(square_root(rounds), rounds)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((rounds, rounds))), atol=1e-12)
    assert square_root(4) == pytest.approx([math.comb(2 * k, k) / 4**k for k in range(4)])


@pytest.mark.parametrize("bands", [1, 2, 4, 7])
def test_streamed_noise_is_the_inverse_of_the_matrix_times_independent_noise(bands: int) -> None:
    rounds, c = 7, square_root(bands)
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(rounds, 5)))
    past: tuple[State, ...] = ()
    streamed = []
    for t in range(rounds):
        noise = next_noise(c, State(w=z[t]), past)
        past = (noise, *past)[: bands - 1]
        streamed.append(noise.w)
    np.testing.assert_allclose(torch.stack(streamed), np.linalg.solve(matrix(c, rounds), z), atol=1e-12)
    np.testing.assert_allclose(matrix(c, rounds) @ inverse(c, rounds), np.eye(rounds)[0], atol=1e-12)


@pytest.mark.parametrize(("bands", "apart"), [(1, 1), (3, 3), (4, 2), (6, 1)])
def test_sensitivity_is_what_trying_everything_finds(bands: int, apart: int) -> None:
    """Among all ways to take part with rounds so far apart, and all signs of what is added, none adds more."""
    rounds, c = 6, square_root(bands)
    C = matrix(c, rounds)
    patterns = [
        frozenset(t)
        for k in range(1, rounds + 1)
        for t in itertools.combinations(range(rounds), k)
        if all(b - a >= apart for a, b in itertools.pairwise(t))
    ]
    tried = max(
        np.linalg.norm(C[:, sorted(t)] @ np.array(signs))
        for t in patterns
        for signs in itertools.product((1, -1), repeat=len(t))
    )
    assert sensitivity(c, patterns, rounds) == pytest.approx(tried)
    # The earliest rounds are the worst (Kalinin and Lampert, Th. 2).
    assert sensitivity(c, [frozenset(range(0, rounds, apart))], rounds) == pytest.approx(tried)
    # The first rounds alone reveal no more than all.
    assert sensitivity(c, patterns, 3) <= tried


def test_bands_no_wider_than_the_turns_cost_one_column_each() -> None:
    c = square_root(4)
    turns = frozenset(range(0, 12, 4))
    assert sensitivity(c, [turns], 12) ** 2 == pytest.approx(3 * sum(x**2 for x in c))


def test_error_of_sums_is_that_of_the_factorisation() -> None:
    rounds, c = 8, square_root(3)
    turns = {frozenset(range(first, rounds, 4)) for first in range(4)}
    B = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(c, rounds))
    wanted = (B**2).sum() / rounds * sensitivity(c, turns, rounds) ** 2
    assert error_of_sums(c, turns, rounds) == pytest.approx(wanted)


def test_correlation_pays_in_turns_and_not_where_all_take_part_in_every_round() -> None:
    rounds = 40
    everyone = {frozenset(range(rounds))}
    assert best_bands(everyone, rounds) == 1
    turns = {frozenset(range(first, rounds, 10)) for first in range(10)}
    bands = best_bands(turns, rounds)
    assert bands > 1
    assert error_of_sums(square_root(bands), turns, rounds) < 0.5 * error_of_sums((1.0,), turns, rounds)


def test_one_band_is_independent_noise() -> None:
    all_rounds = frozenset({frozenset(range(5)), frozenset({0, 2})})
    one = CorrelatedReleases((1.0,), all_rounds, 5)
    assert one.epsilon(2.0, 1e-5) == pytest.approx(ReleaseCount(5).epsilon(2.0, 1e-5))
    assert one.noise(2.0, 1e-5) == pytest.approx(ReleaseCount(5).noise(2.0, 1e-5))
    assert CorrelatedReleases((1.0,), all_rounds, 0).epsilon(1.0, 1e-5) == 0


def in_turns(folder: Path | None = None, new: bool = True, **privacy: object) -> Simulation:
    settings = {"clip": 1.0, "sigma": 1.0, "where": "central", "bands": 3, **privacy}
    uploads = UploadSettings(None, Mean(), Privacy(**settings))
    options = {"rounds": 6, "participation": 2, "cohorts": "turns", "checkpoint_every": 2}
    return simulation(FedAvg(lr=0.1), uploads=uploads, folder=folder, new=new, **options)


def test_clients_take_turns() -> None:
    run = in_turns()
    cohorts = [run.sample(round) for round in range(1, 7)]
    run.close()
    assert sorted(who for cohort in cohorts[:3] for who in cohort) == run.training
    assert cohorts[:3] == cohorts[3:]
    assert run.privacy.rounds_until(6) == 2


def test_a_run_with_correlated_noise_resumes_and_reports_its_sensitivity(tmp_path: Path) -> None:
    whole = in_turns(tmp_path / "whole")
    whole.run()
    part = in_turns(tmp_path / "part")
    for _ in range(4):
        part.advance()
    part.close()
    resumed = in_turns(tmp_path / "part", new=False)
    resumed.resume()
    resumed.run()
    assert torch.equal(resumed.server.w, whole.server.w)
    found = whole.summary()["privacy"]
    z = 0.5 / math.sqrt(2 * sum(x**2 for x in square_root(3)))
    assert found["epsilon_run"] == pytest.approx(ReleaseCount(1).epsilon(z, 1e-5))


def test_the_target_is_met_for_the_cohorts_that_are_drawn() -> None:
    run = in_turns(sigma=None, target_epsilon=5.0, bands="auto")
    run.run()
    assert run.summary()["privacy"]["epsilon_run"] == pytest.approx(5.0, rel=1e-6)


def test_independent_noise_in_turns_counts_only_a_clients_own_rounds() -> None:
    run = in_turns(bands=1)
    run.run()
    assert run.summary()["privacy"]["epsilon_run"] == pytest.approx(ReleaseCount(2).epsilon(0.5, 1e-5))


def test_noise_of_sums_of_last_uploads_is_the_sum_of_the_correlated_noise() -> None:
    uploads = UploadSettings(None, Mean(), Privacy(clip=1.0, sigma=1.0, where="central", bands=2))
    run = simulation(Flame(lr=0.1), uploads=uploads, participation=2, cohorts="turns")
    zero = RoundUploads((0,), (Upload(State(u=torch.zeros(4).double())),))
    found = [run.pipeline.noised(zero, last=True).mean().u for _ in range(3)]
    run.close()
    z = torch.stack([run.draw_noise(t, "sum")((4,)) for t in range(3)]).numpy()
    np.testing.assert_allclose(
        torch.stack(found), np.cumsum(np.linalg.solve(matrix(square_root(2), 3), z), axis=0), atol=1e-12
    )


def test_several_exchanges_in_a_round_are_refused() -> None:
    uploads = UploadSettings(None, Mean(), Privacy(clip=1.0, sigma=1.0, where="central", bands=2))
    with pytest.raises(EquipoiseError, match=r"privacy.bands must know all releases beforehand"):
        simulation(Learn2pFed(cells=2), uploads=uploads)

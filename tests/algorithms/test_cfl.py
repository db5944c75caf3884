"""Clustered federated learning: who is parted from whom, and what each group ends with."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import CFL
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from tests.support.problems import linear_module, simulation

RATE = 0.2


def two_kinds(noise: float = 0.0) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Clients 0, 2 and 4 follow one linear law, 1, 3 and 5 the opposite one."""
    rng = np.random.default_rng(0)
    law = np.array([1.0, -2.0, 0.5])
    parts = []
    for i in range(6):
        x = rng.normal(size=(40, 3))
        y = x @ (law if i % 2 == 0 else -law) + noise * rng.normal(size=40)
        parts.append({"train": (x, y), "test": (x, y)})
    return parts


def trained(algorithm: CFL, rounds: int, **options: float) -> Simulation:
    options = {"participation": 1.0, **options}
    federation = from_clients(two_kinds())
    run = simulation(algorithm, federation, linear_module(3), loss="squared", mode="stacked", rounds=rounds, **options)
    run.run()
    return run


@pytest.mark.slow
def test_opposite_clients_are_parted_and_each_kind_reaches_its_own_law() -> None:
    run = trained(CFL(lr=RATE, batch=100, eps1=0.3, eps2=0.4, quiet=5), rounds=120)
    group = run.server.group
    assert group[0] == group[2] == group[4] != group[1] == group[3] == group[5]
    for who in range(6):
        law = np.array([1.0, -2.0, 0.5]) * (1 if who % 2 == 0 else -1)
        np.testing.assert_allclose(run.algorithm.broadcast(run.server, who).w, law, rtol=1e-6)


def test_clients_that_agree_stay_together() -> None:
    """Their mean update is short only when every one of them is."""
    parts = [part for k, part in enumerate(two_kinds(noise=0.1)) if k % 2 == 0]
    algorithm = CFL(lr=RATE, batch=100, eps1=0.3, eps2=0.4, quiet=0)
    run = simulation(algorithm, from_clients(parts), linear_module(3), loss="squared", mode="stacked", rounds=60)
    run.run()
    assert not run.server.group.any()


def test_nobody_is_parted_before_the_quiet_rounds_are_over_or_beyond_the_most_groups() -> None:
    assert not trained(CFL(lr=RATE, batch=100, eps1=10, eps2=1e-9, quiet=9), rounds=9).server.group.any()
    run = trained(CFL(lr=RATE, batch=100, eps1=10, eps2=1e-9, quiet=0, groups=3), rounds=9)
    assert set(run.server.group.tolist()) == {0, 1, 2}


def test_noisy_updates_keep_a_group_together() -> None:
    found = [
        trained(CFL(lr=RATE, batch=100, eps1=10, eps2=1e-9, quiet=0, gamma_max=gamma), rounds=5).server.group
        for gamma in (0.999, 0.9, 0.0)
    ]
    assert [len(group.unique()) for group in found] == [1, 2, 6]  # at 0.9 only what is opposite is worth a split


@settings(max_examples=40)
@given(st.integers(2, 7), st.integers(0, 10_000))
def test_the_split_has_the_smallest_largest_cosine_across(clients: int, seed: int) -> None:
    delta = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, 3)))
    apart = CFL()._apart(delta)
    unit = delta / delta.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T).numpy()

    def across(side: set[int]) -> float:
        return max(cosines[i, j] for i in side for j in range(clients) if j not in side)

    found = across({k for k in range(clients) if apart[k]})
    sides = [set(side) for size in range(1, clients) for side in combinations(range(clients), size)]
    assert np.isclose(found, min(map(across, sides)))


def test_newcomers_get_the_mean_of_all() -> None:
    run = trained(CFL(lr=RATE, batch=100, eps1=0.3, eps2=0.4, quiet=3), rounds=30)
    newcomer = run.algorithm.broadcast(run.server, 99).w
    torch.testing.assert_close(newcomer, run.server.w[run.server.group.long()].mean(0))


@pytest.mark.slow
def test_clients_are_scored_with_their_groups_model_in_any_order_of_names() -> None:
    federation = from_clients(two_kinds(), names=["f", "a", "e", "b", "d", "c"])
    federation = replace(federation, unseen=frozenset({"a"}))
    algorithm = CFL(lr=RATE, batch=100, eps1=0.4, eps2=0.4, quiet=5, adapt_epochs=1)
    run = simulation(algorithm, federation, linear_module(3), loss="squared", rounds=120, participation=1.0)
    run.run()
    assert len(run.server.group.unique()) > 1
    assert run.summary()["personal"]["rmse"] < 1e-6
    assert run.summary()["unseen"]["personal"]["rmse"] > 0.1  # from the mean of both kinds, in one pass

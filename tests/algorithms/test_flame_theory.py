"""FLAME's convergence: Lemmas 1 and 2 in every round, the rate of Theorem 3, and the range of rho that they ask for."""

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import Flame, FlameLpProj
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.models.base import BodyAndHead
from tests.support.problems import FULL, simulation

M, PULL = 4, 0.0087
"""Clients, and lam alpha: with rho = 6 lam alpha and L = lam / 10 all three conditions of the theorems hold."""
LAM, RHO, L, NU = M * PULL, 6 * PULL, 0.1 * M * PULL, 0.7
ROUNDS = 60
BENT = 5.2
"""Largest second derivative of (tanh z - y)^2 over all z, for |y| <= 1."""


@dataclass(frozen=True)
class Smooth:
    """Clients with the losses mean (tanh(x theta) - y)^2, which are not convex, and L-smooth."""

    x: Tensor
    y: Tensor

    def losses(self, theta: Tensor) -> Tensor:
        return (torch.tanh((self.x @ theta[:, :, None])[..., 0]) - self.y).square().mean(1)


@cache
def smooth() -> Smooth:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(M, 24, 3)), np.sign(rng.normal(size=(M, 24)))
    largest = max(np.linalg.eigvalsh(xi.T @ xi / len(xi)).max() for xi in x)
    return Smooth(torch.from_numpy(x * np.sqrt(L / BENT / largest)), torch.from_numpy(y))


def begun(**settings) -> Simulation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = BodyAndHead(nn.Identity(), nn.Sequential(nn.Linear(3, 1, bias=False), nn.Tanh()))
    p = smooth()
    federation = from_clients(
        [{"train": (x, y), "test": (x, y)} for x, y in zip(p.x.numpy(), p.y.numpy(), strict=True)]
    )
    algorithm = Flame(lam=LAM, rho=RHO, **{"lr": 1 / (L + LAM), "batch": FULL, "nu": NU, **settings})
    options = {"participation": 1.0, "evaluate_every": 10**6, "loss": "squared", "mode": "stacked"}
    return simulation(algorithm, federation, module, rounds=10**6, **options)


@dataclass(frozen=True)
class Moment:
    """P^t: all variables after t rounds, with a row per client."""

    theta: Tensor
    w_i: Tensor
    pi: Tensor
    w: Tensor
    epsilon: float

    @staticmethod
    def of(run: Simulation) -> "Moment":
        states = [run.store.get(i) for i in range(M)]
        theta, w_i, pi = (torch.stack([state[name] for state in states]) for name in ("theta", "w_i", "pi"))
        return Moment(theta, w_i, pi, run.server.w, sum(float(state.get("epsilon", 0.0)) for state in states))

    def lagrangian(self) -> Tensor:
        """Eq. 10."""
        gap = self.w_i - self.w
        own = smooth().losses(self.theta) + LAM / 2 * (self.theta - self.w_i).square().sum(1)
        return own.sum() / M + (self.pi * gap).sum() + RHO / 2 * gap.square().sum()

    def gradients(self) -> tuple[Tensor, ...]:
        """Return the derivatives of the Lagrangian with respect to theta, w_i, pi and w."""
        leaves = [t.clone().requires_grad_() for t in (self.theta, self.w_i, self.pi, self.w)]
        return torch.autograd.grad(Moment(*leaves, 0.0).lagrangian(), leaves)

    def squared(self) -> float:
        return sum(float(g.square().sum()) for g in self.gradients())

    def moved(self, later: "Moment") -> float:
        """Return Delta of Lemma 1, summed over clients."""
        total = M * (later.w - self.w).square().sum() + (later.w_i - self.w_i).square().sum()
        return float(total + (later.theta - self.theta).square().sum())


def path(count: int = ROUNDS, **settings) -> list[Moment]:
    run = begun(**settings)
    found = [Moment.of(run)]
    for _ in range(count):
        assert run.advance()
        found.append(Moment.of(run))
    run.close()
    return found


D1 = min(RHO / 2, (PULL + RHO) / 2 - PULL**2 * (1 + RHO) / RHO**2)
D2 = 4 * PULL**2 * (1 + 1 / RHO**2) + 2 * (L**2 + 2 * LAM**2) / M**2 + 2 * RHO**2 + 2
SPARE = PULL**2 * (1 - RHO**2) / RHO**2 - (L / M + RHO) / 2
INEXACT = {"epsilon": 1e-9, "most_epochs": 500}


def lyapunov(moment: Moment) -> float:
    """Eq. 21: what an inexact solution costs is paid by the fall of epsilon."""
    return float(moment.lagrangian()) + NU / (1 - NU) / (4 * SPARE) * moment.epsilon


def test_the_conditions_hold_and_the_losses_are_as_smooth_as_assumed() -> None:
    assert D1 > 0
    assert SPARE > 0
    assert Flame(lam=LAM, rho=RHO).unmet_condition(M) is None
    z, y = torch.linspace(-4, 4, 4001).double(), torch.linspace(-1, 1, 201).double()[:, None]
    t = torch.tanh(z)
    assert (2 * (1 - t**2) ** 2 - 4 * (t - y) * t * (1 - t**2)).abs().max() <= BENT


def test_lemma_2_and_its_parts() -> None:
    """With all clients in every round; one that is absent has a gradient and does not move."""
    found = path(**INEXACT)
    assert found[1].epsilon == pytest.approx(NU * M * INEXACT["epsilon"])
    for now, then in itertools.pairwise(found):
        theta, w_i, pi, w = now.gradients()
        scale = float(pi.abs().max())
        torch.testing.assert_close(w, torch.zeros_like(w), rtol=0, atol=1e-9 * scale)  # (62)
        torch.testing.assert_close(w_i, RHO * (now.w_i - now.w), rtol=1e-9, atol=1e-12 * scale)  # (66)
        dual = RHO * (now.w_i - then.w_i) + then.pi - now.pi  # (67)
        torch.testing.assert_close(w_i, dual, rtol=1e-7, atol=1e-9 * scale)
        moved, copies = (then.theta - now.theta).square().sum(), (then.w_i - now.w_i).square().sum()
        assert theta.square().sum() <= 4 * (L**2 + LAM**2) / M**2 * moved + 2 * then.epsilon  # (64)
        assert w_i.square().sum() <= (2 * RHO**2 + 4 * PULL**2) * copies + 4 * PULL**2 * moved  # (69)
        assert now.squared() <= D2 * (now.moved(then) + then.epsilon)


def test_lemma_1_the_lyapunov_function_falls_by_more_than_what_moved() -> None:
    for settings in (INEXACT, {"steps": 60}):
        found = path(**settings)
        for now, then in itertools.pairwise(found):
            assert lyapunov(now) - lyapunov(then) >= D1 * now.moved(then) - 1e-15
        assert found[0].moved(found[1]) > 100 * found[-2].moved(found[-1]) > 0


def test_theorem_3_squared_gradients_have_a_bounded_sum_where_those_of_sgd_do_not() -> None:
    """So their mean over T rounds falls as 1 / T. SGD with a constant rate does not meet Eq. 17."""
    sums = {}
    for name, settings in (("inexact", INEXACT), ("sgd", {"batch": 1, "epochs": 1})):
        found = path(2 * ROUNDS, **settings)
        squared = [moment.squared() for moment in found[:-1]]
        bound = D2 / D1 * (lyapunov(found[0]) - lyapunov(found[-1])) + D2 * sum(m.epsilon for m in found[1:])
        sums[name] = sum(squared[:ROUNDS]), sum(squared[ROUNDS:]), bound
    first, second, bound = sums["inexact"]
    assert first + second <= bound
    assert second < 0.6 * first
    first, second, bound = sums["sgd"]
    assert second > 0.9 * first
    assert first + second > max(bound, 3 * sums["inexact"][2])


@pytest.mark.parametrize(("lam", "clients"), [(1.0, 10), (1.0, 50), (5.0, 10), (0.02, 4), (30.0, 2)])
def test_the_range_of_rho_begins_where_the_note_says(lam: float, clients: int) -> None:
    text = Flame(lam=lam, rho=lam / clients).unmet_condition(clients)
    assert text is not None
    least = float(text.split("rho >= ")[1].split()[0])
    assert least >= lam / clients
    assert Flame(lam=lam, rho=1.01 * least).unmet_condition(clients) is None
    assert Flame(lam=lam, rho=100 * least).unmet_condition(clients) is None
    assert Flame(lam=lam, rho=0.99 * least).unmet_condition(clients) is not None
    assert FlameLpProj(lam=lam, rho=lam / clients).unmet_condition(clients) is None


def test_table_3_is_outside_the_range() -> None:
    text = Flame(lam=1.0, rho=0.1).unmet_condition(10)
    assert text is not None
    assert "= 1.1 exceeds" in text
    assert "= 0.1 (alpha = 1 / 10)" in text

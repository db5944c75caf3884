"""FLAME's Propositions 2 and 3: what one round under attack comes to on linear regression, against runs of the code.

Also the orderings that they conclude: FLAME (q < 1) below pFedMe and Ditto (q = 1), where their conditions hold and not
where they do not.

Clients have X'X = N b I and y = X theta_i + noise, so that one full step of the right rate solves a local problem.
The propositions halve the mean squared error; the code does not, so that lam, rho and the curvature are doubled here.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from equipoise.algorithms import Ditto, Flame, PFedMe
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import Attack, Gaussian, SameValue, SignFlip
from equipoise.config.engine import Engine, Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import from_clients
from equipoise.engine.client_store import ClientStore
from equipoise.engine.simulation import Simulation
from equipoise.executors.base import ClientJob
from equipoise.training.task import Task
from tests.support.problems import FULL, linear_module

TRIALS = 400


@dataclass(frozen=True)
class Setting:
    m: int = 6
    d: int = 5
    n: int = 20
    b: float = 1.5
    sigma: float = 2.0
    lam: float = 0.9
    rho: float = 0.5
    tau: float = 2.0
    fraction: float = 1 / 3

    @property
    def theta(self) -> np.ndarray:
        """The truth of every client, a row each."""
        return 0.5 * np.random.default_rng(4).normal(size=(self.m, self.d)) + 0.5

    @property
    def q(self) -> float:
        return 2 * self.lam / self.m / (self.lam / self.m + self.rho) * self.b / (self.b + self.lam)

    def designs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(5)
        return [np.linalg.qr(rng.normal(size=(self.n, self.d)))[0] * math.sqrt(self.n * self.b) for _ in range(self.m)]


S = Setting()
PROX = 0.5 / (S.b + S.lam)  # the rate that solves a local problem with its pull in one step
FLAME = Flame(lam=2 * S.lam, rho=2 * S.rho, lr=PROX, steps=1, batch=FULL, adapt_epochs=1)
DITTO = Ditto(lam=2 * S.lam, lr=0.5 / S.b, personal_lr=PROX, steps=1, batch=FULL, adapt_epochs=1)
PFEDME = PFedMe(  # with steps of rate 1 / lam, w_i goes to theta(w_i) again and again: to the local least squares
    lam=2 * S.lam, global_lr=0.5 / S.lam, local_rounds=30, inner_steps=1, lr=PROX, batch=FULL, adapt_epochs=1
)


def trials(
    algorithm: Algorithm,
    attack: Attack | None,
    count: int = TRIALS,
    sigma: float = S.sigma,
    theta: np.ndarray = S.theta,
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Test losses of the global and of every client's personal model, (trials, clients) each, and who is benign."""
    designs = S.designs()
    federation = from_clients([{"train": (x, np.zeros(S.n))} for x in designs])
    task = Task(linear_module(S.d), federation.sample(), loss="squared", dtype=torch.float64)
    run = Simulation(
        task,
        federation,
        algorithm,
        Schedule(rounds=10**6, evaluate_every=10**6),
        Engine(workers=1, precision="float64", mode="stacked"),
        uploads=UploadSettings(attack) if attack else None,
    )
    benign = [i for i in range(S.m) if federation.names[i] not in run.pipeline.malicious]
    clean = torch.from_numpy(np.concatenate([x @ t for x, t in zip(designs, theta, strict=True)]))
    initial, server, heard = run.store.initial, run.server, run.pipeline.last
    rng = torch.Generator().manual_seed(0)
    losses = np.empty((2, count, S.m))
    for trial in range(count):
        run.store, run.server = ClientStore(S.m, initial), server  # all states zero again
        if heard is not None:
            run.pipeline.last = type(heard)(heard.first, heard.clients)
        run.federation.y.copy_(clean + sigma * torch.randn(clean.shape, generator=rng, dtype=torch.float64))
        run.advance()
        w = run.algorithm.global_model(run.server)
        jobs = [ClientJob(i, initial, algorithm.broadcast(run.server, i)) for i in range(S.m)]
        personal = torch.stack([model.vector for model, _ in run.executor.models(1, jobs, "unseen")])
        for k, v in enumerate((w, personal)):
            gaps = (v - torch.from_numpy(theta)).square().sum(1).numpy()
            losses[k, trial] = S.sigma**2 / 2 + S.b / 2 * gaps
    run.close()
    return losses[0], losses[1], benign


def closed_form(q: float, attack: Attack | None, benign: list[int], theta: np.ndarray = S.theta) -> tuple[float, float]:
    """Means over benign clients of the global and of the personal model's test loss."""
    bad = [i for i in range(S.m) if i not in benign]
    m_b, noise = len(benign), S.sigma**2 / (S.b * S.n)
    centre, scatter = q / S.m * theta[benign].sum(0), 0.0
    if isinstance(attack, (SameValue, Gaussian)):
        scatter = len(bad) * S.tau**2 * S.d
    elif isinstance(attack, SignFlip):
        centre = centre - q / S.m * math.sqrt(2 / math.pi) * S.tau * theta[bad].sum(0)
        inner = [(1 - 2 / math.pi) * S.tau**2 * theta[j] @ theta[j] + S.tau**2 * noise * S.d for j in bad]
        scatter = q**2 * sum(inner)
    bias = np.square(centre - theta[benign]).sum(1).mean()
    shared = S.sigma**2 / 2 + S.b / (2 * S.m**2) * (scatter + m_b * q**2 * noise * S.d) + S.b / 2 * bias
    own = (S.b**2 + 2 * S.b * q * S.lam / S.m + m_b * q**2 * S.lam**2 / S.m**2) * noise * S.d
    own += S.lam**2 / S.m**2 * scatter
    outer = S.b / 2 / (S.b + S.lam) ** 2
    return shared, S.sigma**2 / 2 + outer * own + outer * S.lam**2 * bias


ATTACKS = [
    None,
    SameValue(variance=S.tau**2, fraction=S.fraction),
    SignFlip(variance=S.tau**2, fraction=S.fraction),
    Gaussian(variance=S.tau**2, fraction=S.fraction),
]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
@pytest.mark.parametrize(("algorithm", "q"), [(FLAME, S.q), (DITTO, 1.0)], ids=["flame", "ditto"])
def test_proposition_2(algorithm: Algorithm, q: float, attack: Attack | None) -> None:
    losses = trials(algorithm, attack)
    benign = losses[2]
    assert len(benign) == (S.m if attack is None else 4)
    for measured, expected in zip(losses[:2], closed_form(q, attack, benign), strict=True):
        means = measured[:, benign].mean(1)
        error = means.std() / math.sqrt(TRIALS)
        assert error < 0.03 * expected  # the comparison says something
        assert abs(means.mean() - expected) < 4 * error


@pytest.mark.slow
def test_proposition_2_for_pfedme() -> None:
    """Its copies w_i go to the local least squares: q = 1."""
    count = 60  # 30 local rounds make it slow
    losses = trials(PFEDME, ATTACKS[3], count)
    for measured, expected in zip(losses[:2], closed_form(1.0, ATTACKS[3], losses[2]), strict=True):
        means = measured[:, losses[2]].mean(1)
        assert abs(means.mean() - expected) < 4 * means.std() / math.sqrt(count)


@pytest.mark.slow
def test_proposition_3() -> None:
    """The variance over clients of the expected losses."""
    for algorithm, q in ((FLAME, S.q), (DITTO, 1.0)):
        shared, personal, _ = trials(algorithm, None, sigma=0.1)  # on which these variances do not depend
        gaps = np.square(q * S.theta.mean(0) - S.theta).sum(1)
        expected = S.b**2 / 4 * gaps.var()
        shrunk = expected * S.lam**4 / (S.b + S.lam) ** 4
        for measured, truth in ((shared, expected), (personal, shrunk)):
            assert measured.mean(0).var() == pytest.approx(truth, rel=0.02)


def least_q(attack: Attack | None, benign: list[int], theta: np.ndarray) -> tuple[float, float]:
    """Return from which q on the loss is below that of q = 1, for the global and the personal model.

    Both are parabolas in q, c q^2 + e q + what does not depend on q, so that the bound is -e / c - 1.
    """
    found = []
    for kind in (0, 1):
        at = [closed_form(q, attack, benign, theta)[kind] for q in (0.0, 0.5, 1.0)]
        c, e = 2 * (at[2] - 2 * at[1] + at[0]), 4 * at[1] - 3 * at[0] - at[2]
        assert closed_form(0.3, attack, benign, theta)[kind] == pytest.approx(at[0] + e * 0.3 + c * 0.09)
        found.append(-e / c - 1)
    return found[0], found[1]


BENIGN = [0, 2, 3, 5]


def test_the_bounds_of_proposition_2() -> None:
    """By inner products of the benign mean with the centre, the benign sum over m (less the malicious, if flipped)."""
    theta, noise = S.theta, S.sigma**2 / (S.b * S.n)
    bad = [i for i in range(S.m) if i not in BENIGN]
    mean, m_b = theta[BENIGN].mean(0), len(BENIGN)
    for attack in ATTACKS[1:]:
        if isinstance(attack, SignFlip):
            centre = (theta[BENIGN].sum(0) - math.sqrt(2 / math.pi) * S.tau * theta[bad].sum(0)) / S.m
            spread = sum((1 - 2 / math.pi) * S.tau**2 * theta[j] @ theta[j] + S.tau**2 * noise * S.d for j in bad)
        else:
            centre, spread = theta[BENIGN].sum(0) / S.m, 0.0
        spread = (spread + m_b * noise * S.d) / S.m**2
        shared = 2 * centre @ mean / (centre @ centre + spread) - 1
        # The personal model's part of the client's own data, b q lam / m in its variance, shifts the bound.
        own = 2 * (centre @ mean - noise * S.d / S.m * S.b / S.lam) / (centre @ centre + spread) - 1
        np.testing.assert_allclose(least_q(attack, BENIGN, theta), (shared, own))


@pytest.mark.slow
def test_proposition_2_orders_the_losses_of_runs_where_its_condition_holds_and_only_there() -> None:
    """With the same draws for both methods, so that few trials tell them apart."""
    count, orders = 40, set()
    for attack in (ATTACKS[2], ATTACKS[3]):
        for scale in (0.1, 1.5):  # small truths: all is noise, and a smaller q is better; large ones: it is a bias
            theta = scale * S.theta
            flame, ditto = (trials(each, attack, count, theta=theta) for each in (FLAME, DITTO))
            for kind, bound in enumerate(least_q(attack, flame[2], theta)):
                apart = (flame[kind] - ditto[kind])[:, flame[2]].mean(1)
                assert abs(apart.mean()) > 2 * apart.std() / math.sqrt(count)  # the comparison says something
                assert (apart.mean() < 0) == (bound < S.q)
                orders.add(bool(apart.mean() < 0))
    assert orders == {True, False}


def equal_norms(rng: np.random.Generator, m: int, d: int) -> np.ndarray:
    rows = rng.normal(size=(m, d)) + 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def variance(q: float, theta: np.ndarray) -> float:
    """Of the losses of the global model over clients; the personal model's is a multiple that does not depend on q."""
    return float(S.b**2 / 4 * np.square(q * theta.mean(0) - theta).sum(1).var())


def test_the_ordering_of_proposition_3_needs_equal_norms() -> None:
    """With equal norms it is q^2 times a number. With others it may be the smaller, the larger q is."""
    rng, reversed_ = np.random.default_rng(0), 0
    for _ in range(200):
        m, d, q = int(rng.integers(2, 12)), int(rng.integers(2, 8)), float(rng.uniform(0.05, 0.95))
        equal = equal_norms(rng, m, d)
        assert variance(q, equal) == pytest.approx(q**2 * variance(1.0, equal), abs=1e-12)
        unequal = equal * rng.uniform(0.2, 3, size=(m, 1))
        reversed_ += variance(q, unequal) > variance(1.0, unequal)
    assert 40 < reversed_ < 200


def test_runs_are_ordered_as_proposition_3_says_with_equal_norms_and_may_not_be_with_others() -> None:
    """Without noise, one run has the losses that the proposition speaks of."""
    equal = equal_norms(np.random.default_rng(1), S.m, S.d)
    along = np.linspace(0.5, 1.5, S.m)[:, None] * equal[0]  # in one direction: most of all far from a mean shrunk by q
    for theta, ordered in ((equal, True), (along, False)):
        found = {name: trials(each, None, 1, 0.0, theta) for name, each in METHODS.items()}
        for kind in (0, 1):
            flame, ditto, pfedme = (float(found[name][kind][0].var()) for name in ("flame", "ditto", "pfedme"))
            assert pfedme == pytest.approx(ditto, rel=1e-6)
            assert (flame < ditto) == ordered
            shrunk = S.lam**4 / (S.b + S.lam) ** 4 if kind else 1.0
            assert flame == pytest.approx(shrunk * variance(S.q, theta))
            assert ditto == pytest.approx(shrunk * variance(1.0, theta))


METHODS = {"flame": FLAME, "ditto": DITTO, "pfedme": PFEDME}

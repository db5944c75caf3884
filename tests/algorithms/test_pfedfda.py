"""pFedFDA: heads from normal distributions, and how much of its own statistics a client takes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.algorithms import PFedFDA
from equipoise.algorithms.pfedfda import Normals, _first_smallest, _positive
from equipoise.api import Result
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.representations.head_problem import strata
from tests.support.problems import classification, simulation

EPS = 1e-4


def raw() -> nn.Module:
    """A model whose head reads the samples as they are."""
    return BodyAndHead(nn.Identity(), nn.Linear(4, 3))


def federation(*sizes: int, seed: int = 0) -> Federation:
    """Clients with normal features of each class, shifted by client, in unequal numbers."""
    rng = np.random.default_rng(seed)
    parts = []
    for i, n in enumerate(sizes):
        y = rng.choice(3, size=n, p=[0.2, 0.3, 0.5])
        x = rng.normal(size=(n, 4)) @ np.diag([1, 0.5, 2, 1]) + 1.5 * np.eye(4)[y] + 0.3 * i
        parts.append({"train": (x, y), "test": (x, y)})
    return from_clients(parts)


def finished(algorithm: PFedFDA, data: Federation, module: nn.Module | None = None, **options: Any) -> Simulation:
    run = simulation(algorithm, data, module or raw(), **{"rounds": 1, "participation": 1.0, **options})
    run.run()
    return run


def samples(run: Simulation, who: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
    return x.numpy(), y.numpy()


def discriminant(mu: np.ndarray, Sigma: np.ndarray, pi: np.ndarray, eps: float = EPS) -> tuple[np.ndarray, np.ndarray]:
    """Weights and bias of linear discriminant analysis, with a covariance drawn towards a multiple of the identity."""
    d = len(Sigma)
    inverse = np.linalg.inv((1 - eps) * Sigma + eps * np.trace(Sigma) / d * np.eye(d))
    return mu @ inverse, -0.5 * np.einsum("cd,de,ce->c", mu, inverse, mu) + np.log(pi)


def own(x: np.ndarray, y: np.ndarray, mu: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A client's means and covariance, sample by sample; classes with too few samples have the common mean."""
    means = np.stack([x[y == c].mean(0) if known[c] else mu[c] for c in range(3)])
    apart = x - means[y]
    return means, apart.T @ apart / (len(x) - 1) + EPS * np.eye(x.shape[1])


def shares(y: np.ndarray) -> np.ndarray:
    pi = np.bincount(y, minlength=3) / len(y) + EPS
    return pi / pi.sum()


def test_all_on_its_own_it_is_linear_discriminant_analysis_of_the_clients_samples() -> None:
    run = finished(PFedFDA(grid=(1.0,)), federation(40, 60))
    for i in range(2):
        x, y = samples(run, i)
        weight, bias = discriminant(*own(x, y, np.zeros((3, 4)), np.ones(3, bool)), shares(y))
        head = Result(run).personal(i).head
        np.testing.assert_allclose(head.weight.detach(), weight, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(head.bias.detach(), bias, rtol=1e-8, atol=1e-10)
    stats = [own(*samples(run, i), np.zeros((3, 4)), np.ones(3, bool)) for i in range(2)]
    for k, name in enumerate(("mu", "Sigma")):
        np.testing.assert_allclose(run.server[name], 0.4 * stats[0][k] + 0.6 * stats[1][k], rtol=1e-9, atol=1e-12)


def test_all_in_common_the_heads_differ_in_the_shares_of_the_classes_alone() -> None:
    run = finished(PFedFDA(grid=(0.0,)), federation(40, 60))
    heads = [Result(run).personal(i).head for i in range(2)]
    assert torch.equal(heads[0].weight, heads[1].weight)
    pi = [np.log(shares(samples(run, i)[1])) for i in range(2)]
    difference = (heads[0].bias - heads[1].bias).detach()
    np.testing.assert_allclose(difference, pi[0] - pi[1], rtol=1e-9, atol=1e-12)
    start = run.algorithm.init_server(run.start)
    torch.testing.assert_close(run.server.mu, start.mu)  # nobody has changed the statistics
    shared = Result(run).global_model().head
    weight, bias = discriminant(start.mu.numpy(), start.Sigma.numpy(), np.full(3, 1 / 3))
    np.testing.assert_allclose(shared.weight.detach(), weight, rtol=1e-9)
    np.testing.assert_allclose(shared.bias.detach(), bias, rtol=1e-9)


def test_a_class_with_at_most_two_samples_has_the_common_mean() -> None:
    rng = np.random.default_rng(1)
    y = np.array([0] * 5 + [1] * 2 + [2] * 6)
    part = (rng.normal(size=(13, 4)), y)
    run = finished(PFedFDA(grid=(1.0,)), from_clients([{"train": part, "test": part}]))
    start = run.algorithm.init_server(run.start).mu.numpy()
    mu, Sigma = own(*part, start, np.array([True, False, True]))
    np.testing.assert_allclose(run.server.mu, mu, rtol=1e-9)
    np.testing.assert_allclose(run.server.Sigma, Sigma, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_beta_has_the_smallest_loss_on_the_other_half_of_the_samples(single: bool, mode: str) -> None:
    grid = (0.0, 0.3, 0.7, 1.0)
    run = finished(PFedFDA(grid=grid, single_beta=single), federation(12, 25, 60), mode=mode)
    start = run.algorithm.init_server(run.start)
    mu, Sigma = start.mu.numpy(), start.Sigma.numpy()
    for i in range(3):
        x, y = samples(run, i)
        known = np.bincount(y, minlength=3) > 2
        halves = strata(torch.from_numpy(y), 2)
        best = (np.inf, (0.0, 0.0))
        for b in grid:
            for c in [b] if single else grid:
                total = 0.0
                for here, there in (halves, halves[::-1]):
                    m, S = own(x[here], y[here], mu, known)
                    W, a = discriminant(b * m + (1 - b) * mu, c * S + (1 - c) * Sigma, shares(y))
                    outputs = torch.from_numpy(x[there] @ W.T + a)
                    total += float(F.cross_entropy(outputs, torch.from_numpy(y[there]), reduction="sum"))
                best = min(best, (total, (b, c)))
        np.testing.assert_allclose(run.store.get(i).beta, best[1], rtol=1e-12)
    assert len({tuple(run.store.get(i).beta.tolist()) for i in range(3)}) > 1  # there is something to choose


def test_equal_clients_that_agree_are_adapted_alike_whatever_beta_is() -> None:
    rng = np.random.default_rng(2)
    y = rng.permutation(np.repeat([0, 1, 2], 8))
    part = (rng.normal(size=(24, 4)) + y[:, None], y)
    data = from_clients([{"train": part, "test": part}] * 3)
    runs = [finished(PFedFDA(grid=(1.0,)), data)]
    for beta in (0.0, 0.4, 1.0):
        run = simulation(PFedFDA(grid=(beta,)), data, raw(), rounds=1, participation=1.0)
        run.server = runs[0].server
        run.run()
        for name in ("mu", "Sigma"):
            torch.testing.assert_close(run.server[name], runs[0].server[name], rtol=1e-9, atol=1e-12)


def test_the_body_trains_under_the_head_of_the_common_statistics() -> None:
    algorithm = PFedFDA(lr=0.1, batch=10**6, steps=1)
    run = simulation(algorithm, classification(), rounds=1, participation=1.0)
    before = run.server
    module = run.task.module
    moved, n = torch.zeros_like(before.phi), 0
    for i in range(6):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[i]))
        weight, bias = discriminant(before.mu.numpy(), before.Sigma.numpy(), shares(y.numpy()))
        body = list(module.body.parameters())
        for p in body:
            p.requires_grad_()
        outputs = module.body(x) @ torch.from_numpy(weight).T + torch.from_numpy(bias)
        g = torch.autograd.grad(F.cross_entropy(outputs, y), body)
        moved += len(y) * torch.cat([t.flatten() for t in g])
        n += len(y)
    run.run()
    assert moved.norm() > 0.01 * n
    torch.testing.assert_close(run.server.phi, before.phi - 0.1 * moved / n, rtol=1e-8, atol=1e-11)


def test_halves_have_equal_shares_of_every_class() -> None:
    y = torch.tensor([2, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1])
    groups = strata(y, 2)
    assert sorted(torch.cat(groups).tolist()) == list(range(11))
    counts = torch.stack([torch.bincount(y[g], minlength=3) for g in groups])
    assert int((counts[0] - counts[1]).abs().max()) <= 1
    with pytest.raises(EquipoiseError, match="one label per sample"):
        strata(torch.rand(4), 2)


def test_of_losses_that_are_equal_the_first_is_taken() -> None:
    rows = torch.tensor([[3.0, 1.0, 1.0 + 1e-12, 2.0], [1.0 + 1e-12, 1.0, 5.0, 1.0], [torch.nan] * 4])
    assert _first_smallest(rows.double()).tolist() == [1, 0, 3]


def test_a_covariance_that_noise_has_spoilt_is_made_positive_and_another_is_left_alone() -> None:
    A = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    good = A @ A.T + torch.eye(5)
    torch.testing.assert_close(_positive(good, EPS), good, rtol=0, atol=1e-15)
    spoilt = A + A.T
    made = torch.linalg.eigvalsh(_positive(spoilt, EPS))
    wanted = torch.linalg.eigvalsh(spoilt).clamp(min=EPS)
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-9)


def test_a_head_is_the_classes_log_densities() -> None:
    """Up to what is the same for all classes, which softmax ignores."""
    rng = torch.Generator().manual_seed(0)
    mu, A, x = (torch.randn(*shape, generator=rng).double() for shape in ((3, 4), (4, 4), (6, 4)))
    Sigma, pi = A @ A.T + torch.eye(4), torch.tensor([0.2, 0.5, 0.3]).double()
    head = Normals(mu, Sigma).head(pi, 0.0)
    log = torch.stack([torch.distributions.MultivariateNormal(m, Sigma).log_prob(x) for m in mu], dim=1) + pi.log()
    found: Tensor = torch.cat([x, torch.ones(6, 1)], dim=1) @ head
    torch.testing.assert_close(found.softmax(1), log.softmax(1), rtol=1e-9, atol=1e-12)


def test_values_of_beta_ascend_and_the_head_needs_a_bias() -> None:
    with pytest.raises(EquipoiseError, match="must ascend"):
        PFedFDA(grid=(0.5, 0.1))
    module = BodyAndHead(nn.Identity(), nn.Linear(4, 3, bias=False))
    with pytest.raises(EquipoiseError, match="has none; give it one"):
        simulation(PFedFDA(), federation(10), module)

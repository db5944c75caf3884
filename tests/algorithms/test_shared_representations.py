"""FedBABU, FedPAC and FedCR: methods with a common extractor, each by what its paper says."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import FedAvgFT, FedBABU, FedCR, FedPAC
from equipoise.algorithms.fedcr import Divergence
from equipoise.algorithms.fedpac import Alignment, combination
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.models.gaussian import Draw, GaussianMLP, normal
from equipoise.runs.result import Result
from equipoise.state import State
from tests.support.problems import LeastSquares, classification, simulation, small_mlp


def test_fedbabus_head_is_the_one_that_was_drawn() -> None:
    run = simulation(FedBABU(lr=0.1), rounds=3)
    space, w0 = run.task.space, run.task.w0
    run.run()
    shared = run.algorithm.global_model(run.server)
    assert torch.equal(space.head(shared), space.head(w0))
    assert not torch.equal(space.body(shared), space.body(w0))
    tuned = Result(run).personal_vector(4).vector
    assert not torch.equal(space.head(tuned), space.head(w0))
    only_head = FedBABU(lr=0.1, finetune_part="head")
    tuned = Result(simulation(only_head, rounds=1)).personal_vector(4).vector
    assert torch.equal(space.body(tuned), space.body(w0))


def test_fedbabu_with_an_empty_head_is_fedavg_with_fine_tuning() -> None:
    common = {"lr": 0.1, "batch": 4, "finetune_epochs": 2}
    babu, avg = (simulation(a, head=None, rounds=3) for a in (FedBABU(**common), FedAvgFT(**common)))
    babu.run()
    avg.run()
    assert torch.equal(babu.server.theta_ext, avg.server.w)
    assert torch.equal(Result(babu).personal_vector(3).vector, Result(avg).personal_vector(3).vector)


@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.integers(0, 999), st.floats(1e-3, 10))
@settings(max_examples=60)
def test_the_weights_of_heads_solve_fedpacs_program(m: int, classes: int, width: int, seed: int, scale: float) -> None:
    """By the conditions of optimality: what is used has the smallest slope."""
    rng = np.random.default_rng(seed)
    mu = [torch.from_numpy(scale * rng.normal(size=(classes, width))) for _ in range(m)]
    V = [torch.from_numpy(rng.uniform(0.1, 1, size=1)) for _ in range(m)]
    alpha = combination(mu, V).numpy()
    np.testing.assert_allclose(alpha.sum(1), 1)
    assert (alpha >= 0).all()
    flat = np.stack([t.numpy().ravel() for t in mu])
    for i in range(m):
        apart = flat[i] - flat
        P = np.diag([float(v) for v in V]) + apart @ apart.T
        best, slope = alpha[i] @ P @ alpha[i], P @ alpha[i]
        assert (slope >= best - 1e-6 * np.abs(P).max()).all()
        for _ in range(50):
            other = rng.dirichlet(np.full(m, 0.3))
            assert best <= (other @ P @ other) + 1e-6 * np.abs(P).max()


def test_clients_that_are_alike_share_their_heads_and_strangers_do_not() -> None:
    same, other = torch.ones(2, 3).double(), -5 * torch.ones(2, 3).double()
    alpha = combination([same, same, other], [torch.tensor([0.1]).double()] * 3)
    np.testing.assert_allclose(alpha, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], atol=2e-3)


def test_fedpacs_centres_are_the_class_means_of_all_clients() -> None:
    run = simulation(FedPAC(lr=1e-12), participation=1.0, rounds=1)
    run.run()
    body, sums, counts = run.task.module.body, torch.zeros(3, 8).double(), torch.zeros(3).double()
    for who in range(6):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
        members = torch.nn.functional.one_hot(y, 3).double()
        sums, counts = sums + members.T @ body(x).detach(), counts + members.sum(0)
    torch.testing.assert_close(run.server.c, sums / counts[:, None], rtol=1e-8, atol=1e-10)
    assert run.server.known.all()


def test_fedpac_pulls_features_to_the_centres_of_their_classes() -> None:
    gaps = []
    for lam in (0.0, 3.0):
        run = simulation(FedPAC(lr=0.1, lam=lam, epochs=5), participation=1.0, rounds=12)
        run.run()
        body = run.task.to_module(run.task.space.join(run.server.theta, run.server.phi[5])).body
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[5]))
        h = body(x).detach()
        gaps.append(float(Alignment.each([h], [], y, State(c=run.server.c, weight=torch.ones(3).double())).mean()))
    assert gaps[1] < 0.5 * gaps[0]


@given(st.integers(1, 6), st.integers(0, 999))
@settings(max_examples=40)
def test_fedcrs_term_is_the_divergence_of_two_normal_distributions(width: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(5, 2 * width, generator=rng, dtype=torch.float64)
    mean, sd = (
        torch.randn(3, width, generator=rng, dtype=torch.float64),
        torch.rand(3, width, generator=rng).double() + 0.1,
    )
    y = torch.tensor([0, 1, 2, 1, 0])
    found = Divergence.each([h], [], y, State(mean=mean, sd=sd, weight=torch.full((1,), 0.7, dtype=torch.float64)))
    r = torch.distributions.Normal(mean[y], sd[y])
    p = torch.distributions.Normal(*normal(h))
    torch.testing.assert_close(found, 0.7 * torch.distributions.kl_divergence(r, p).sum(-1), rtol=1e-10, atol=1e-12)


def test_fedcrs_class_distribution_is_the_product_of_all_its_samples() -> None:
    """Densities of one coordinate, multiplied on a grid and scaled to one."""
    run = simulation(FedCR(lr=1e-12), participation=1.0, rounds=1)
    run.run()
    grid = torch.linspace(-3, 3, 20001).double()
    label, coordinate = 1, 2
    log = torch.distributions.Normal(0.0, 1.0).log_prob(grid).double()
    for who in range(6):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
        mean, sd = normal(run.task.module.body.encoder(x).detach())
        for k in (y == label).nonzero().flatten():
            log = log + torch.distributions.Normal(mean[k, coordinate], sd[k, coordinate]).log_prob(grid)
    density = (log - log.max()).exp()
    density /= density.sum()
    mean = (density * grid).sum()
    assert float(run.server.mean[label, coordinate]) == pytest.approx(float(mean), abs=1e-6)
    spread = (density * (grid - mean).square()).sum().sqrt()
    assert float(run.server.sd[label, coordinate]) == pytest.approx(float(spread), rel=1e-4)


def test_a_random_representation_is_drawn_in_training_and_its_mean_otherwise() -> None:
    layer = Draw()
    encoded = torch.randn(20_000, 2, dtype=torch.float64).zero_() + torch.tensor([0.3, 0.5])
    layer.generator = torch.Generator().manual_seed(0)
    drawn = layer.train()(encoded)
    mean, sd = normal(encoded)
    assert float(drawn.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(drawn.std()) == pytest.approx(float(sd[0]), rel=0.03)
    assert torch.equal(layer.eval()(encoded), mean)


def test_the_loss_of_several_draws_is_the_mean_of_their_losses() -> None:
    module = GaussianMLP(latent=4, draws=3).build((5,), 3)
    task = simulation(FedCR(), module=module).task
    x, y = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double(), torch.arange(7) % 3
    outputs = task.module.train()(x)
    draws = outputs.chunk(3)
    assert len(outputs) == 3 * len(x)
    assert not torch.allclose(draws[0], draws[1])
    each = [torch.nn.functional.cross_entropy(draw, y) for draw in draws]
    torch.testing.assert_close(task.batch_loss(outputs, y), torch.stack(each).mean())
    mean, _ = normal(task.module.body.encoder(task.module.body.features(x)))
    many = (
        torch.stack([task.module(x) for _ in range(700)]).unflatten(1, (3, -1)).flatten(0, 1)
    )  # (draws, samples, classes)
    torch.testing.assert_close(many.mean(0), task.module.head(mean), atol=0.1, rtol=0.0)


def test_several_draws_train_another_model_than_one() -> None:
    modules = [GaussianMLP(latent=4, draws=draws).build((5,), 3) for draws in (1, 4)]
    modules[1].load_state_dict(modules[0].state_dict())
    runs = [simulation(FedCR(lr=0.1), module=module, rounds=1) for module in modules]
    for run in runs:
        run.run()
    assert not torch.allclose(*(run.server.phi for run in runs))


def test_runs_with_random_representations_reproduce_with_any_number_of_workers() -> None:
    module = GaussianMLP(hidden=(6,), latent=3).build((5,), 3)
    runs = [simulation(FedCR(lr=0.1), classification(), module, workers=workers) for workers in (1, 2)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].server.phi, runs[1].server.phi)
    assert runs[0].task.why_not_stacked is not None
    assert not runs[0].task.unseeded


def test_fedcr_says_what_model_it_needs_and_fedpac_what_data() -> None:
    odd = torch.nn.Sequential(OrderedDict(encoder=torch.nn.Linear(5, 7), act=torch.nn.Tanh()))
    for module in (torch.nn.Linear(5, 3), BodyAndHead(odd, torch.nn.Linear(7, 3))):
        with pytest.raises(EquipoiseError, match="fedcr needs a model whose representation is random"):
            simulation(FedCR(), module=module)
    for algorithm in (FedPAC(), FedCR()):
        with pytest.raises(EquipoiseError, match="needs data with one label per sample"):
            simulation(algorithm, LeastSquares(features=5).federation(), small_mlp(outputs=1), loss="squared")

"""FedCP: the policy that divides features, the discrepancy of features, and what is sent."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.algorithms.fedcp import Context, Discrepancy, FedCP, GlobalHead, Policy, Separated
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.privacy.mechanisms import Privacy
from equipoise.state import State
from tests.support.problems import FULL, simulation


def started(algorithm: FedCP, **options: Any) -> Simulation:
    return simulation(algorithm, **{"rounds": 1, "participation": 1.0, **options})


def test_fractions_are_between_zero_and_one_and_add_up() -> None:
    r, s = (t.detach() for t in Policy(6)(torch.randn(50, 6)))
    torch.testing.assert_close(r + s, torch.ones(50, 6))
    assert r.shape == s.shape == (50, 6)
    assert 0 < float(r.min()) < float(r.max()) < 1


def test_with_equal_heads_and_fractions_of_a_half_it_is_the_model_with_twice_the_bias() -> None:
    head, h = nn.Linear(6, 4), torch.randn(20, 6)
    around = Separated(head)
    with torch.no_grad():
        around.policy.layers[1].weight.zero_()  # all alike after the normalisation
    torch.testing.assert_close(around(h), h @ head.weight.T + 2 * head.bias)


def test_noise_is_drawn_in_training_alone_and_by_the_runs_seed() -> None:
    algorithm = FedCP(lr=0.05, batch=4, noise=True)
    runs = [started(algorithm), started(algorithm), started(FedCP(lr=0.05, batch=4)), started(algorithm, seed=1)]
    for run in runs:
        run.run()
    thetas = [run.server.theta for run in runs]
    assert torch.equal(thetas[0], thetas[1])
    assert not torch.allclose(thetas[0], thetas[2])
    assert not torch.allclose(thetas[0], thetas[3])
    policy, h = Policy(6, noise=True), torch.randn(5, 6)
    assert not torch.equal(policy(h)[0], policy(h)[0])
    r, s = policy(h)
    torch.testing.assert_close(r + s, torch.ones(5, 6))
    assert torch.equal(policy.eval()(h)[0], policy(h)[0])
    with pytest.raises(EquipoiseError, match="draws random numbers"):
        started(algorithm, mode="stacked")


def squared_discrepancy(x: Tensor, z: Tensor) -> Tensor:
    def kernel(x: Tensor, z: Tensor) -> Tensor:
        apart = torch.cdist(x, z, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([torch.exp(-apart / (2 * a)) for a in (10, 15, 20, 50)]).sum(0).mean()

    return kernel(x, x) + kernel(z, z) - 2 * kernel(x, z)


def test_the_discrepancy_is_that_of_all_pairs_zero_for_equal_batches_and_never_negative() -> None:
    def found(x: Tensor, z: Tensor, count: int) -> Tensor:
        weights = torch.cat([torch.full((count,), 1 / count, dtype=torch.float64), torch.zeros(len(x) - count)])
        return Discrepancy.whole([x], [z], torch.zeros(len(x)), weights, State(lam=torch.ones(1).double()))

    for seed in range(5):
        x, z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(seed)).double()
        torch.testing.assert_close(found(x, z, 9), squared_discrepancy(x, z), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found(x, z, 6), squared_discrepancy(x[:6], z[:6]), rtol=1e-9, atol=1e-12)
        assert found(x, z, 9) >= 0
        assert abs(float(found(x, x, 9))) < 1e-15


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_round_is_two_steps_by_autograd_and_sends_the_mean_of_both_heads(mode: str) -> None:
    run = started(FedCP(lr=0.1, batch=FULL, steps=2, lam=3.0), mode=mode)
    space, w0, sums = run.task.space, run.task.w0, {}
    down = run.server
    for i in range(6):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[i]))
        weight = down.W_g[:24].reshape(3, 8).sum(0)
        w = w0.clone()
        w[space.span(Context)] = weight / weight.norm()
        still = w[torch.isin(torch.arange(len(w)), _fixed(space))]
        parameters = {k: t.clone() for k, t in space.views(w).items()}
        h0 = _features(run, parameters, x).detach()
        for _ in range(2):
            moving = {k: t.detach().requires_grad_() for k, t in parameters.items()}
            value = F.cross_entropy(functional_call(run.task.module, moving, (x,)), y)
            value = value + 3.0 * squared_discrepancy(_features(run, moving, x), h0)
            found = torch.autograd.grad(value, list(moving.values()))
            parameters = {
                k: t.detach() if "common" in k or "context" in k else t.detach() - 0.1 * g
                for (k, t), g in zip(moving.items(), found, strict=True)
            }
        after = torch.cat([parameters[entry.name].flatten() for entry in space.entries])
        assert torch.equal(after[torch.isin(torch.arange(len(w)), _fixed(space))], still)
        sums[i] = after
    run.run()
    n = torch.tensor([len(run.federation.train[i]) for i in range(6)]).double()
    mean = sum(n[i] * sums[i] for i in range(6)) / n.sum()
    B, H = space.body_size, 27
    torch.testing.assert_close(run.server.theta, mean[:B], rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(run.server.W_g, (mean[B : B + H] + down.W_g) / 2, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(run.server.Theta, mean[space.span(Policy)], rtol=1e-8, atol=1e-11)
    for i in range(6):
        torch.testing.assert_close(run.store.get(i).W_p, sums[i][B : B + H], rtol=1e-8, atol=1e-11)


def _fixed(space: ParameterSpace) -> Tensor:
    return torch.cat([space.mask(GlobalHead).nonzero().flatten(), space.mask(Context).nonzero().flatten()])


def _features(run: Simulation, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    body = {k.removeprefix("body."): t for k, t in parameters.items() if k.startswith("body.")}
    return functional_call(run.task.module.body, body, (x,))


def test_the_stronger_the_discrepancy_the_less_the_body_moves() -> None:
    moved = []
    for lam in (0.0, 1e2, 1e4):
        run = started(FedCP(lr=1e-4, batch=FULL, steps=300, lam=lam), mode="stacked")
        before = run.server.theta
        run.run()
        moved.append(float((run.server.theta - before).norm()))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.5 * moved[0]


def test_without_the_discrepancy_privacy_of_samples_covers_it() -> None:
    privacy = {"unit": "sample", "batches": "shuffled", "clip": 1e9, "sigma": 0.0}
    algorithm = FedCP(lr=0.05, batch=4, lam=0.0)
    one, two = started(algorithm), started(algorithm, uploads=UploadSettings(privacy=Privacy(**privacy)))
    for run in (one, two):
        run.run()
    for name, t in one.server.items():
        torch.testing.assert_close(two.server[name], t, rtol=1e-9, atol=1e-11)

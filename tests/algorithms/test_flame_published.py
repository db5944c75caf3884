"""Settings with which FLAME, Ditto and multi-Krum do as FLAME's published code does, not as its paper says."""

import pytest
import torch
from torch import Tensor

from equipoise.algorithms import Ditto, Flame, Local, PFedMe
from equipoise.algorithms.base import Algorithm
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.reducers import Mean, MultiKrum
from tests.support.problems import LeastSquares, least_squares, simulation
from tests.support.reducers import reduced

COMMON = {"lr": 0.05, "epochs": 2, "batch": 4}
MODES = ["threads", "stacked"]


def finished(algorithm: Algorithm, mode: str = "threads", **options) -> Simulation:
    run = simulation(algorithm, mode=mode, **options)
    run.run()
    return run


def models(run: Simulation, name: str) -> Tensor:
    return torch.stack([run.store.get(i)[name] for i in range(6)])


@pytest.mark.parametrize("mode", MODES)
def test_with_the_anchor_at_w_and_rho_lam_alpha_flame_is_pfedme_with_the_rate_1_over_lam(mode: str) -> None:
    """Both then pull personal models to their own mean; momentum and L2 change nothing of that."""
    lam, more = 0.7, {**COMMON, "momentum": 0.5, "weight_decay": 0.01}
    options = {"mode": mode, "rounds": 5, "participation": 1.0}
    flame = finished(Flame(lam=lam, rho=lam / 6, anchor="global", **more), **options)
    pfedme = finished(PFedMe(lam=lam, global_lr=1 / lam, local_rounds=1, inner_steps=0, **more), **options)
    own = finished(Flame(lam=lam, rho=lam / 6, **more), **options)
    torch.testing.assert_close(flame.server.w, pfedme.server.w, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(models(flame, "theta"), models(pfedme, "theta"), rtol=1e-10, atol=1e-12)
    assert (own.server.w - flame.server.w).abs().max() > 1e-5


def test_with_either_anchor_it_ends_at_the_same_point() -> None:
    p, lam = LeastSquares(), 0.8
    settings = {"lam": lam, "rho": 3 * lam / 4, "lr": 1 / (p.smoothness() + lam), "batch": 10**6, "steps": 20}
    own, other = (least_squares(p, Flame(anchor=anchor, **settings), rounds=120) for anchor in ("own", "global"))
    torch.testing.assert_close(own.server.w, other.server.w, rtol=1e-5, atol=1e-7)


def test_lemma_3_holds_with_either_anchor() -> None:
    run = finished(Flame(lam=0.7, rho=0.3, anchor="global", **COMMON), participation=2)
    for i in range(6):
        state = run.store.get(i)
        torch.testing.assert_close(state.pi, 0.7 / 6 * (state.theta - state.w_i))


@pytest.mark.parametrize("mode", MODES)
def test_ditto_with_equal_weights_has_the_plain_mean(mode: str) -> None:
    equal = finished(Ditto(weights="equal", **COMMON), mode)
    plain = finished(Ditto(**COMMON), mode, uploads=UploadSettings(reducer=Mean()))
    torch.testing.assert_close(equal.server.w, plain.server.w, rtol=1e-12, atol=1e-14)
    assert (equal.server.w - finished(Ditto(**COMMON), mode).server.w).abs().max() > 1e-4
    assert equal.counters.bytes_up < plain.counters.bytes_up  # no weights are sent


@pytest.mark.parametrize("mode", MODES)
def test_copies_that_are_never_synchronised_are_those_of_clients_that_train_alone(mode: str) -> None:
    options = {"mode": mode, "participation": 1.0}
    run = finished(Ditto(synchronised=False, weights="equal", **COMMON), **options)
    alone = models(finished(Local(**COMMON), **options), "v")
    assert torch.equal(models(run, "w_i"), alone)
    torch.testing.assert_close(run.server.w, alone.mean(0), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(run.server.w, finished(Ditto(weights="equal", **COMMON), **options).server.w)


@pytest.mark.parametrize("mode", MODES)
def test_the_global_branch_may_take_one_batch_while_personal_models_take_all(mode: str) -> None:
    options = {"mode": mode, "participation": 1.0, "rounds": 3}
    whole, short = (finished(Ditto(global_steps=steps, **COMMON), **options) for steps in (None, 1))
    sizes = short.federation.train.lengths
    assert whole.counters.gradient_samples == 3 * 2 * 2 * sizes.sum()
    assert short.counters.gradient_samples == 3 * (2 * sizes.sum() + sizes.clip(max=4).sum())
    torch.testing.assert_close(
        finished(Ditto(global_steps=2, weights="equal", lam=0.0, lr=0.05, batch=4, steps=2), **options).server.w,
        finished(Ditto(weights="equal", lam=0.0, lr=0.05, batch=4, steps=2), **options).server.w,
    )


def test_multi_krum_by_plain_distances_and_a_fixed_number() -> None:
    rows = torch.tensor([[0.0, 0], [0, 3], [4, 0], [3, 1], [1, 1], [9, 9], [0.5, 0.2]]).double()
    f, n = 2, len(rows)
    for distances, power in (("squared", 2), ("plain", 1)):
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") ** power
        order = apart.sort(dim=1).values[:, 1 : n - f - 1].sum(1).argsort()
        for select, count in ((None, n - f), (1, 1), (3, 3), (99, n)):
            rule = MultiKrum(malicious=f / n, distances=distances, select=select)
            torch.testing.assert_close(reduced(rule, rows), rows[order[:count]].mean(0))


def test_squared_distances_may_prefer_another_message() -> None:
    """Distances to neighbours 2 and 2, or 0.5 and 3: their sums are 4 and 3.5, squared 8 and 9.25."""
    rows = torch.tensor([[0.0], [2], [-2], [100], [100.5], [103.5], [200], [300], [400]]).double()
    rule = {"malicious": 5 / 9}
    squared, plain = (MultiKrum(distances=d, select=1, **rule) for d in ("squared", "plain"))
    assert reduced(squared, rows).item() == 0.0
    assert reduced(plain, rows).item() == 100.5

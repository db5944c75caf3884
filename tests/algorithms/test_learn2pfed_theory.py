"""Learn2pFed's theory: Lemma 1, the backward part of Theorem 1, and where cells end that step on the task's loss.

Each test says which inequality or identity it is about. What the paper prints and is not so has a counterexample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.algorithms import Learn2pFed
from equipoise.algorithms.learn2pfed.cells import Cells
from equipoise.algorithms.learn2pfed.fits import Fit, HeadFit, LossFit
from equipoise.algorithms.learn2pfed.learnables import Layout
from equipoise.losses import LOSSES
from equipoise.representations.head_problem import HeadProblem, HeadSamples
from equipoise.representations.linear_head import LinearHead
from tests.support.problems import simulation
from tests.support.unrolled import BEGIN, FAMILIES, LOSS, Central, central, forecasting, trained, two_outputs


@dataclass
class Iterates:
    """All iterates of some clients with closed solves: alpha, v, z by client and cell; w by cell."""

    alpha: list[list[Tensor]]
    v: list[list[Tensor]]
    z: list[list[Tensor]]
    w: list[Tensor]


def run_cells(unit: Cells, fits: Sequence[HeadFit], cells: int, *constants: float) -> Iterates:
    """Run cells from zero, the clients with equal weights in w; the constants are Λ, rho, eta and theta."""
    shape = unit.layout.head.inputs, unit.layout.head.outputs
    lam, *scalars = torch.tensor(constants, dtype=torch.float64)
    raw = torch.cat([lam.expand(shape).flatten(), torch.stack(scalars).log()])
    zero, clients = torch.zeros(1, *shape).double(), range(len(fits))
    path = Iterates(*([[zero] for _ in clients] for _ in range(3)), [zero])
    for cell in range(cells):
        for i in clients:
            found = unit.forward(cell, fits[i], raw, path.alpha[i][-1], path.v[i][-1], path.z[i][-1], path.w[-1])
            for kept, t in zip((path.alpha, path.v, path.z), found, strict=True):
                kept[i].append(t)
        path.w.append(torch.stack([path.v[i][-1] - path.z[i][-1] - path.alpha[i][-1] for i in clients]).mean(0))
    return path


def solved_cells(x: list[Tensor], y: list[Tensor], cells: int, *constants: float) -> Iterates:
    """The same with least squares in closed form."""
    fits = [Fit.of((a.T @ a)[None], (a.T @ b)[None]) for a, b in zip(x, y, strict=True)]
    unit = Cells(Layout(LinearHead(x[0].shape[1], 1, False), 1), "closed", 1.0, 1, "relu", ())
    return run_cells(unit, fits, cells, *constants)


CONSTANTS = st.floats(0.05, 20.0)


@settings(max_examples=20)
@given(seed=st.integers(0, 99), lam=CONSTANTS, rho=CONSTANTS, eta=CONSTANTS, theta=st.floats(0.05, 2.0))
def test_lemma_1_holds_for_the_dual_right_after_v(seed: int, lam: float, rho: float, eta: float, theta: float) -> None:
    """With a = alpha + z - v + w taken with the new v: rho a = F'(v), so |a - a'| <= |X'X| / rho |v - v'|."""
    draw = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 3, generator=draw).double() for n in (2, 5)]
    y = [torch.randn(n, 1, generator=draw).double() for n in (2, 5)]
    path = solved_cells(x, y, 6, lam, rho, eta, theta)
    for i in range(2):
        duals = []
        for t in range(1, 7):
            v = path.v[i][t]
            duals.append(path.alpha[i][t] + path.z[i][t - 1] - v + path.w[t - 1])
            torch.testing.assert_close(rho * duals[-1][0], x[i].T @ (x[i] @ v[0] - y[i]), rtol=1e-7, atol=1e-7)
        bound = torch.linalg.eigvalsh(x[i].T @ x[i]).max() / rho
        for t in range(1, 6):
            step = (path.v[i][t + 1] - path.v[i][t]).norm()
            assert (duals[t] - duals[t - 1]).norm() <= bound * step * (1 + 1e-6) + 1e-9


@settings(max_examples=20)
@given(seed=st.integers(0, 99), lam=CONSTANTS, rho=CONSTANTS, eta=CONSTANTS)
def test_the_dual_of_eq_9_is_that_of_z_and_of_the_step_of_w(seed: int, lam: float, rho: float, eta: float) -> None:
    """At theta = 1, Eq. 11 gives alpha = -Λ z / eta + (w - w'), with the z and the two w of the cells before."""
    draw = torch.Generator().manual_seed(seed)
    x = [torch.randn(4, 2, generator=draw).double() for _ in range(2)]
    y = [torch.randn(4, 1, generator=draw).double() for _ in range(2)]
    path = solved_cells(x, y, 6, lam, rho, eta, 1.0)
    for i in range(2):
        for t in range(2, 7):
            meant = path.w[t - 1] - path.w[t - 2] - lam * path.z[i][t - 1] / eta
            torch.testing.assert_close(path.alpha[i][t], meant, rtol=1e-7, atol=1e-7)


def test_lemma_1_as_printed_is_not_so() -> None:
    """From zero, v of the first client stays where it is from cell 1 to cell 2 and its alpha moves: no L_1 bounds it.

    v_1 = y / (1 + rho). It stays where w + z + alpha is zero in cell 2, which the second client's y brings about.
    """
    lam, rho, eta, theta = 1.0, 1.0, 1.0, 1.0
    kappa, one = eta / (lam + eta), 2.0
    v1 = one / (1 + rho)
    w1 = -v1 * (kappa - theta / (1 + theta))
    other = (1 + rho) * (2 * w1 - (1 - kappa) * v1) / (1 - kappa)
    x = [torch.ones(1, 1).double()] * 2
    y = [torch.full((1, 1), value).double() for value in (one, other)]
    path = solved_cells(x, y, 2, lam, rho, eta, theta)
    torch.testing.assert_close(path.v[0][2], path.v[0][1])
    assert (path.alpha[0][2] - path.alpha[0][1]).norm() == pytest.approx(theta / (1 + theta) * v1)


# Theorem 1, the backward part: gradient steps of the learnables lead to a minimum of the sum of the clients' losses.


def outer_losses(algorithm: Learn2pFed, rounds: int) -> tuple[list[float], list[float]]:
    """The sum of the clients' losses in each epoch, and the squared norm of its gradient."""
    run = simulation(algorithm, forecasting(), two_outputs(), loss="squared", rounds=rounds, participation=1.0)
    losses, norms = [], []
    for _ in range(rounds):
        assert run.advance()
        whole, clients = central(run), [run.store.get(i) for i in range(3)]
        losses.append(float(sum(whole.judged(i, clients[i].x[1]) for i in range(3))))
        norms.append(float(sum(c.slope.square().sum() for c in clients) + run.server.slope.square().sum()))
    run.close()
    return losses, norms


@pytest.mark.slow
@settings(max_examples=6)
@given(
    fit=st.sampled_from([{}, {"fit": "loss", "solve": "gradient", "solve_steps": 2}]),
    rate=st.sampled_from([0.001, 0.01, 0.03]),
    outer=st.sampled_from(["train", "validation"]),
    lam=st.sampled_from([0.1, 2.0]),
)
def test_small_steps_along_the_exact_gradient_descend(fit: Any, rate: float, outer: Any, lam: float) -> None:
    """P' <= P - rate / 2 |gradient|², in every epoch: so the gradients' squares have a finite sum, and tend to zero."""
    rule = {"outer_lr": rate, "outer_clip": 0.0, "decay_after": 1000, "positive": "log", "outer": outer}
    losses, norms = outer_losses(Learn2pFed(**{**BEGIN, "lam": lam}, **rule, **fit), 6)
    for before, after, norm in zip(losses, losses[1:], norms, strict=False):
        assert after <= before - rate / 2 * norm + 1e-12
    assert norms[0] > 0


def test_the_direction_as_printed_can_lead_upwards() -> None:
    """Where everybody differentiates alone, w held constant, however small a step can raise the sum of the losses.

    Two clients with two samples each, judged on what they are fitted to; three cells. Λ, rho, eta, theta as logarithms.
    """
    x = [torch.tensor([[-1.0], [0.0]]), torch.tensor([[0.0], [1.0]])]
    y = [torch.tensor([[1.0], [0.5]]), torch.tensor([[2.0], [-2.0]])]
    pairs = [[(a.double(), b.double())] for a, b in zip(x, y, strict=True)]
    whole = Central(Learn2pFed(cells=3, positive="log"), "squared", pairs, pairs, [2, 2], [[], []], 1)
    whole.start([torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.tensor([0.0, -1.0, 1.0, 0.0])])
    alone, exact = (
        torch.cat([own[name] for own in whole.gradients(detach) for name in FAMILIES]) for detach in (True, False)
    )
    assert float(alone @ exact) < -0.1 * float(alone.norm() * exact.norm())
    before = whole.loss().item()
    with torch.no_grad():
        for own, step in zip(whole.leaves, alone.split(4), strict=True):
            for name, change in zip(FAMILIES, step, strict=True):
                own[name] -= 1e-3 * change
    assert whole.loss().item() > before


# Cells that step on the task's own loss.


def noisy_classes() -> list[LossFit]:
    """Clients whose labels have nothing to do with their inputs, so that cross-entropy has a minimum."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for n in (12, 20):
        x, y = torch.randn(n, 2, generator=draw).double(), torch.randint(3, (n,), generator=draw)
        samples = HeadSamples(x, y, n, [slice(0, n)], torch.Size([3]), 3)
        problem = HeadProblem((samples,), False, LOSSES["cross-entropy"])
        found.append(LossFit.of(problem, problem.members / n))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lam", [1e-9, 0.2, 1e9])
def test_cells_of_cross_entropy_end_at_its_minima(lam: float) -> None:
    """Λ -> 0: each client's own minimum; Λ -> infinity: one model, that of the mean loss; between: that of Eq. 2."""
    fits = noisy_classes()
    path = run_cells(
        Cells(Layout(LinearHead(2, 3, False), 1), "gradient", 1.0, 5, "relu", ()), fits, 400, lam, 0.3, 0.3, 1.0
    )
    v, w = [path.v[i][-1] for i in range(2)], path.w[-1]
    slopes = [fit.problem.gradient(v[i], fit.weights) for i, fit in enumerate(fits)]
    if lam < 1:  # with the ½ of Eq. 11: F + ½ (v - w)'Λ (v - w), and w the mean of v
        for i in range(2):
            torch.testing.assert_close(slopes[i], lam * (w - v[i]), rtol=0, atol=1e-6)
        torch.testing.assert_close(w, torch.stack(v).mean(0), rtol=0, atol=1e-6 if lam > 1e-6 else 1.0)
        assert (v[0] - v[1]).norm() > 0.1
    else:
        torch.testing.assert_close(slopes[0] + slopes[1], torch.zeros_like(w), rtol=0, atol=1e-6)
        for one in v:
            torch.testing.assert_close(one, w, rtol=0, atol=1e-6)


def test_with_matching_scales_squared_loss_and_squares_take_the_same_steps() -> None:
    """20 samples with 2 outputs each: the loss is 2 / 40 of the squares, and so must be Λ, rho and eta."""
    steps = {**BEGIN, "solve": "gradient", "solve_steps": 4}
    scale = 2 / (20 * 2)
    scaled = {name: scale * BEGIN[name] for name in ("lam", "rho", "eta")}
    one = trained("forecasting", Learn2pFed(**steps), mode="stacked")
    other = trained("forecasting", Learn2pFed(**{**steps, **scaled}, fit="loss"), mode="stacked")
    torch.testing.assert_close(other.server.w, one.server.w, rtol=1e-9, atol=1e-12)
    size = one.task.space.size
    for i in range(3):
        ours, theirs = other.store.get(i), one.store.get(i)
        torch.testing.assert_close(ours.x, theirs.x, rtol=1e-9, atol=1e-12)
        # The outer loss is a mean over outputs too, and Λ itself, not its logarithm, is learned.
        torch.testing.assert_close(2 * ours.slope[size:], theirs.slope[size:], rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(2 * scale * ours.slope[:size], theirs.slope[:size], rtol=1e-8, atol=1e-12)


@settings(max_examples=4)
@given(
    task=st.sampled_from(["classification", "own loss"]),
    outer=st.sampled_from(["train", "folds"]),
    name=st.sampled_from(["lam", "rho", "eta", "theta"]),
    rho=st.sampled_from([0.1, 2.0]),
)
def test_slopes_of_the_task_loss_agree_with_finite_differences(task: str, outer: Any, name: str, rho: float) -> None:
    algorithm = Learn2pFed(**{**BEGIN, **LOSS, "rho": rho, "cells": 2}, positive="log", outer=outer, folds=2)
    run = trained(task, algorithm, mode="stacked")
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * len(run.federation))
    before = sum(whole.leaves[1][other].numel() for other in FAMILIES[: FAMILIES.index(name)])
    leaf, h, ends = whole.leaves[1][name], 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            leaf[0] += sign * h
        ends.append(whole.loss().item())
        with torch.no_grad():
            leaf[0] -= sign * h
    meant = (ends[0] - ends[1]) / (2 * h)
    assert float(run.store.get(1).slope[before]) == pytest.approx(meant, rel=1e-4, abs=1e-8)

"""Variational dropout: a mask belongs to a sample for a whole solve, also when the solver drops other samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.equilibrium import (
    SOLVERS,
    Equilibrium,
    VariationalDropout,
    VariationalDropout2d,
    auxiliary_loss,
    correction_loss,
)
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import random


class Masked(nn.Module):
    """f(z, x) = s ∘ dropout(z) / 2 + x, where s differs by sample, so that samples converge at different times."""

    def __init__(self, dropout: nn.Module):
        super().__init__()
        self.dropout = dropout
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.sizes: list[int] = []
        self.mask: Tensor | None = None

    def forward(self, z: Tensor, x: Tensor, s: Tensor) -> Tensor:
        self.sizes.append(len(z))
        out: Tensor = self.w * s * self.dropout(z) + x
        self.mask = self.dropout.mask  # type: ignore[assignment]
        return out


def closed_form(f: Masked, x: Tensor, s: Tensor) -> Tensor:
    """The fixed point with the masks of the last pass: z = x / (1 - w s m), entry by entry."""
    assert f.mask is not None
    return x / (1 - f.w * s * f.mask)


def different(n: int, *shape: int) -> tuple[Tensor, Tensor]:
    x = random(n, *shape)
    s = torch.linspace(0.02, 0.98, n, dtype=torch.float64)[torch.randperm(n)]
    return x, s.view(n, *(1 for _ in shape)) * (0.5 + 0.5 * random(n, *shape, seed=2).sigmoid())


@pytest.mark.parametrize("solver", SOLVERS)
def test_masks_follow_their_samples_when_others_have_converged(solver: str) -> None:
    torch.manual_seed(0)
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, solver=solver, tol=1e-11, limit=2000)
    x, s = different(12, 6)
    out = layer(x, s)
    assert len(set(f.sizes)) > 2  # fewer and fewer samples: the case that matters
    expected = closed_form(f, x, s)
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-8)
    assert set(f.mask.unique().tolist()) == {0.0, 2.0}  # type: ignore[union-attr]
    (found,) = torch.autograd.grad(out.square().sum(), f.w)
    (exact,) = torch.autograd.grad(expected.square().sum(), f.w)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


def test_every_pass_has_new_masks_and_evaluation_none() -> None:
    torch.manual_seed(0)
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, tol=1e-11, limit=200)
    x, s = different(4, 30)
    first, second = layer(x, s), layer(x, s)
    assert not torch.equal(first, second)
    layer.eval()
    torch.testing.assert_close(layer(x, s), x / (1 - f.w * s), rtol=1e-8, atol=1e-8)
    layer.train()
    f.dropout.p = 0.0  # type: ignore[assignment]
    torch.testing.assert_close(layer(x, s), x / (1 - f.w * s), rtol=1e-8, atol=1e-8)


def test_whole_channels_are_dropped_in_two_dimensions() -> None:
    torch.manual_seed(0)
    f = Masked(VariationalDropout2d(0.5))
    x, s = different(8, 6, 3, 4)
    out = Equilibrium(f, solver="plain", tol=1e-11, limit=2000)(x, s)
    assert f.mask.shape == (8, 6, 1, 1)  # type: ignore[union-attr]
    torch.testing.assert_close(out, closed_form(f, x, s), rtol=1e-8, atol=1e-8)
    with pytest.raises(EquipoiseError, match="images of 4 axes"):
        VariationalDropout2d(0.5)(torch.ones(2, 3))


def test_the_share_of_zeros_is_p_and_the_mean_is_kept() -> None:
    torch.manual_seed(0)
    out = VariationalDropout(0.3)(torch.ones(100, 1000))
    assert float((out == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(out.mean()) == pytest.approx(1, abs=0.02)


def test_outside_an_equilibrium_it_is_ordinary_dropout() -> None:
    torch.manual_seed(0)
    layer, x = VariationalDropout(0.5), torch.ones(3, 20)
    assert not torch.equal(layer(x), layer(x))
    assert layer.mask is None


def test_a_dropout_that_is_used_in_f_and_outside_draws_anew_outside() -> None:
    torch.manual_seed(0)
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, tol=1e-11, limit=200)
    x, s = different(4, 30)
    layer(x, s)
    assert (f.dropout.mask, f.dropout.rows, f.dropout.samples) == (None, None, None)
    ones = torch.ones_like(x)
    first, second = f.dropout(ones), f.dropout(ones)
    assert not torch.equal(first, f.mask)  # type: ignore[arg-type]
    assert not torch.equal(first, second)
    f.dropout(ones[:, :7])  # of another shape as well


@pytest.mark.parametrize("gradient", ["implicit", "neumann", "phantom", "jacobian-free", "unroll"])
def test_a_backward_pass_after_another_call_has_the_masks_of_its_own_forward_pass(gradient: Any) -> None:
    """Two calls, then both backward passes: in closed form, d/dw x / (1 - w s m) = s m x / (1 - w s m)²."""
    torch.manual_seed(0)
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, gradient=gradient, solver="plain", tol=1e-13, limit=200, phantom_steps=200, damping=0.9)
    x, s = different(4, 6)
    outs, expected = [], []
    for scale in (1, 2):
        outs.append(layer(scale * x, s))
        m = s * f.mask  # type: ignore[operator]
        one_step = m * scale * x / (1 - f.w * m)
        expected.append((one_step if gradient == "jacobian-free" else one_step / (1 - f.w * m)).sum())
    for out, exact in zip(outs, expected, strict=True):
        (found,) = torch.autograd.grad(out.sum(), f.w)
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=0)


class Checkpointed(Masked):
    def forward(self, z: Tensor, x: Tensor, s: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, z, x, s, use_reentrant=False)
        return out


def test_a_checkpoint_in_f_is_refused_and_one_around_the_layer_has_the_same_masks() -> None:
    torch.manual_seed(0)
    x, s = different(4, 6)
    inside = Equilibrium(Checkpointed(VariationalDropout(0.5)), tol=1e-11, limit=200)(x, s)
    with pytest.raises(EquipoiseError, match="around the whole equilibrium layer"):
        inside.sum().backward()
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, tol=1e-11, limit=200)
    outs, expected = [], []
    for scale in (1, 2):
        outs.append(checkpoint(layer, scale * x, s, use_reentrant=False))
        expected.append(closed_form(f, scale * x, s).sum())
    for out, value in zip(outs, expected, strict=True):
        (found,) = torch.autograd.grad(out.sum(), f.w)
        torch.testing.assert_close(found, torch.autograd.grad(value, f.w)[0], rtol=1e-6, atol=0)
    f.dropout.generator = torch.Generator().manual_seed(0)  # which a checkpoint does not restore
    with pytest.raises(EquipoiseError, match="own source of random numbers"):
        checkpoint(layer, x, s, use_reentrant=False).sum().backward()
    assert f.dropout.passes == 0


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Equilibrium(Masked(VariationalDropout(0.5)), solver="plain", tol=1e-12, limit=2000)

    def forward(self, z: Tensor, x: Tensor, s: Tensor) -> Tensor:
        out: Tensor = self.inner(x + 0.4 * s * torch.tanh(z), s)
        return out


def test_masks_last_for_the_pass_of_the_outer_of_two_equilibria() -> None:
    """With m, the mask of the whole pass: z = (x + 0.4 s tanh z) / (1 - w s m)."""
    torch.manual_seed(0)
    f = Nested()
    outer = Equilibrium(f, solver="plain", tol=1e-11, limit=2000)
    x, s = different(12, 6)
    out = outer(x, 0.5 * s).detach()
    masked = f.inner.f
    expected = (x + 0.2 * s * torch.tanh(out)) / (1 - masked.w * 0.5 * s * masked.mask)
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-8)
    assert masked.dropout.passes == 0


def test_the_jacobian_and_the_states_on_the_way_have_the_same_masks() -> None:
    torch.manual_seed(0)
    f = Masked(VariationalDropout(0.5))
    layer = Equilibrium(f, solver="plain", tol=0, limit=3, jacobian_weight=1)
    layer.budget = 3
    x, s = different(4, 6)
    states = layer.states(x, s, at=(0, 1))
    m = f.w * s * f.mask  # type: ignore[operator]
    for found, expected in zip(states, (x, m * x + x, m * (m * x + x) + x), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(auxiliary_loss(layer), m.square().mean())  # J is diagonal, so the estimate is exact
    assert correction_loss(states, torch.sum).requires_grad


def test_masks_come_from_the_generator_that_a_run_gives() -> None:
    x, s = different(4, 6)
    masks = []
    for seed in (1, 1, 2):
        f = Masked(VariationalDropout(0.5))
        f.dropout.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(len(masks))
        Equilibrium(f)(x, s)
        masks.append(f.mask)
    assert torch.equal(masks[0], masks[1])  # type: ignore[arg-type]
    assert not torch.equal(masks[0], masks[2])  # type: ignore[arg-type]
    copied = copy.deepcopy(f)
    assert copied.dropout.mask is None
    assert copied.dropout.generator is None


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = VariationalDropout(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(z.reshape(-1, 2)).reshape(z.shape) * 0.1 + x
        return out


@pytest.mark.parametrize("p", [-0.1, 1, 1.5, "half", None])
def test_bad_probabilities_are_named(p: Any) -> None:
    with pytest.raises(EquipoiseError, match="the probability of a dropout must be >= 0 and < 1"):
        VariationalDropout(p)


def test_inputs_without_a_row_per_sample_are_an_error_and_not_a_wrong_mask() -> None:
    with pytest.raises(EquipoiseError, match="one row per sample"):
        Equilibrium(Mixed(), tol=1e-6)(torch.randn(3, 4))


def test_the_warning_of_ordinary_dropout_names_the_one_for_equilibria() -> None:
    with pytest.warns(UserWarning, match="and VariationalDropout"):
        Equilibrium(Masked(nn.Dropout(0.5)))

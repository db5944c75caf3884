"""Unusual calls of a layer: tensors that f hides, autocast, layers in layers, states changed in place, inference."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from equipoise.equilibrium import Equilibrium, VariationalDropout, WarmStart, spectral_norm, weight_norm
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import Dense, random

MODES = ("implicit", "jacobian-free", "phantom", "neumann", "reversible", "unroll")


class Scaled(nn.Module):
    """Uses a tensor that is neither an input nor a parameter."""

    scale: Tensor

    def forward(self, z: Tensor, x: Tensor, scales: Any = None) -> Tensor:
        return torch.tanh(0.3 * z * (self.scale if scales is None else scales[0]) + x)


@pytest.mark.parametrize("gradient", ["implicit", "neumann", "phantom", "jacobian-free"])
@pytest.mark.parametrize("listed", [False, True])
def test_tensors_that_a_module_hides_are_refused_within_transforms(gradient: str, listed: bool) -> None:
    f = Scaled()
    layer = Equilibrium(f, gradient=gradient)

    def loss(s: Tensor) -> Tensor:
        f.scale = s
        out: Tensor = layer(random(2, 3), *([[s]] if listed else [])).sum()
        return out

    with pytest.raises(EquipoiseError, match="f may not use tensors that learn except its inputs"):
        grad(loss)(torch.tensor(0.7).double())


@pytest.mark.parametrize("listed", [False, True])
def test_tensors_that_a_module_hides_are_refused_by_reversible(listed: bool) -> None:
    f = Scaled()
    f.scale = torch.tensor(0.7).double().requires_grad_()
    layer = Equilibrium(f, gradient="reversible", limit=4)
    with pytest.raises(EquipoiseError, match="with gradient = 'reversible', f may not use tensors that learn"):
        layer(random(2, 3).requires_grad_(), *([[f.scale]] if listed else []))
    with torch.no_grad():
        layer(random(2, 3))


class Inner(Dense):
    """Has tensors in the middle of f that no operation in sight has made."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda a: torch.tanh(a))(self.b(z) + x)


@pytest.mark.parametrize("f", [Inner(), weight_norm(Dense())])
def test_other_modules_are_not_refused(f: nn.Module) -> None:
    x = random(2, 5)
    expected = Equilibrium(f, gradient="unroll", limit=80)
    found = grad(lambda x: Equilibrium(f, tol=1e-12, limit=100)(x).square().sum())(x)
    given = x.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(expected(given).square().sum(), given)[0])


@pytest.mark.parametrize("f", [Inner(), weight_norm(Dense()), spectral_norm(Dense())])
def test_other_modules_are_not_refused_by_reversible(f: nn.Module) -> None:
    layer = Equilibrium(f, gradient="reversible", limit=4, tol=0.0)
    layer(random(2, 5)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in f.parameters())


@pytest.mark.parametrize("gradient", MODES)
def test_every_gradient_works_under_autocast(gradient: str) -> None:
    f, x = Dense().float(), random(3, 5).float()

    class Half(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(f.b(z)) + x.bfloat16()  # of another dtype than z

    module = Half()
    module.f = f
    layer = Equilibrium(module, gradient=gradient, limit=20, phantom_steps=10, damping=0.8)
    given = x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.quiet = True
        out = layer(given)
    (found,) = torch.autograd.grad(out.float().sum(), f.b.weight)
    assert found.isfinite().all()
    assert found.abs().sum() > 0


def test_regularisation_that_cannot_work_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Equilibrium(Dense(), jacobian_weight=1)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = 0.1 * z + self.inner(x)
            return out

    with pytest.raises(EquipoiseError, match="an equilibrium within an equilibrium cannot have a jacobian_weight"):
        Equilibrium(Outer())
    for gradient in ("unroll", "reversible"):
        with pytest.raises(EquipoiseError, match="jacobian_at = 'random-step' needs the guesses of a solver"):
            Equilibrium(Dense(), gradient=gradient, jacobian_weight=1, jacobian_at="random-step")


def test_dropout_within_a_transform_is_refused_without_advice_that_does_not_help() -> None:
    layer = Equilibrium(nn.Sequential(VariationalDropout(0.5)))
    with pytest.raises(EquipoiseError, match=r"^variational dropout does not work within transforms"):
        grad(lambda x: layer(x).sum())(random(2, 3))


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), torch.zeros_like(x)


@pytest.mark.parametrize("gradient", MODES)
def test_parts_of_a_state_may_be_changed_in_place(gradient: str) -> None:
    layer = Equilibrium(lambda z, x: (0.1 * z[1] + x, 0.1 * z[0] - x), gradient=gradient, guess=two)
    x = random(3, 4).requires_grad_()
    expected = torch.relu(layer(x)[0])
    a, _ = layer(x)
    torch.relu_(a)
    found = (torch.autograd.grad(out.sum(), x)[0] for out in (a, expected))
    assert torch.equal(*found)


def test_parts_with_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(EquipoiseError, match=r"must have one row per sample each; their shapes are \(2, 4\), \(3, 4\)"):
        Equilibrium(lambda z, x: (z[0][:2], z[1]), guess=two)(random(3, 4))


def test_a_warm_start_from_inference_mode_can_be_used_in_training() -> None:
    layer, x = Equilibrium(Dense(), tol=1e-8, limit=100), random(3, 5)
    warm = WarmStart(layer, 3)
    with torch.inference_mode(), warm.at([0, 1, 2]):
        layer(x)
    with warm.at([0, 1, 2]):
        layer(x).sum().backward()
    assert layer.last is not None
    assert layer.last.iterations.max() <= 2

"""States of several tensors: the same numbers as with one long vector, in every mode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from equipoise.equilibrium import SOLVERS, Equilibrium, WarmStart, solve
from equipoise.errors import EquipoiseError
from tests.support.fixed_points import EXACT, Dense, random

MODES = ("implicit", "jacobian-free", "phantom", "neumann", "reversible", "unroll")


class Scales(nn.Module):
    """`Dense` on 7 numbers per sample, which are 4 fine ones and an image of 1 x 3 coarse ones."""

    def __init__(self, join: Callable[[Any], Tensor], split: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.dense, self.join, self.split = Dense(width=7), join, split

    def forward(self, z: Any, x: Tensor) -> Any:
        out = self.dense(self.join(z), x)
        return self.split(out[:, :4], out[:, 4:].reshape(len(x), 1, 3))


class Pair(NamedTuple):
    fine: Tensor
    coarse: Tensor


STRUCTURES: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor, Tensor], Any]]] = {
    "tuple": (lambda z: torch.cat([z[0], z[1].flatten(1)], 1), lambda a, b: (a, b)),
    "list": (lambda z: torch.cat([z[0], z[1].flatten(1)], 1), lambda a, b: [a, b]),
    "named": (lambda z: torch.cat([z.fine, z.coarse.flatten(1)], 1), Pair),
    "dict": (lambda z: torch.cat([z["a"], z["b"].flatten(1)], 1), lambda a, b: {"a": a, "b": b}),
    "nested": (lambda z: torch.cat([z[0][0], z[1]["b"].flatten(1)], 1), lambda a, b: ((a,), {"b": b})),
}


def scales(structure: str = "tuple") -> tuple[Scales, Callable[[Tensor], Any]]:
    join, split = STRUCTURES[structure]
    return Scales(join, split), lambda x: split(x.new_zeros(len(x), 4), x.new_zeros(len(x), 1, 3))


def settings_of(gradient: str) -> dict[str, Any]:
    return {"gradient": gradient, "phantom_steps": 3, "tol": 1e-9, "limit": 40}


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("structure", list(STRUCTURES))
def test_the_result_and_the_gradient_are_those_of_one_long_vector(structure: str, gradient: str) -> None:
    f, guess = scales(structure)
    x, v = random(3, 7), random(3, 7, seed=2)
    results = []
    for layer in (Equilibrium(f, guess=guess, **settings_of(gradient)), Equilibrium(f.dense, **settings_of(gradient))):
        given_x = x.clone().requires_grad_()
        out = layer(given_x)
        flat = out if isinstance(out, Tensor) else f.join(out)
        if not isinstance(out, Tensor):
            assert type(out) is type(guess(x))
        found = torch.autograd.grad((flat * v).sum(), [given_x, *f.parameters()])
        assert layer.last is not None
        results.append([flat.detach(), *found, layer.last.iterations, layer.last.residual])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_guess_of_the_call_and_the_solver_alone(solver: str) -> None:
    f, guess = scales()
    x = random(3, 7)
    fine, coarse = Equilibrium(f, solver=solver, **EXACT)(x, z=guess(x))
    assert (fine.shape, coarse.shape) == ((3, 4), (3, 1, 3))
    expected = Equilibrium(f.dense, solver=solver, **EXACT)(x)
    torch.testing.assert_close(f.join((fine, coarse)), expected, rtol=1e-12, atol=1e-12)
    found = solve(f, guess(x), [x], solver=solver, **EXACT)
    torch.testing.assert_close(f.join(found.f), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.z, found.f, rtol=1e-7, atol=1e-7)


def test_a_warm_start_remembers_it() -> None:
    f, guess = scales()
    layer = Equilibrium(f, guess=guess, **EXACT)
    x = random(5, 7)
    warm = WarmStart(nn.Sequential(layer), 5)
    with warm.at([0, 1, 2]):
        layer(x[:3])
    other = WarmStart(nn.Sequential(layer), 5)
    other.load(warm.tensors())
    with other.at([4, 2, 0]):
        layer(x[[4, 2, 0]])
    assert layer.last is not None
    assert [int(k) == 1 for k in layer.last.iterations] == [False, True, True]


def test_another_shape_than_the_input_can_be_remembered_too() -> None:
    layer = Equilibrium(lambda z, x: 0.5 * z + x[:, :2], guess=lambda x: x.new_zeros(len(x), 2), **EXACT)
    x = random(3, 4)
    warm = WarmStart(layer, 3)
    for _ in range(2):
        with warm.at([0, 1, 2]):
            torch.testing.assert_close(layer(x), 2 * x[:, :2], rtol=1e-8, atol=1e-8)
    assert layer.last is not None
    assert layer.last.iterations.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("z", "complaint"),
    [
        ((), "has no tensors"),
        ((torch.zeros(3, 4), 1.0), "must consist of tensors, but has a float"),
        ((torch.zeros(3, 4), torch.zeros(2, 1)), "there are 3 rows of torch.float32 on cpu and 2 rows"),
        ((torch.zeros(3, 4), torch.zeros(3, 1).double()), "there are 3 rows of torch.float32 on cpu and 3 rows"),
        ((torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)), "must be a floating-point tensor"),
        ((torch.zeros(3, 4), torch.zeros(())), "with one row per sample"),
    ],
)
def test_a_guess_that_is_no_state_is_refused(z: Any, complaint: str) -> None:
    with pytest.raises(EquipoiseError, match=complaint):
        Equilibrium(lambda z: z)(z=z)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (lambda a, b: (a,), r"the structure of z; z is a tuple of 2, f\(z\) a tuple of 1"),
        (lambda a, b: [a, b], r"z is a tuple of 2, f\(z\) a list of 2"),
        (lambda a, b: a, r"z is a tuple of 2, f\(z\) a single tensor"),
        (lambda a, b: (b, a), r"a tensor of z has \(4,\) per sample, that of f\(z\) has \(1, 3\)"),
        (lambda a, b: (a, None), r"must consist of tensors, but has a NoneType"),
    ],
)
def test_a_function_that_returns_another_state_is_refused(value: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(EquipoiseError, match=complaint):
        Equilibrium(lambda z, x: value(*z))(random(3, 4), z=(torch.zeros(3, 4), torch.zeros(3, 1, 3)))


def test_a_change_in_place_is_still_noticed() -> None:
    with pytest.raises(EquipoiseError, match="changes z in place"):
        Equilibrium(lambda z: (z[0].add_(1), z[1]))(z=(torch.zeros(3, 4), torch.zeros(3, 2)))

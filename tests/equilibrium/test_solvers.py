"""Fixed points: every solver on every problem, sample by sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchdeq.solver import get_solver

from equipoise.equilibrium import SOLVERS, Anderson, Broyden, Plain, solve
from equipoise.errors import EquipoiseError
from equipoise.models.blocks import EquilibriumBlock
from tests.support.fixed_points import random


@dataclass
class Problem:
    f: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    limit: int
    solution: Tensor | None = None

    def solve(self, solver: Any, tol: float = 1e-10, **given: Any) -> Any:
        start = torch.zeros_like(self.x)
        return solve(self.f, start, [self.x], solver=solver, tol=tol, **{"limit": self.limit, **given})


def linear(eigenvalues: Tensor, limit: int) -> Problem:
    """z = A z + x with A symmetric, so that z = (I - A)⁻¹ x."""
    d = len(eigenvalues)
    q = torch.linalg.qr(random(d, d)).Q
    a = q @ eigenvalues.diag() @ q.T
    x = random(6, d, seed=1)
    return Problem(lambda z, x: z @ a + x, x, limit, torch.linalg.solve(torch.eye(d).double() - a, x.T).T)


def tanh() -> Problem:
    b = random(7, 7, seed=2)
    b *= 0.9 / torch.linalg.matrix_norm(b, ord=2)
    return Problem(lambda z, x: torch.tanh(z @ b.T + x), random(6, 7, seed=3), 500)


def convolutional() -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        block = EquilibriumBlock(8, 16, "softplus").double().requires_grad_(False)
    return Problem(block, random(6, 8, 5, 4, seed=5), 500)


SOLVABLE: dict[str, Callable[[], Problem]] = {
    "linear": lambda: linear(torch.linspace(-0.8, 0.8, 8).double(), 500),
    "tanh": tanh,
    "convolutional": convolutional,
    "ill-conditioned": lambda: linear(torch.linspace(-0.9, 0.999, 8).double(), 50_000),
}


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("problem", list(SOLVABLE))
def test_every_solver_solves_every_problem(name: str, problem: str) -> None:
    p = SOLVABLE[problem]()
    found = p.solve(SOLVERS[name]())
    assert found.converged.all()
    assert found.finite.all()
    assert (found.iterations >= 1).all()
    assert (found.iterations < p.limit).all()
    difference = (p.f(found.z, p.x) - found.z).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.f, p.f(found.z, p.x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.residual, difference / found.f.flatten(1).norm(dim=1), rtol=1e-3, atol=1e-14)
    assert (found.residual <= 1e-10).all()
    if p.solution is not None:  # the error is the residual times at most the condition of I - A
        assert (found.z - p.solution).norm() <= 2e3 * 1e-10 * p.solution.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anderson", "broyden"])
@pytest.mark.parametrize(("problem", "factor"), [("linear", 2), ("ill-conditioned", 10)])
def test_acceleration_saves_iterations(name: str, problem: str, factor: int) -> None:
    p = SOLVABLE[problem]()
    fast, plain = p.solve(SOLVERS[name]()), p.solve(Plain())
    assert factor * int(fast.iterations.max()) < int(plain.iterations.max())


@pytest.mark.parametrize("name", ["anderson", "broyden"])
@pytest.mark.parametrize("problem", list(SOLVABLE))
def test_the_same_fixed_points_as_torchdeq(name: str, problem: str) -> None:
    p = SOLVABLE[problem]()
    # Their ridge is absolute: with the usual 1e-4 it stops all progress once residuals are smaller than that.
    theirs, _, _ = get_solver(name)(
        lambda z: p.f(z, p.x), torch.zeros_like(p.x), max_iter=2000, tol=1e-12, stop_mode="rel", lam=1e-20
    )
    ours = p.solve(SOLVERS[name](), tol=1e-12)
    torch.testing.assert_close(ours.f, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", list(SOLVERS))
def test_without_a_fixed_point_it_says_so_and_stays_finite(name: str) -> None:
    x = random(3, 4).abs() + 1
    moved = solve(lambda z, x: z + x, torch.zeros_like(x), [x], solver=SOLVERS[name](), tol=1e-3, limit=30)
    assert not moved.converged.any()
    assert (moved.iterations == 30).all()
    assert moved.finite.all()
    assert moved.z.isfinite().all()
    assert (moved.residual > 1e-3).all()


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_sample_that_explodes_harms_nobody_else(name: str) -> None:
    """f(z) = 2 z² + 1 has no fixed point and leaves the numbers; 0.5 z + x has one."""
    explodes = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)

    def f(z: Tensor, x: Tensor, explodes: Tensor) -> Tensor:
        return torch.where(explodes > 0, 2 * z.square() + 1, 0.5 * z + x)

    x = random(3, 5)
    found = solve(f, torch.zeros_like(x), [x, explodes], solver=SOLVERS[name](), tol=1e-12, limit=100)
    assert found.converged.tolist() == [True, False, True]
    assert found.z.isfinite().all()
    assert found.f.isfinite().all()
    torch.testing.assert_close(found.z[[0, 2]], 2 * x[[0, 2]], rtol=1e-10, atol=1e-10)


def test_what_begins_outside_the_numbers_is_no_solution() -> None:
    x = torch.tensor([[1.0], [torch.nan]])
    found = solve(lambda z, x: 0.5 * z + x, torch.zeros_like(x), [x])
    assert found.converged.tolist() == [True, False]
    assert found.finite.tolist() == [True, False]
    assert found.residual[1] == torch.inf
    assert int(found.iterations[1]) == 1


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("problem", ["linear", "tanh", "convolutional"])
def test_a_sample_takes_the_same_way_alone_and_in_a_batch(name: str, problem: str) -> None:
    p = SOLVABLE[problem]()
    p.x = p.x * torch.logspace(0, 1, len(p.x)).double().view(-1, *(1 for _ in p.x.shape[1:]))
    together = p.solve(SOLVERS[name]())
    assert together.iterations.unique().numel() > 1
    for k in range(len(p.x)):
        alone = solve(
            p.f, torch.zeros_like(p.x[k : k + 1]), [p.x[k : k + 1]], solver=SOLVERS[name](), tol=1e-10, limit=500
        )
        assert int(alone.iterations) == int(together.iterations[k])
        torch.testing.assert_close(alone.z[0], together.z[k], rtol=1e-9, atol=1e-11)


def test_f_is_computed_for_the_samples_still_at_work() -> None:
    """z ← λ z + x takes as long as λ is near one; those that are done are neither moved nor computed."""
    rates = torch.tensor([0.0, 0.3, 0.6, 0.9, 0.95], dtype=torch.float64).unsqueeze(1)
    calls: list[int] = []

    def f(z: Tensor, rate: Tensor) -> Tensor:
        calls.append(len(z))
        return rate * z + 1

    found = solve(f, torch.zeros(5, 3).double(), [rates], solver=Plain(), tol=1e-6, limit=1000)
    assert found.iterations.tolist() == sorted(found.iterations.tolist())
    assert sum(calls) < 1.2 * int(found.iterations.sum())
    assert calls[0] == 5
    assert calls[-1] == 1
    whole: list[int] = []

    def closure(z: Tensor) -> Tensor:
        whole.append(len(z))
        return rates * z + 1

    again = solve(closure, torch.zeros(5, 3).double(), solver=Plain(), tol=1e-6, limit=1000)
    assert set(whole) == {5}
    assert torch.equal(again.z, found.z)  # frozen where it was done, however often f was computed since
    assert torch.equal(again.iterations, found.iterations)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("name", list(SOLVERS))
def test_with_no_tolerance_the_limit_is_used_up(name: str, k: int) -> None:
    p = tanh()
    found = p.solve(SOLVERS[name](), tol=0.0, limit=k)
    assert (found.iterations == k).all()
    if name == "plain":
        z = torch.zeros_like(p.x)
        for _ in range(k):
            z = p.f(z, p.x)
        assert torch.equal(found.f, z)  # k iterations are k applications of f


def test_the_best_guess_is_kept_where_the_last_is_worse() -> None:
    """Rotation by a right angle, stretched: every guess is worse than the one before."""
    turn = torch.tensor([[0.0, -1.5], [1.5, 0.0]]).double()
    x = torch.tensor([[1.0, 2.0]]).double()
    found = solve(lambda z, x: z @ turn + x, torch.zeros(1, 2).double(), [x], solver=Plain(), tol=1e-6, limit=12)
    residuals, z = [], torch.zeros(1, 2).double()
    for _ in range(12):
        f = z @ turn + x
        residuals.append((f - z).norm() / f.norm())
        z = f
    assert not found.converged.any()
    torch.testing.assert_close(found.residual[0], min(residuals))


def test_anderson_is_exact_on_a_linear_problem_as_soon_as_it_has_seen_all_directions() -> None:
    """It is then GMRES (Walker and Ni, 2011, Theorem 2.2): d differences span everything."""
    d = 5
    a = random(d, d, seed=8)
    x = random(4, d, seed=9)
    p = Problem(lambda z, x: z @ a.T + x, x, 50, torch.linalg.solve(torch.eye(d).double() - a, x.T).T)
    assert torch.linalg.eigvals(a).abs().max() > 1  # no contraction at all
    found = p.solve(Anderson(window=d + 1, ridge=0.0), tol=1e-9)
    assert int(found.iterations.max()) <= d + 2
    torch.testing.assert_close(found.z, p.solution, rtol=1e-6, atol=1e-7)


def test_anderson_with_two_guesses_is_the_secant_method() -> None:
    """One number, no ridge: z ← f - r (f - f') / (r - r'), worked out by hand."""
    found = []
    z_before, z, f = 1.0, math.cos(1.0), math.cos
    for _ in range(4):
        r_before, r = f(z_before) - z_before, f(z) - z
        z_before, z = z, f(z) - r * (f(z) - f(z_before)) / (r - r_before)
        found.append(z)
    for k, expected in enumerate(found):
        ours = solve(torch.cos, torch.ones(1, 1).double(), solver=Anderson(window=2, ridge=0.0), tol=0.0, limit=k + 3)
        assert float(ours.z) == pytest.approx(expected, rel=1e-9) or float(ours.residual) < 1e-15


@pytest.mark.parametrize("mixing", [0.2, 0.7, 1.0])
def test_mixing_goes_part_of_the_way(mixing: float) -> None:
    p = tanh()
    two = p.solve(Plain(mixing=mixing), tol=0.0, limit=2)
    torch.testing.assert_close(two.z, mixing * p.f(torch.zeros_like(p.x), p.x))
    first = p.solve(Anderson(mixing=mixing), tol=0.0, limit=2)
    torch.testing.assert_close(first.z, two.z)
    assert p.solve(Anderson(mixing=mixing)).converged.all()
    # Against weights that sum to one (FL-DEQ, Eqs. 7-8): α by a least-squares problem of its own.
    for row, x in enumerate(p.x):
        guesses, images = [torch.zeros(7).double()], []
        for _ in range(5):
            images.append(p.f(guesses[-1][None], x[None])[0])
            q = torch.stack([f - z for f, z in zip(images, guesses, strict=True)], 1)[:, -3:]
            ones = torch.ones(1, q.shape[1]).double()
            system = torch.cat([torch.cat([q.T @ q, ones.T], 1), torch.cat([ones, torch.zeros(1, 1).double()], 1)])
            right = torch.cat([torch.zeros(q.shape[1]), torch.ones(1)]).double()
            alpha = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:-1, 0]
            z, f = torch.stack(guesses, 1)[:, -3:] @ alpha, torch.stack(images, 1)[:, -3:] @ alpha
            guesses.append((1 - mixing) * z + mixing * f)
        ours = solve(
            p.f,
            torch.zeros(1, 7).double(),
            [x[None]],
            solver=Anderson(window=3, ridge=0.0, mixing=mixing),
            tol=0.0,
            limit=4,
        )
        torch.testing.assert_close(ours.z[0], guesses[3], rtol=1e-5, atol=1e-7, msg=f"sample {row}")


def test_a_singular_window_is_no_obstacle() -> None:
    """All samples start at their fixed point but for one coordinate: differences are parallel, or zero."""
    a = torch.diag(torch.tensor([0.5, 0.0, 0.0, 0.0])).double()
    x = torch.zeros(3, 4).double()
    start = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [-2, 0, 0, 0]]).double()
    for ridge in (0.0, 1e-4):
        found = solve(lambda z, x: z @ a + x + 1, start, [x], solver=Anderson(window=5, ridge=ridge), tol=0.0, limit=30)
        torch.testing.assert_close(found.z, torch.tensor([[2.0, 1, 1, 1]] * 3).double(), rtol=1e-9, atol=1e-9)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.floats(0.1, 0.95))
@settings(max_examples=40)
def test_a_contraction_is_solved_at_least_as_fast_as_banach_promises(seed: int, n: int, d: int, rate: float) -> None:
    b = random(d, d, seed=seed)
    b *= rate / torch.linalg.matrix_norm(b, ord=2)
    x = random(n, d, seed=seed + 1)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ b.T + x)

    exact = solve(f, torch.zeros_like(x), [x], solver=Plain(), tol=1e-14, limit=5000).z
    for k in (1, 3, 10):
        some = solve(f, torch.zeros_like(x), [x], solver=Plain(), tol=0.0, limit=k)
        bound = rate**k / (1 - rate) * f(torch.zeros_like(x), x).norm(dim=1)
        assert ((some.f - exact).norm(dim=1) <= bound + 1e-12).all()
    for solver in (Anderson(), Broyden()):
        fast = solve(f, torch.zeros_like(x), [x], solver=solver, tol=1e-10, limit=2000)
        assert fast.converged.all()
        assert ((fast.z - exact).norm(dim=1) <= 1e-10 / (1 - rate) * fast.f.norm(dim=1) + 1e-12).all()


@pytest.mark.parametrize("name", list(SOLVERS))
def test_the_layout_of_images_changes_nothing_but_the_layout(name: str) -> None:
    p = convolutional()
    usual = p.solve(SOLVERS[name]())
    p.x = p.x.contiguous(memory_format=torch.channels_last)
    last = p.solve(SOLVERS[name]())
    assert last.z.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last.z, usual.z, rtol=1e-8, atol=1e-10)


def test_a_guess_near_the_solution_saves_iterations() -> None:
    p = linear(torch.linspace(-0.8, 0.8, 8).double(), 500)
    assert p.solution is not None
    cold = p.solve(Anderson())
    near = solve(p.f, p.solution + 1e-6, [p.x], tol=1e-10, limit=500)
    there = solve(p.f, p.solution, [p.x], tol=1e-10, limit=500)
    assert (near.iterations < cold.iterations).all()
    assert (there.iterations == 1).all()


def test_f_must_return_what_it_was_given() -> None:
    with pytest.raises(EquipoiseError, match=r"f\(z\) must have the shape of z; z has \(4, 3\), f\(z\) has \(4, 2\)"):
        solve(lambda z: z[:, :2], torch.zeros(4, 3))


@pytest.mark.parametrize("shape", [(0, 3), (2,), (2, 0)])
def test_batches_without_samples_and_samples_without_axes(shape: tuple[int, ...]) -> None:
    found = solve(lambda z: 0.5 * z + 1, torch.zeros(shape).double(), tol=1e-12, limit=100)
    assert found.z.shape == shape
    assert found.converged.all()
    torch.testing.assert_close(found.z, torch.full(shape, 2.0).double())


@pytest.mark.parametrize(
    ("solver", "given", "complaint"),
    [
        (Anderson, {"window": 1}, "window = 1 is not allowed; it must be a whole number >= 2"),
        (Anderson, {"mixing": 0.0}, "mixing = 0.0 is not allowed"),
        (Broyden, {"window": 0}, "window = 0 is not allowed"),
        (Plain, {"windw": 3}, "unknown setting Plain.windw"),
    ],
)
def test_settings_are_checked(solver: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EquipoiseError, match=complaint):
        solver(**given)

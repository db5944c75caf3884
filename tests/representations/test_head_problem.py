"""The problem of a linear head: losses, derivatives and bounds, for one client and for a stack of uneven ones."""

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.losses import LOSSES, Loss
from equipoise.representations.head_problem import HeadProblem, HeadSamples, groups_of
from tests.support.unrolled import mean_pseudo_huber, pseudo_huber

INPUTS, OUTPUTS = 3, 2
KINDS = {
    # Of quantiles there are several outputs for each number of a target.
    **{name: loss for name, loss in LOSSES.items() if loss.pinball is None},
    "own": Loss(mean_pseudo_huber, pseudo_huber),
    "own mean": Loss(mean_pseudo_huber, None),
}
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def samples(kind: str, n: int, groups: int, blocks: bool, draw: torch.Generator) -> HeadSamples:
    x = torch.randn(max(n, 1), INPUTS, generator=draw).double()
    y = torch.randn(max(n, 1), OUTPUTS, generator=draw).double()
    y = y.argmax(1) if kind == "cross-entropy" else y
    return HeadSamples(x, y, n, groups_of(n, groups, blocks), torch.Size([OUTPUTS]), OUTPUTS)


def problem(kind: str, sizes: list[int], groups: int = 1, blocks: bool = False, seed: int = 0) -> HeadProblem:
    draw = torch.Generator().manual_seed(seed)
    clients = tuple(samples(kind, n, groups, blocks, draw) for n in sizes)
    return HeadProblem(clients, len(sizes) > 1, KINDS[kind])


def means(given: HeadProblem) -> Tensor:
    """Weights with which each group counts by its mean."""
    return given.members / given.members.sum(-1, keepdim=True).clamp(min=1)


@given(count=st.integers(0, 20), groups=st.integers(1, 8), blocks=st.booleans())
def test_every_sample_is_in_one_group_and_groups_are_even(count: int, groups: int, blocks: bool) -> None:
    found = [list(range(count))[group] for group in groups_of(count, groups, blocks)]
    assert sorted(chain.from_iterable(found)) == list(range(count))
    sizes = [len(group) for group in found]
    assert max(sizes) - min(sizes) <= 1
    for group in found:
        gaps = {b - a for a, b in pairwise(group)}
        assert gaps <= ({1} if blocks else {groups})


@settings(max_examples=25)
@given(kind=st.sampled_from([*KINDS]), sizes=SIZES, groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_losses_are_those_of_each_clients_groups(kind: str, sizes: list[int], groups: int, seed: int) -> None:
    if kind == "own mean":
        sizes = sizes[:1]  # it is known for one client at a time
    given = problem(kind, sizes, groups, blocks=bool(seed % 2), seed=seed)
    v = torch.randn(*given.members.shape[:-1], INPUTS, OUTPUTS).double()
    found, slopes = given.losses(v, means(given)), given.gradient(v, means(given))
    found, slopes = (t if given.stacked else t[None] for t in (found, slopes))
    for k, client in enumerate(given.clients):
        for g, group in enumerate(client.groups):
            head = (v if given.stacked else v[None])[k, g].clone().requires_grad_()
            x, y = client.features[group], client.y[group]
            meant = given.loss.mean(x @ head, y) if len(x) else 0 * head.sum()
            torch.testing.assert_close(found[k, g], meant.detach())
            torch.testing.assert_close(slopes[k, g], torch.autograd.grad(meant, head)[0])


@settings(max_examples=10)
@given(kind=st.sampled_from([*KINDS]), sizes=SIZES, seed=st.integers(0, 99))
def test_derivatives_of_every_order_agree_with_finite_differences(kind: str, sizes: list[int], seed: int) -> None:
    """The gradient is checked as a function of head and features, for which its own derivatives are needed."""
    given = problem(kind, sizes[: 1 if kind == "own mean" else None], groups=2, seed=seed)
    v = torch.randn(*given.members.shape[:-1], INPUTS, OUTPUTS).double().requires_grad_()

    def gradient(v: Tensor, *features: Tensor) -> Tensor:
        pairs = zip(given.clients, features, strict=True)
        changed = tuple(HeadSamples(f, c.y, c.count, c.groups, c.output_shape, c.outputs) for c, f in pairs)
        return HeadProblem(changed, given.stacked, given.loss).gradient(v, means(given))

    features = [client.features.clone().requires_grad_() for client in given.clients]
    assert torch.autograd.gradcheck(gradient, (v, *features), atol=1e-6)


@settings(max_examples=25)
@given(kind=st.sampled_from(["cross-entropy", "squared", "own"]), sizes=SIZES, seed=st.integers(0, 99))
def test_smoothness_bounds_the_second_derivatives(kind: str, sizes: list[int], seed: int) -> None:
    """For cross-entropy half of the largest eigenvalue of X'X / n; for squares it is attained."""
    given = problem(kind, sizes, seed=seed)
    single = HeadProblem(given.clients[:1], False, given.loss)
    client, weights = given.clients[0], means(single)
    bound = given.smoothness(means(given))
    bound = (bound if given.stacked else bound[None])[0, 0].item()
    v = torch.randn(INPUTS, OUTPUTS).double()
    hessian: Any = torch.autograd.functional.hessian(lambda t: single.losses(t[None], weights).sum(), v)
    largest = torch.linalg.eigvalsh(hessian.reshape(INPUTS * OUTPUTS, -1)).max().item()
    assert largest <= bound * (1 + 1e-9)
    moments = client.features.T @ client.features / len(client.y)
    factor = {"cross-entropy": 0.5, "squared": 2 / OUTPUTS, "own": 1.0}[kind]
    assert bound == pytest.approx(factor * torch.linalg.eigvalsh(moments).max().item())
    if kind == "squared":
        assert largest == pytest.approx(bound)


def test_a_client_that_is_not_finite_spoils_only_its_own_numbers() -> None:
    given = problem("cross-entropy", [3, 4])
    given.clients[0].features[0, 0] = torch.nan
    found = given.smoothness(means(given)).flatten()
    assert found[0].isnan()
    assert found[1].isfinite()
    v = torch.zeros(2, 1, INPUTS, OUTPUTS).double()
    assert given.gradient(v, means(given))[1].isfinite().all()


def test_targets_at_every_position_and_at_the_last_one() -> None:
    """A text with one target per position counts by the mean over positions; one with one target by its last one."""
    x = torch.randn(4, 5, INPUTS).double()
    y = torch.randint(OUTPUTS, (4, 5))
    every = HeadSamples(x, y, 4, groups_of(4, 2, False), torch.Size([5, OUTPUTS]), OUTPUTS)
    last = HeadSamples(x[:, -1:], y[:, -1], 4, groups_of(4, 2, False), torch.Size([1, OUTPUTS]), OUTPUTS)
    v = torch.randn(2, INPUTS, OUTPUTS).double()
    for client, rows, targets in ((every, x, y), (last, x[:, -1:], y[:, -1:])):
        given = HeadProblem((client,), False, LOSSES["cross-entropy"])
        for g in range(2):
            meant = torch.nn.functional.cross_entropy((rows[g::2] @ v[g]).flatten(0, 1), targets[g::2].flatten())
            torch.testing.assert_close(given.losses(v, means(given))[g], meant)
            moments = rows[g::2].flatten(0, 1).T @ rows[g::2].flatten(0, 1) / targets[g::2].numel()
            torch.testing.assert_close(
                given.smoothness(means(given))[g, 0, 0], 0.5 * torch.linalg.eigvalsh(moments).max()
            )
        moments = client.moments()
        assert moments.n.flatten().tolist() == [targets[0::2].numel(), targets[1::2].numel()]

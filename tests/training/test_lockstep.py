"""Vectors that move in lock-step on the same batches, against plain torch, and what else is measured at a model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.algorithms import FedAvg, Local
from equipoise.algorithms._prototypes import Alignment
from equipoise.algorithms.local_data import BatchGradient, LocalData
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import ContractiveLinear
from equipoise.errors import EquipoiseError
from equipoise.executors.base import ClientJob
from equipoise.executors.stacked_trainer import StackWorker
from equipoise.models.base import BodyAndHead
from equipoise.optimizers import moved
from equipoise.state import State
from equipoise.training.batches import batch_indices, batch_order
from equipoise.training.buffers import BUFFERS
from tests.support.problems import simulation, small_mlp

WHO = (0, 2, 5)
"""Fewer samples than a batch, and several ragged batches: stacked clients wait for each other."""
MODES = pytest.mark.parametrize("mode", ["threads", "stacked"])


def work(run: Simulation, does: Callable[[LocalData], State], who: Sequence[int] = WHO) -> list[State]:
    """What is made of the data of these clients, in either mode."""
    jobs = [ClientJob(i, State(), State()) for i in who]
    if run.mode == "threads":
        try:
            return list(run.executor.pool.each(lambda own, job: does(run.executor._work(own, 1, job, "batches")), jobs))
        finally:
            run.close()
    with torch.no_grad():
        found = does(run.executor._trainer(StackWorker(run.executor.module), 1, jobs, "batches"))
    run.close()
    return [found.row(k) for k in range(len(jobs))]


def made(mode: str, **settings: Any) -> Simulation:
    return simulation(Local(**{"lr": 0.1, "epochs": 2, "batch": 4, **settings}), mode=mode)


def start(run: Simulation, data: LocalData) -> Tensor:
    return run.task.w0.expand(*data.size.shape[:-1], -1)


def plans(run: Simulation, who: int, count: int, stream: int = 0, **how: Any) -> list[list[Tensor]]:
    """The samples of `count` batches in each step, all drawn from one generator."""
    own = run.federation.train[who]
    rng = batch_order(0, 1, run.federation.names[who], "batches", stream)
    size = how.pop("size", 4)
    orders = [batch_indices(len(own), min(size, len(own)), 2, None, rng, **how) for _ in range(count)]
    return [[torch.from_numpy(own[row[row >= 0]]) for row in rows] for rows in zip(*orders, strict=True)]


def gradient(run: Simulation, v: Tensor, samples: Tensor, loss: Callable[..., Tensor] = F.cross_entropy) -> Tensor:
    """By autograd, on a module that shares nothing with the run."""
    module = run.task.to_module(v).double().train()
    module.zero_grad()
    loss(module(run.federation.x[samples]), run.federation.y[samples]).backward()
    return run.task.space.vector(_gradients(module), torch.float64)


def _gradients(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.data = p.grad
    return module


def coupled(s: State, grad: BatchGradient) -> State:
    """Three gradients on two batches, one of them at a mixture; and a number that changes with the first step."""
    middle = 0.3 * s.v + 0.7 * s.w
    q = grad(s.w, 1) + grad(middle, 1)
    number = s.number + (s.v * q).sum(-1, keepdim=True)
    return State(w=s.w - 0.1 * grad(s.w), v=s.v - 0.2 * q, number=number)


@MODES
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_walk_is_what_is_done_by_hand(mode: str, decay: float) -> None:
    run = made(mode, weight_decay=decay)

    def walk(data: LocalData) -> State:
        w = start(run, data)
        return data.walk(State(w=w, v=2 * w, number=torch.zeros_like(data.size)), coupled, batches=2, stream=3)

    for who, found in zip(WHO, work(run, walk), strict=True):
        state = State(w=run.task.w0, v=2 * run.task.w0, number=torch.zeros(1).double())
        for batches in plans(run, who, 2, stream=3):
            state = coupled(state, lambda v, k=0, b=batches: gradient(run, v, b[k]) + decay * v)
        for name in state:
            torch.testing.assert_close(found[name], state[name], rtol=1e-9, atol=1e-11)


@MODES
def test_a_walk_along_the_gradient_is_descend_to_the_bit(mode: str) -> None:
    """If more batches are drawn in each step, the first ones are the same, if elsewhere in memory."""
    run = made(mode)

    def both(data: LocalData) -> State:
        w = start(run, data)
        alone = data.walk(State(w=w), lambda s, grad: State(w=moved(s.w, grad(s.w), 0.1)), stream=2)
        first = data.walk(State(w=w), lambda s, grad: State(w=moved(s.w, grad(s.w), 0.1)), stream=2, batches=3)
        return State(walked=alone.w, first=first.w, descended=data.descend(w, stream=2))

    for found in work(run, both):
        assert torch.equal(found.walked, found.descended)
        torch.testing.assert_close(found.first, found.descended, rtol=1e-12, atol=1e-14)


@MODES
def test_passes_over_a_part_of_the_samples_in_batches_of_another_size(mode: str) -> None:
    run = made(mode)

    def walk(data: LocalData) -> State:
        w = start(run, data)
        return data.walk(State(w=w), lambda s, grad: State(w=s.w - 0.1 * grad(s.w)), size=3, portion=0.8)

    for who, found in zip(WHO, work(run, walk), strict=True):
        w, seen = run.task.w0, 0
        for [samples] in plans(run, who, 1, size=3, portion=0.8):
            w = w - 0.1 * gradient(run, w, samples)
            seen += len(set(samples.tolist()))
        assert seen == 2 * int(0.8 * len(run.federation.train[who]))
        torch.testing.assert_close(found.w, w, rtol=1e-9, atol=1e-11)


def test_a_part_of_the_samples_is_another_in_each_pass_and_never_empty() -> None:
    order = batch_indices(10, 10, 2, None, torch.Generator().manual_seed(0), portion=0.7)
    sets = [set(row[row >= 0].tolist()) for row in order]
    assert [len(chosen) for chosen in sets] == [7, 7]
    assert sets[0] != sets[1]
    assert (batch_indices(2, 2, 1, None, torch.Generator(), portion=0.1) >= 0).sum() == 1


@MODES
def test_a_term_in_place_of_the_loss(mode: str) -> None:
    run = made(mode, weight_decay=0.5)  # which is no part of the term
    c = torch.arange(24.0).double().view(3, 8) / 24

    def walk(data: LocalData) -> State:
        lead = data.size.shape[:-1]
        pull = Alignment(given=State(c=c.expand(*lead, -1, -1), weight=torch.ones(3).double().expand(*lead, -1)))
        return data.walk(State(w=start(run, data)), lambda s, grad: State(w=s.w - grad(s.w)), term=pull)

    for who, found in zip(WHO, work(run, walk), strict=True):
        w = run.task.w0
        for [samples] in plans(run, who, 1):
            body = run.task.to_module(w).double().body
            h = body(run.federation.x[samples])
            (h - c[run.federation.y[samples]]).square().mean(-1).mean().backward()
            slope = torch.cat([p.grad.flatten() for p in body.parameters()])
            w = w - run.task.space.join(slope, torch.zeros(27).double())
        torch.testing.assert_close(found.w, w, rtol=1e-9, atol=1e-11)


@MODES
def test_clients_outside_a_mask_do_not_move_and_cost_nothing(mode: str) -> None:
    run = made(mode)
    counts: list[int] = []

    def walk(data: LocalData) -> State:
        step = lambda s, grad: State(w=s.w - 0.1 * grad(s.w) - 0.1 * grad(s.w))  # noqa: E731
        w = data.walk(State(w=start(run, data)), step, active=data.size > 5).w
        none = data.walk(State(w=w), step, active=data.size < 0).w
        counts.extend(data.samples.tolist())  # type: ignore[attr-defined]
        return State(w=w, none=none)

    found = work(run, walk)
    assert [bool((each.w != run.task.w0).any()) for each in found] == [False, True, True]
    assert all(torch.equal(each.w, each.none) for each in found)
    lengths = run.federation.train.lengths
    assert counts == [0, 4 * lengths[2], 4 * lengths[5]]  # two gradients in each of two passes


@MODES
def test_losses_and_gradients_at_a_model(mode: str) -> None:
    run, who = made(mode), (0, 1, 4)

    def measured(data: LocalData) -> State:
        w = start(run, data)
        losses = {of: data.loss(w, of=of) for of in ("train", "validation")}
        return State(losses, squares=data.gradient_squares(w))

    module = small_mlp().double()
    for i, found in zip(who, work(run, measured, who), strict=True):
        for of in ("train", "validation"):
            own = torch.from_numpy(getattr(run.federation, of)[i])
            expected = F.cross_entropy(module(run.federation.x[own]), run.federation.y[own]).item() if len(own) else 0.0
            assert float(found[of]) == pytest.approx(expected, rel=1e-10)
        batches = plans(run, i, 1)
        once = batches[: len(batches) // 2]
        squares = sum(float(gradient(run, run.task.w0, samples).square().sum()) for [samples] in once)
        assert float(found.squares) == pytest.approx(squares, rel=1e-10)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda s, grad: State(w=s.w - grad(s.w)), r"returns \['w'\]; it must return .*\['n', 'w'\]"),
        (lambda s, grad: State(s, n=s.n + 1 + 0 * (grad(s.w) if s.n < 1 else s.w)[..., :1]), "every step must ask"),
    ],
)
def test_steps_that_cannot_be_are_refused(step: Any, sentence: str) -> None:
    run = made("threads")
    with pytest.raises(EquipoiseError, match=sentence):
        work(run, lambda data: data.walk(State(w=run.task.w0, n=torch.zeros(1).double()), step))


def test_a_walk_without_a_model_is_refused() -> None:
    run = made("threads")
    with pytest.raises(EquipoiseError, match=r"Local calls data.walk without a vector of the model's shape"):
        work(run, lambda data: data.walk(State(n=data.size), lambda s, grad: s))


def test_each_vector_has_statistics_of_its_own() -> None:
    """Those of two models that walk side by side are those of two models that were trained one after the other."""
    layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
    run = simulation(FedAvg(lr=0.1, epochs=2, batch=4), module=BodyAndHead(layers, nn.Linear(6, 3)))
    down = run.algorithm.init_server(run.start)
    buffers = run.task.buffer_layout.shared(run.task.buffers)
    job = ClientJob(5, State(**{BUFFERS: run.task.buffers}), State(down, **{BUFFERS: buffers}))

    def side_by_side(s: State, grad: BatchGradient) -> State:
        w, v = moved(s.w, grad(s.w), 0.1), moved(s.v, grad(s.v), 0.1)
        grad(5 * s.v)  # leaves no trace
        return State(w=w, v=v)

    def does(own: Any, job: ClientJob) -> list[Tensor]:
        data = run.executor._work(own, 1, job, "batches")
        data.load_buffers(job.client, job.down)
        w, v = down.w, 3 * down.w
        alone = [data.descend(each) for each in (w, v)]
        together = data.walk(State(w=w, v=v), side_by_side)
        for found, expected in zip((together.w, together.v), alone, strict=True):
            assert torch.equal(found, expected)
            assert torch.equal(data.tracker.of(found), data.tracker.of(expected))
        return [data.tracker.of(each) for each in alone]

    [[of_w, of_v]] = run.executor.pool.each(does, [job])
    run.close()
    assert not torch.equal(of_w, of_v)


def test_constraints_hold_after_each_step() -> None:
    """Weights that are projected stay within their ball, those of the second vector, too."""
    module = BodyAndHead(ContractiveLinear(5, 6, 0.05), nn.Linear(6, 3))
    run = simulation(Local(lr=1.0, epochs=2, batch=4), module=module)

    def side_by_side(s: State, grad: BatchGradient) -> State:
        return State(w=moved(s.w, grad(s.w), 1.0), v=moved(s.v, grad(s.v), 1.0), free=s.free - grad(s.w)[:1])

    def walk(data: LocalData) -> State:
        w, free = run.task.w0, torch.zeros(1).double()
        found = data.walk(State(w=w, v=-w, free=free), side_by_side)
        for each in (found.w, found.v):
            rows = run.task.space.views(each)["body.weight"].abs().sum(1)
            assert rows.max() == pytest.approx(0.05)
        assert torch.equal(found.w, data.descend(w))
        return found

    work(run, walk)

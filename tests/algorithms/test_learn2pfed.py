"""Learn2pFed: the unrolled network against the same network differentiated in one place, and what its theory says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from equipoise.algorithms import Learn2pFed, Local
from equipoise.data.federation import Federation, RaggedIndices, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.state import State
from tests.support.problems import LeastSquares, linear_module, simulation, small_mlp
from tests.support.unrolled import BEGIN, FAMILIES, TASKS, central, check_gradients, gap, trained

SQUARES = ["regression", "forecasting", "classification"]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sets": "each", "positive": "log"},
    {"outer": "validation", "follow": ("eta", "theta")},
    {"outer": "folds", "folds": 3, "positive": "log"},
    {"solve": "gradient", "solve_steps": 3},
]


@pytest.mark.parametrize("mode", ["stacked", "threads"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())) or "plain")
@pytest.mark.parametrize("task", SQUARES)
def test_the_exact_way_back_is_that_of_the_whole_network(task: str, variant: dict[str, Any], mode: str) -> None:
    if variant.get("outer") == "validation" and task == "regression":
        with pytest.raises(EquipoiseError, match="no client has any"):
            trained(task, Learn2pFed(**BEGIN, **variant), mode=mode)
        return
    run = trained(task, Learn2pFed(**BEGIN, **variant), mode=mode)
    whole = central(run)
    whole.start([run.algorithm.init_client(run.start).raw] * len(run.federation))
    check_gradients(run, whole)


@pytest.mark.parametrize("task", SQUARES)
def test_the_local_way_back_takes_w_for_a_constant(task: str) -> None:
    run = trained(task, Learn2pFed(**BEGIN, backward="local"), mode="stacked")
    whole = central(run)
    whole.start([run.algorithm.init_client(run.start).raw] * len(run.federation))
    check_gradients(run, whole, detach=True)
    exact = trained(task, Learn2pFed(**BEGIN), mode="stacked")
    assert gap(run.store.get(0).slope, exact.store.get(0).slope) > 1e-4  # which is not the gradient
    assert run.counters.bytes_up * 2 == exact.counters.bytes_up


def test_finite_differences_agree() -> None:
    algorithm = Learn2pFed(**BEGIN, positive="log", outer="folds", folds=2)
    run = trained("regression", algorithm)
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * 3)
    h = 1e-6
    for name, k in (("lam", 1), ("rho", 0), ("eta", 0), ("theta", 0)):
        leaf = whole.leaves[1][name]
        with torch.no_grad():
            leaf[k] += h
            above = whole.loss()
            leaf[k] -= 2 * h
            below = whole.loss()
            leaf[k] += h
        place = {"lam": k, "rho": 3, "eta": 4, "theta": 5}[name]
        assert float(run.store.get(1).slope[place]) == pytest.approx(float((above - below) / (2 * h)), rel=1e-5)


def test_what_is_tied_follows_the_sum_of_all_gradients() -> None:
    settings = {**BEGIN, "positive": "log", "outer_lr": 0.1, "outer_clip": 0.0}
    free = trained("regression", Learn2pFed(**settings))
    tied = trained("regression", Learn2pFed(**settings, tied=("lam", "rho"), learn=("lam",)))
    total = sum(free.store.get(i).slope for i in range(3))
    start = free.algorithm.init_client(free.start).raw
    torch.testing.assert_close(tied.server.tied, torch.cat([start[:3] - 0.1 * total[:3], start[3:4]]))
    for i in range(3):
        torch.testing.assert_close(tied.store.get(i).raw, start)  # nothing is left for a client to learn
    second = trained("regression", Learn2pFed(**settings, tied=("lam",), learn=("lam",)), rounds=2)
    assert not torch.equal(second.server.tied, tied.server.tied[:3])


@pytest.mark.slow
@settings(max_examples=15)
@given(
    rate=st.sampled_from([0.01, 1.0, 5.0]),
    rule=st.sampled_from(["sgd", "adam"]),
    outer=st.sampled_from(["train", "folds"]),
    seed=st.integers(0, 3),
)
def test_learnables_stay_positive_and_finite(rate: float, rule: Any, outer: Any, seed: int) -> None:
    algorithm = Learn2pFed(**BEGIN, outer=outer, folds=2, outer_lr=rate, outer_optimizer=rule, decay_after=1000)
    run = trained("regression", algorithm, rounds=6, seed=seed, mode="stacked")
    for i in range(3):
        lam, *scalars = algorithm.shown_state(
            run.store.get(i), algorithm.broadcast(run.server, i), run.task.space
        ).values()
        assert (lam >= 0).all()
        assert all((t > 0).all() and t.isfinite().all() for t in (*scalars, run.store.get(i).raw.exp()))
    assert (run.server.share[-1] > 0).all()


@pytest.mark.parametrize("mode", ["stacked", "threads"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_clients_without_validation_samples_take_part_and_learn_nothing(task: str, mode: str) -> None:
    federation, module, loss = TASKS[task]
    federation = federation()
    one = RaggedIndices(
        [federation.train[i][: 2 * (i > 0)] for i in range(len(federation))]
    )  # all but the first have some
    run = simulation(
        Learn2pFed(**BEGIN, outer="validation"), replace(federation, validation=one), module(), loss=loss, mode=mode,
        rounds=1, participation=1.0,
    )  # fmt: skip
    run.run()
    assert run.store.get(1).slope.any()


def test_exact_with_warm_starts_and_partial_participation() -> None:
    """The second epoch goes on where the first ended; who was not there before begins at w."""
    algorithm = Learn2pFed(**BEGIN, warm=True, positive="log")
    federation, module, loss = TASKS["regression"]
    run = simulation(algorithm, federation(), module(), loss=loss, rounds=2, participation=1.0, mode="stacked")
    assert run.advance()
    w, states = run.server.w, [run.store.get(i) for i in range(3)]
    late = State(run.algorithm.init_client(run.start))
    run.store.put(2, late)  # as if it had not been there
    raws, server = [run.store.get(i).raw for i in range(3)], run.server
    assert run.advance()
    run.close()
    whole = central(run)
    whole.start(raws)
    for own, i in zip(whole.leaves, range(3), strict=True):
        own["p"].data.copy_(server.raw[0, :, i])
        own["gamma"].data.copy_(server.raw[1, :, i])
    begin = [tuple(s.x.unbind(0)) for s in states[:2]] + [(torch.zeros_like(w), w, torch.zeros_like(w))]
    meant = whole.gradients(start=(w, begin))
    for i in range(3):
        assert gap(run.store.get(i).slope, torch.cat([meant[i][name] for name in FAMILIES])) < 1e-9
        assert gap(run.server.slope[:, :, i], torch.stack([meant[i]["p"], meant[i]["gamma"]])) < 1e-9


# What the cells come to, the learnables standing still.


def still(problem: LeastSquares, **settings: Any) -> Simulation:
    settings = {"cells": 400, "learn": (), "rho": 2.0, "eta": 2.0, "gamma": 1.0, "theta": 1.0, **settings}
    algorithm = Learn2pFed(backward="local", draw=False, **settings)
    run = simulation(
        algorithm,
        problem.federation(),
        linear_module(problem.features),
        loss="squared",
        mode="stacked",
        rounds=1,
        participation=1.0,
    )
    run.run()
    return run


def test_without_ties_cells_end_at_each_clients_least_squares(problem: LeastSquares) -> None:
    run = still(problem, lam=1e-9)
    for i in range(problem.clients):
        np.testing.assert_allclose(run.store.get(i).x[1, 0, :, 0], problem.local(i), rtol=1e-6)


@pytest.mark.slow
def test_with_the_strongest_ties_cells_end_at_one_model(problem: LeastSquares) -> None:
    run = still(problem, lam=1e9, cells=500)
    squares = [(len(x) * x.T @ x, len(x) * x.T @ y) for x, y in zip(problem.x, problem.y, strict=True)]  # p_i = n_i / N
    w = np.linalg.solve(sum(a for a, _ in squares), sum(b for _, b in squares))
    np.testing.assert_allclose(run.server.w[0, :, 0], w, rtol=1e-6)
    for i in range(problem.clients):
        np.testing.assert_allclose(run.store.get(i).x[1, 0, :, 0], w, rtol=1e-6)


@pytest.mark.slow
def test_in_between_they_end_where_the_sum_of_fits_and_ties_is_smallest(problem: LeastSquares) -> None:
    lam = 3.0
    run = still(problem, lam=lam, cells=500)
    w, sizes = run.server.w[0, :, 0].numpy(), np.array([len(x) for x in problem.x])
    v = np.stack([run.store.get(i).x[1, 0, :, 0].numpy() for i in range(problem.clients)])
    for i, (x, y) in enumerate(zip(problem.x, problem.y, strict=True)):
        np.testing.assert_allclose(x.T @ (x @ v[i] - y) + lam * (v[i] - w), 0, atol=1e-5)
    np.testing.assert_allclose(w, np.average(v, axis=0, weights=sizes), rtol=1e-6)


def lagrangians(problem: LeastSquares, cells: int, **settings: Any) -> np.ndarray:
    """Cell after cell: the sum of p (½|Xv - Y|² + ½ z'Λz + rho/2 (|r + alpha|² - |alpha|²)), r = z - v + w."""
    found = []
    for depth in range(1, cells + 1):
        run = still(problem, cells=depth, **settings)
        w, lam, rho = run.server.w[0, :, 0].numpy(), settings["lam"], settings["rho"]
        total = 0.0
        for i, (x, y) in enumerate(zip(problem.x, problem.y, strict=True)):
            alpha, v, z = run.store.get(i).x[:, 0, :, 0].numpy()
            r = z - v + w
            fit = ((x @ v - y) ** 2).sum() / 2 + lam * (z @ z) / 2
            total += len(x) * (fit + rho / 2 * (((r + alpha) ** 2).sum() - (alpha**2).sum()))
        found.append(total)
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_the_lagrangian_falls_along_the_cells_where_rho_is_large(problem: LeastSquares, lam: float) -> None:
    smooth = max(np.linalg.eigvalsh(x.T @ x).max() for x in problem.x)
    rho = 2 * max(smooth, lam)
    values = lagrangians(problem, 25, lam=lam, rho=rho, eta=rho)
    assert (np.diff(values[1:]) <= 1e-9 * abs(values[1])).all()


def test_the_lagrangian_can_rise_where_rho_is_small_against_the_ties(problem: LeastSquares) -> None:
    values = lagrangians(problem, 8, lam=1.0, rho=0.01, eta=0.01)
    assert (np.diff(values) > 0).any()


# What learning on held-out folds finds.


def polynomials() -> Federation:
    """Ten clients y = a_0 + b_i x + noise: what is added is shared, the slope is not."""
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(10):
        x = rng.uniform(-1, 1, size=(30, 1)) ** np.arange(2)
        y = x @ np.array([1.0, rng.uniform(-5, 5)]) + 0.5 * rng.normal(size=30)
        parts.append({"train": (x, y), "test": (x, y)})
    return from_clients(parts)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [(), ("lam",)], ids=["own", "tied"])
def test_judged_on_folds_shared_coefficients_end_with_the_stronger_ties(tied: Any) -> None:
    ones = {"rho": 1.0, "eta": 1.0, "gamma": 1.0, "theta": 1.0, "lam": 1.0, "draw": False}
    algorithm = Learn2pFed(
        **ones, outer="folds", positive="log", warm=True, learn=("lam",), tied=tied,
        outer_optimizer="adam", outer_lr=0.1, decay_after=1000,
    )  # fmt: skip
    run = simulation(
        algorithm, polynomials(), linear_module(2), loss="squared", mode="stacked", rounds=60, participation=1.0,
        evaluate_every=60,
    )  # fmt: skip
    run.run()
    lam = np.stack(
        [
            algorithm.shown_state(run.store.get(i), algorithm.broadcast(run.server, i), run.task.space)["lam"]
            for i in range(10)
        ]
    )
    above = np.mean(lam[:, 0, None] > lam[:, 1])  # the area under the ROC curve
    assert above == 1 if tied else above > 0.9  # a client's slope may happen to be near the mean of all


# Messages, and what can go wrong.


def test_bytes_are_those_of_the_vectors_that_were_announced() -> None:
    run = trained("regression", Learn2pFed(**BEGIN), rounds=2)
    numbers = 3 + 1 + 1  # the vector, <u, u_bar>, and the number of samples
    assert run.counters.bytes_up == 2 * 6 * 3 * numbers * 8
    assert run.counters.bytes_down == 2 * 6 * 3 * (3 + 1) * 8  # the vector, and the phase
    assert {name: shape for name, (shape, _) in run.schema.up.items()} == {"u": (1, 3, 1), "s": (1,), "weight": (1,)}


def test_who_fails_within_a_round_is_left_out_of_the_rest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.executors.threaded import ThreadedExecutor

    calls: dict[int, int] = {}
    inner = ThreadedExecutor.train

    def train(self: Any, round: int, jobs: Any, stopped: Any) -> Any:
        for done in inner(self, round, jobs, stopped):
            calls[done.who] = calls.get(done.who, 0) + 1
            bad = done.who == 1 and calls[1] == 3
            yield type(done)(done.who, done.held, done.upload, 0, finite=not bad)

    monkeypatch.setattr(ThreadedExecutor, "train", train)
    run = trained("regression", Learn2pFed(**BEGIN))
    assert calls == {0: 6, 1: 3, 2: 6}
    assert run.lines[-1]["left_out"] == 1
    assert torch.equal(run.store.get(1).raw, run.algorithm.init_client(run.start).raw)
    assert not torch.equal(run.store.get(0).raw, run.algorithm.init_client(run.start).raw)
    assert not run.server.first[:, :, 1].any()  # nor does the server learn from half of its way back
    assert torch.equal(run.server.raw[:, :, 1], run.algorithm.init_server(run.start).raw[:, :, 1])
    assert not torch.equal(run.server.raw[:, :, 0], run.algorithm.init_server(run.start).raw[:, :, 0])


@pytest.mark.slow
def test_what_was_learned_is_kept_for_readers_and_drawn(tmp_path: Path) -> None:
    from equipoise.reporting import plots
    from equipoise.storage.run_index import find_runs

    run = trained("forecasting", Learn2pFed(**BEGIN), folder=tmp_path / "run")
    shown = load_file(tmp_path / "run" / "shown.safetensors")
    assert shown["lam"].shape == shown["begin.lam"].shape == (3, 12)
    start = run.algorithm.init_client(run.start).raw
    torch.testing.assert_close(shown["begin.lam"], start[:12].expand(3, -1))
    torch.testing.assert_close(shown["rho"][1], run.store.get(1).raw[12:13].exp())
    plots.draw("learned", find_runs([tmp_path / "run"]), tmp_path / "lam.png")
    assert (tmp_path / "lam.png").read_bytes().startswith(b"\x89PNG")
    other = simulation(Local(), folder=tmp_path / "other")
    other.run()
    assert not (tmp_path / "other" / "shown.safetensors").exists()
    with pytest.raises(EquipoiseError, match="none of these runs has learned"):
        plots.draw("learned", find_runs([tmp_path / "other"]), tmp_path / "none.png")


def test_a_head_of_several_layers_is_refused() -> None:
    module = BodyAndHead(nn.Identity(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    with pytest.raises(EquipoiseError, match="one submodule, a linear layer of which nothing is frozen"):
        simulation(Learn2pFed(), LeastSquares().federation(), module, loss="squared")


def test_a_head_that_is_no_submodule_or_partly_frozen_is_refused() -> None:
    module = small_mlp()
    with pytest.raises(EquipoiseError, match="one submodule"):
        simulation(Learn2pFed(), module=module, head=["head.weight", "head.bias"])
    module.head.bias.requires_grad_(False)
    with pytest.raises(EquipoiseError, match="nothing is frozen"):
        simulation(Learn2pFed(), module=module)


def test_tied_families_need_gradients_that_travel() -> None:
    with pytest.raises(EquipoiseError, match="backward = 'exact'"):
        Learn2pFed(tied=("lam",), backward="local")


@pytest.mark.slow
def test_newcomers_get_the_cells_with_what_was_learned_for_all(problem: LeastSquares) -> None:
    federation = from_clients(
        [{"train": (x, y), "test": (x, y)} for x, y in zip(problem.x, problem.y, strict=True)],
        names=["a", "b", "c", "new"],
    )
    federation = replace(federation, unseen=frozenset({"new"}))
    ones = {"rho": 1.0, "eta": 1.0, "gamma": 1.0, "theta": 1.0, "draw": False}
    algorithm = Learn2pFed(**ones, cells=300, lam=1e9, learn=(), backward="local")
    run = simulation(algorithm, federation, linear_module(3), loss="squared", rounds=1, participation=1.0)
    assert run.advance()
    model, _ = next(iter(run.executor.models(1, [run.job(3)], "unseen")))
    run.close()
    assert model is not None
    np.testing.assert_allclose(model.vector, run.server.w[0, :, 0], rtol=1e-4)  # tied as it is, it takes w over

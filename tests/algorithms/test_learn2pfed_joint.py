"""Learn2pFed's joint training: the body moves by the gradient of the outer loss, through all cells of all clients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.algorithms import Learn2pFed
from equipoise.data.federation import RaggedIndices, from_clients
from equipoise.models.base import BodyAndHead
from tests.support.problems import classification, simulation, small_mlp
from tests.support.unrolled import BEGIN, LOSS, central, forecasting, gap, trained

JOINT: dict[str, Any] = {"network": "joint", "lr": 0.1}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"solve": "gradient", "solve_steps": 3},
    LOSS,
    {**LOSS, "outer": "validation"},
    {**LOSS, "outer": "folds", "folds": 2, "sets": "each"},
    {"outer": "folds", "folds": 2, "backward": "local"},
]


def body_steps(run: Any) -> list[torch.Tensor]:
    """How far each client's body has moved in the round."""
    space = run.task.space
    return [space.body(run.store.get(i).coming - run.store.get(i).network) for i in range(len(run.federation))]


@pytest.mark.parametrize("mode", ["stacked", "threads"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())) or "plain")
def test_the_body_moves_by_the_gradient_of_the_whole_network(variant: dict[str, Any], mode: str) -> None:
    algorithm = Learn2pFed(**BEGIN, **JOINT, **variant)
    run = trained("classification", algorithm, mode=mode)
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * len(run.federation))
    steps = body_steps(run)
    for step, meant in zip(steps, whole.body_gradients(detach=algorithm.backward == "local"), strict=True):
        assert gap(step, -0.1 * meant) < 1e-9
    assert all(step.any() for step in steps)
    head = run.task.space.head
    assert all(torch.equal(head(run.store.get(i).coming), head(run.task.w0)) for i in range(4))


def test_the_step_is_that_of_the_algorithms_own_rule_and_remembers() -> None:
    """Two epochs against torch.optim, with the rate of the schedule; network and head always belong together."""
    settings = {**BEGIN, **JOINT, **LOSS, "optimizer": "adam", "weight_decay": 0.01, "learn": ()}
    algorithm = Learn2pFed(**settings, schedule={"kind": "exponential", "ratio": 0.5})
    runs = [trained("classification", algorithm, rounds=rounds, mode="threads") for rounds in (1, 2)]
    bodies = []
    for run in runs:
        whole = central(run)
        whole.start([algorithm.init_client(run.start).raw] * 4)
        bodies.append(whole.body_gradients())
    space = runs[0].task.space
    for i in range(4):
        parameter = space.body(runs[0].task.w0).clone().requires_grad_()
        rule = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.01)
        for run, gradients, lr in zip(runs, bodies, (0.1, 0.05), strict=True):
            torch.testing.assert_close(space.body(run.store.get(i).network), parameter.detach())
            rule.param_groups[0]["lr"], parameter.grad = lr, gradients[i]
            rule.step()
            torch.testing.assert_close(space.body(run.store.get(i).coming), parameter.detach())


def test_more_samples_than_run_through_the_model_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back through the body goes some samples at a time, and gives the same."""
    from equipoise.representations import head_features
    from equipoise.training import head_statistics

    algorithm = Learn2pFed(**BEGIN, **JOINT, **LOSS)
    whole = trained("classification", algorithm, mode="threads")
    for module in (head_features, head_statistics):
        monkeypatch.setattr(module, "READ_AT_ONCE", 4)
    for mode in ("threads", "stacked"):
        parts = trained("classification", algorithm, mode=mode)
        for one, other in zip(body_steps(whole), body_steps(parts), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_convolutions_move_alike_in_both_modes() -> None:
    draw = torch.Generator().manual_seed(2)
    parts = [(torch.randn(n, 1, 6, 6, generator=draw), torch.randint(3, (n,), generator=draw)) for n in (9, 13)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten())
        module = BodyAndHead(body, nn.Linear(64, 3))
    threads, stacked = (
        simulation(Learn2pFed(**BEGIN, **JOINT, **LOSS), from_clients(parts), module, mode=mode, participation=1.0)
        for mode in ("threads", "stacked")
    )
    threads.run()
    stacked.run()
    for one, other in zip(body_steps(threads), body_steps(stacked), strict=True):
        assert one.any()
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


def test_passes_through_the_body_are_counted() -> None:
    run = trained("classification", Learn2pFed(**BEGIN, **JOINT), rounds=2)
    assert run.counters.gradient_samples == 2 * int(run.federation.train.lengths.sum())


def test_without_a_body_both_ways_are_the_same() -> None:
    one, other = (trained("forecasting", Learn2pFed(**BEGIN, network=network)) for network in ("alternate", "joint"))
    assert one.schema == other.schema
    assert all(torch.equal(one.server[name], t) for name, t in other.server.items())


def test_messages_are_as_long_as_with_least_squares() -> None:
    plain = trained("classification", Learn2pFed(**BEGIN))
    joint = trained("classification", Learn2pFed(**BEGIN, **JOINT, **LOSS))
    assert joint.schema.up == plain.schema.up
    assert (joint.counters.bytes_up, joint.counters.bytes_down) == (plain.counters.bytes_up, plain.counters.bytes_down)
    assert joint.schema.client.keys().isdisjoint({"U", "d", "UXY", "outer_xx", "outer_xy"})


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_what_the_server_knows_of_absent_clients_does_not_move(rule: Any) -> None:
    algorithm = Learn2pFed(**BEGIN, outer_optimizer=rule, outer_lr=0.05)
    federation, module = forecasting(), small_mlp(outputs=2)
    run = simulation(algorithm, federation, module, loss="squared", rounds=6, participation=2, mode="stacked")
    known = False
    for _ in range(6):
        before = run.server
        assert run.advance()
        away = run.server.age == before.age
        assert int(away.sum()) == 1
        for name in ("raw", "first", "second"):
            assert torch.equal(run.server[name][..., away], before[name][..., away])
        assert torch.equal(run.server.age[~away], before.age[~away] + 1)
        assert not torch.equal(run.server.raw[..., ~away], before.raw[..., ~away])
        known = known or bool(before.age[away])
    run.close()
    assert known  # a client was away that had taken steps before


def test_chronological_data_have_folds_in_blocks() -> None:
    """The default asks the data; both orders can be chosen."""
    plain = forecasting()
    in_time = replace(plain, chronological=True)
    found = {}
    for name, data, order in [("auto", plain, "auto"), ("time", in_time, "auto"), ("blocks", plain, "blocks")]:
        algorithm = Learn2pFed(**BEGIN, outer="folds", folds=3, fold_order=order)
        run = simulation(algorithm, data, small_mlp(outputs=2), loss="squared", rounds=1, participation=1.0)
        run.run()
        found[name] = run.server.w
    assert torch.equal(found["time"], found["blocks"])
    assert not torch.equal(found["auto"], found["blocks"])


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_clients_without_validation_samples_and_with_one_sample(mode: str) -> None:
    """A client that is judged on nothing moves its body for the others only, and a fold may be empty."""
    federation = classification(4)
    lists = [federation.train[i][: None if i else 1] for i in range(4)]
    few = replace(federation, train=RaggedIndices(lists))
    for outer in ("validation", "folds"):
        algorithm = Learn2pFed(**BEGIN, **JOINT, **LOSS, outer=outer, folds=3)
        run = simulation(algorithm, few, rounds=2, participation=1.0, mode=mode)
        run.run()
        assert run.counters.left_out == 0
        assert run.server.finite()

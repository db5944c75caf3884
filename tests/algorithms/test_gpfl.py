"""GPFL: its two conditions, its guidance, and what is left of it without them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.algorithms import FedPer
from equipoise.algorithms.gpfl import GPFL, Conditioned, Embedding, Generic, Personal
from equipoise.api import Result
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.models.base import BodyAndHead
from equipoise.parameter_space import ParameterSpace
from tests.support.problems import FULL, simulation


def started(algorithm: Any, federation: Federation | None = None, **options: Any) -> Simulation:
    return simulation(algorithm, federation, **{"rounds": 1, "participation": 1.0, **options})


def clients(*labels: list[int]) -> Federation:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(len(y), 5)), np.array(y)) for y in labels]
    return from_clients([{"train": part, "test": part} for part in parts])


class Unguided(GPFL):
    """GPFL without guidance, with a valve that changes nothing where features are positive."""

    mu: float = 0.0

    def around(self, head: nn.Linear) -> nn.Module:
        module = Conditioned(head)
        with torch.no_grad():
            for part in (module.valve.gamma, module.valve.beta):
                part[2].weight.zero_()
        return module

    def _term(self, *_: object) -> None:
        return None

    def _trained(self, space: ParameterSpace) -> Tensor:
        return super()._trained(space) & ~space.mask("head.valve")


def test_without_guidance_and_with_an_open_valve_it_is_fedper() -> None:
    def module() -> nn.Module:
        torch.manual_seed(3)
        return BodyAndHead(nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 3))

    common = {"lr": 0.05, "epochs": 2, "batch": 4}
    one, two = (started(a, module=module(), rounds=3) for a in (Unguided(**common), FedPer(**common)))
    for run in (one, two):
        run.run()
    torch.testing.assert_close(one.server.theta, two.server.w_b, rtol=1e-9, atol=1e-12)
    for i in range(6):
        torch.testing.assert_close(one.store.get(i).phi, two.store.get(i).w_p, rtol=1e-9, atol=1e-12)


def test_the_conditions_are_means_of_the_received_embedding() -> None:
    run = started(GPFL(lr=0.1, batch=4), clients([0, 0, 0, 1], [0, 1, 2, 0, 1, 2], [2, 2]), rounds=2)
    run.run()
    E, space = run.server.E, run.task.space
    shares = torch.tensor([[0.75, 0.25, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1.0]]).double()
    for i in range(3):
        vector = Result(run).personal_vector(i).vector
        torch.testing.assert_close(vector[space.span(Generic)], E.mean(0))
        torch.testing.assert_close(vector[space.span(Personal)], shares[i] @ E)
        assert torch.equal(vector[space.span(Embedding)], E.flatten())


def one_step(run: Simulation, who: int, lam: float, mu: float) -> dict[str, Tensor]:
    """All parameters after a full step from the start, by autograd on the formulas of the paper."""
    x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
    parameters = run.task.space.views(run.task.w0.clone().requires_grad_())
    parameters = {k: t.detach().requires_grad_() for k, t in parameters.items()}
    inner = {k.removeprefix("head."): t for k, t in parameters.items()}
    E = inner["embedding.value"]
    counts = torch.bincount(y, minlength=3).double()
    g, p = E.detach().mean(0), counts @ E.detach() / len(y)

    def valve(h: Tensor, c: Tensor) -> Tensor:
        change = []
        for part in ("gamma", "beta"):
            name = f"valve.{part}"
            out = (c @ inner[f"{name}.0.weight"].T + inner[f"{name}.0.bias"]).relu()
            change.append(F.layer_norm(out, (8,), inner[f"{name}.2.weight"], inner[f"{name}.2.bias"]))
        return ((change[0] + 1) * h + change[1]).relu()

    body = {k.removeprefix("body."): t for k, t in parameters.items() if k.startswith("body.")}
    h = functional_call(run.task.module.body, body, (x,))
    h_P, h_G = valve(h, p), valve(h, g)
    outputs = h_P @ inner["head.layer.weight"].T + inner["head.layer.bias"]
    cosines = F.cosine_similarity(h_G.unsqueeze(1), E.unsqueeze(0), dim=-1)
    value = F.cross_entropy(outputs, y) + F.cross_entropy(cosines, y) + lam * (h_G - E.detach()[y]).norm()
    moving = {k: t for k, t in parameters.items() if k.split(".")[1] not in ("generic", "personal")}
    found = torch.autograd.grad(value, list(moving.values()))
    after = {}
    for (name, t), g in zip(moving.items(), found, strict=True):
        decayed = name.startswith(("head.embedding", "head.valve"))
        after[name] = t.detach() - run.algorithm.lr * (g + mu * t.detach() * decayed)
    return after


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_step_is_that_of_the_papers_formulas(mode: str) -> None:
    run = started(GPFL(lr=0.1, batch=FULL, steps=1, lam=0.3, mu=0.2), mode=mode)
    run.run()
    after = [one_step(run, i, lam=0.3, mu=0.2) for i in range(6)]
    n = torch.tensor([len(run.federation.train[i]) for i in range(6)]).double()
    mean = {k: sum(n[i] * after[i][k] for i in range(6)) / n.sum() for k in after[0]}
    torch.testing.assert_close(run.server.E, mean["head.embedding.value"], rtol=1e-8, atol=1e-11)
    theta = torch.cat([t.flatten() for k, t in mean.items() if k.startswith("body.")])
    torch.testing.assert_close(run.server.theta, theta, rtol=1e-8, atol=1e-11)
    V = torch.cat([t.flatten() for k, t in mean.items() if k.startswith("head.valve.")])
    torch.testing.assert_close(run.server.V, V, rtol=1e-8, atol=1e-11)
    for i in range(6):
        phi = torch.cat([t.flatten() for k, t in after[i].items() if k.startswith("head.head.")])
        torch.testing.assert_close(run.store.get(i).phi, phi, rtol=1e-8, atol=1e-11)


def test_only_the_angle_moves_the_embedding() -> None:
    """The distance is to E as received, so its strength does not show in the first step of E; that of V it changes."""
    runs = [started(GPFL(lr=0.1, batch=FULL, steps=1, lam=lam, mu=0.0)) for lam in (0.0, 5.0)]
    for run in runs:
        run.run()
    torch.testing.assert_close(runs[0].server.E, runs[1].server.E, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(runs[0].server.V, runs[1].server.V, atol=1e-4)

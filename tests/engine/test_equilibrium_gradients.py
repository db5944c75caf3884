"""Every gradient of an equilibrium layer, and states of several tensors, in a run."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import Equilibrium
from equipoise.equilibrium.options import Gradient
from equipoise.executors.base import FIXED_POINTS
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from tests.support.marks import slow_except
from tests.support.problems import classification, metrics, simulation

GRADIENTS = get_args(Gradient)


@pytest.mark.parametrize("gradient", slow_except(GRADIENTS, "phantom", "reversible"))
def test_models_take_every_gradient(gradient: str) -> None:
    """They differ in training, except that the first round's solves are the same with one solver."""
    federation = classification()
    lines = []
    for chosen in (gradient, "implicit"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = MODELS["deq-mlp"](width=6, hidden=5, gradient=chosen, damping=0.6)
            module = model.build((5,), 3)
        run = simulation(ALGORITHMS["fedavg"](lr=0.1, batch=8), federation, module, rounds=2, participation=1.0)
        run.run()
        lines.append(run.lines[-1])
        assert np.isfinite(run.lines[-1]["global"]["loss"])
        assert ("gradient_iterations" in run.lines[-1]) == (chosen in ("implicit", "reversible"))
    assert (lines[0]["global"] == lines[1]["global"]) == (gradient == "implicit")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.down = nn.Linear(7, 7), nn.Linear(2, 2), nn.Linear(7, 2)

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        fine, coarse = z
        return torch.tanh(0.3 * self.fine(fine) + x), torch.tanh(0.3 * self.coarse(coarse) + self.down(fine))


class TwoScales(nn.Module):
    """A state of 7 and of 2 numbers, of which both go on."""

    def __init__(self, **given: Any):
        super().__init__()
        self.into = nn.Linear(5, 7)
        self.layer = Equilibrium(Pair(), guess=lambda x: (torch.zeros_like(x), x.new_zeros(len(x), 2)), **given)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.layer(self.into(x)), 1)


def two_scales(folder: Path | None, **given: Any) -> Simulation:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = TwoScales(tol=1e-4, limit=30, warm_start="client")
        module = BodyAndHead(body, nn.Linear(9, 3))
    algorithm = ALGORITHMS["fedrep"](lr=0.05, batch=8)
    return simulation(algorithm, module=module, folder=folder, rounds=3, checkpoint_every=1, **given)


def test_a_state_of_several_tensors_is_kept_with_the_client_and_resumed(tmp_path: Path) -> None:
    whole = two_scales(tmp_path / "whole", workers=2)
    whole.run()
    kept = [whole.store.get(who)[FIXED_POINTS + "0.z"] for who in range(len(whole.federation))]
    assert all(z.shape[1:] == (9,) for z in kept)
    assert any(z.any() for z in kept)
    broken = two_scales(tmp_path / "broken")
    for _ in range(2):
        broken.advance()
    broken.close()
    resumed = two_scales(tmp_path / "broken", new=False)
    resumed.resume()
    resumed.run()
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    for name, t in whole.server.items():
        assert torch.equal(resumed.server[name], t)
    for who in range(len(whole.federation)):
        ours, theirs = resumed.store.get(who), whole.store.get(who)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)

"""What regularises equilibrium layers in a run: auxiliary losses, dropout, normalised weights, the spectral radius.

Random numbers depend on their purpose alone, so that threads, interruptions and engines do not matter.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.equilibrium import Equilibrium, VariationalDropout, weight_norm
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from tests.engine.test_equilibrium_runs import small
from tests.support.flower_memory import in_both_engines, same
from tests.support.problems import classification, simulation


class Cell(nn.Module):
    """f(z, x) = tanh(B dropout(z) + x), with normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.dropout = nn.Linear(7, 7), VariationalDropout(0.3)
        weight_norm(self)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.b(self.dropout(z)) + x)


def regularised() -> nn.Module:
    """A model with everything at once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = Equilibrium(Cell(), tol=1e-4, limit=50, spectral_radius=True, **JACOBIAN)
        return BodyAndHead(nn.Sequential(nn.Linear(5, 7), layer), nn.Linear(7, 3))


JACOBIAN: dict[str, Any] = {"jacobian_weight": 2.0, "jacobian_probability": 0.5, "jacobian_at": "random-step"}


class Penalised(nn.Linear):
    """A linear layer with the auxiliary loss c ‖W‖² / 2."""

    def __init__(self, inputs: int, outputs: int, c: float):
        super().__init__(inputs, outputs, bias=False)
        self.c = c

    def auxiliary_loss(self) -> Tensor | None:
        return 0.5 * self.c * self.weight.square().sum()


def linear(c: float | None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Linear(5, 4, bias=False) if c is None else Penalised(5, 4, c)
        return BodyAndHead(body, nn.Linear(4, 3, bias=False))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_auxiliary_loss_has_the_gradient_that_it_should_have(momentum: float) -> None:
    """c ‖W‖² / 2 for the body is weight decay c on the body; the head is not in it."""
    c = 0.3
    with_loss = simulation(ALGORITHMS["fedavg"](lr=0.1, momentum=momentum, steps=1), module=linear(c), rounds=1)
    plain = simulation(ALGORITHMS["fedavg"](lr=0.1, momentum=momentum, steps=1), module=linear(None), rounds=1)
    for run in (with_loss, plain):
        run.run()
    expected = plain.server["w"].clone()
    expected[:20] -= 0.1 * c * plain.task.w0[:20]
    torch.testing.assert_close(with_loss.server["w"], expected, rtol=1e-10, atol=1e-12)


def test_models_with_auxiliary_losses_are_not_stacked() -> None:
    with pytest.raises(EquipoiseError, match="auxiliary losses"):
        simulation(ALGORITHMS["fedavg"](), module=linear(0.1), mode="stacked")


def test_without_a_weight_nothing_changes_and_with_one_training_differs() -> None:
    lines = []
    for given in ({}, {"jacobian_weight": 0.0, "jacobian_probability": 0.5}, JACOBIAN):
        run = simulation(ALGORITHMS["fedavg"](lr=0.05, batch=8), module=small(**given), rounds=2)
        run.run()
        lines.append(run.lines)
    assert lines[0] == lines[1]
    assert lines[0] != lines[2]


def test_workers_and_interruptions_change_nothing(tmp_path: Path) -> None:
    algorithm = ALGORITHMS["fedrep"](lr=0.05, epochs=1, batch=16)
    whole = simulation(algorithm, module=regularised(), rounds=3)
    many = simulation(algorithm, module=regularised(), rounds=3, workers=4)
    for run in (whole, many):
        run.run()
    assert many.lines == whole.lines

    def part(new: bool) -> Any:
        return simulation(
            algorithm, module=regularised(), folder=tmp_path / "run", rounds=3, checkpoint_every=1, new=new
        )

    broken = part(True)
    for _ in range(2):
        broken.advance()
    broken.close()
    resumed = part(False)
    resumed.resume()
    resumed.run()
    assert {k: torch.equal(t, whole.server[k]) for k, t in resumed.server.items()} == dict.fromkeys(whole.server, True)


def test_both_engines_give_the_same_numbers(tmp_path: Path) -> None:
    algorithm = ALGORITHMS["fedeq"](lr=0.05, epochs=1, batch=4)
    over_flower, simulated = in_both_engines(tmp_path, algorithm, classification(), regularised(), participation=0.5)
    for ours, theirs in zip(over_flower.lines, simulated.lines, strict=True):
        same(ours, theirs)
        assert ours["spectral_radius"] > 0
    same(over_flower.summary()["spectral_radius"], simulated.summary()["spectral_radius"])


def test_measuring_the_spectral_radius_changes_nothing_else() -> None:
    lines = []
    for measure in (False, True):
        module = small(spectral_radius=measure, **JACOBIAN)
        run = simulation(ALGORITHMS["fedavg"](lr=0.05, batch=8), module=module, rounds=2)
        run.run()
        lines.append(run.lines)
    radii = [line.pop("spectral_radius") for line in lines[1]]
    assert lines[0] == lines[1]
    assert all(0 < radius < 1 for radius in radii)  # the layer is a contraction


def test_masks_depend_on_the_seed_alone() -> None:
    ends = []
    for seed in (0, 0, 1):
        run = simulation(ALGORITHMS["local"](lr=0.05, batch=100), module=regularised(), rounds=1, seed=seed)
        run.run()
        ends.append(run.lines)
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


@pytest.mark.parametrize("normalisation", ["weight", "spectral"])
def test_normalised_models_send_their_parameters_and_nothing_else(normalisation: str) -> None:
    """g and v are averaged, and power iterations leave nothing that would have to be."""
    settings: dict[str, Any] = {"width": 6, "hidden": 5, "contraction": False, "normalisation": normalisation}
    module = MODELS["deq-mlp"](**settings).build((5,), 3)
    run = simulation(ALGORITHMS["fedavg"](lr=0.05, batch=8), module=module, rounds=1, participation=1.0)
    names = {entry.name.removeprefix("body.2.f.weight.parametrizations.weight.") for entry in run.task.space.entries}
    assert names >= ({"original0", "original1"} if normalisation == "weight" else {"original"})
    assert run.task.buffer_names == ()
    run.run()
    assert list(run.server) == ["w"]
    assert run.server["w"].shape == (run.task.space.size,)
    assert not torch.equal(run.server["w"], run.task.w0)


def test_normalisation_and_contraction_exclude_each_other() -> None:
    with pytest.raises(EquipoiseError, match="choose one of them"):
        MODELS["deq-mlp"](normalisation="weight").build((5,), 3)  # type: ignore[call-arg]


def test_every_equilibrium_model_takes_the_settings() -> None:
    for name in (name for name in MODELS if name.startswith("deq-")):
        assert MODELS[name](**JACOBIAN).table().items() >= JACOBIAN.items()  # type: ignore[arg-type]

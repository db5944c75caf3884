"""Learn2pFed with the task's own loss: its cells and its backward pass against the same network in one place."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.algorithms import Learn2pFed
from equipoise.errors import EquipoiseError
from tests.support.problems import LeastSquares, simulation
from tests.support.unrolled import BEGIN, LOSS, TASKS, central, check_gradients, trained

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sets": "each", "positive": "log"},
    {"outer": "validation", "follow": ("eta", "theta")},
    {"outer": "folds", "folds": 3, "positive": "log"},
    {"outer": "folds", "folds": 4, "fold_order": "blocks"},
    {"backward": "local", "outer": "folds", "folds": 2},
]


def possible(task: str, variant: dict[str, Any], mode: str) -> bool:
    """A loss that gives only a mean is not stacked, and the clients of one task have no validation samples."""
    return (task, mode) != ("own mean loss", "stacked") and (task, variant.get("outer")) != ("regression", "validation")


CASES = [case for case in product(TASKS, VARIANTS, ["stacked", "threads"]) if possible(*case)]


@pytest.mark.parametrize(("task", "variant", "mode"), CASES, ids=lambda v: None if isinstance(v, str) else str(v))
def test_the_way_back_is_that_of_the_whole_network(task: str, variant: dict[str, Any], mode: str) -> None:
    algorithm = Learn2pFed(**BEGIN, **LOSS, **variant)
    run = trained(task, algorithm, mode=mode)
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * len(run.federation))
    check_gradients(run, whole, detach=algorithm.backward == "local")


class Squeezed(nn.Module):
    """A model whose outputs have the shape of its targets, one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found.squeeze(-1)


def test_a_loss_of_the_users_sees_outputs_of_the_models_own_shape() -> None:
    """Otherwise (n, 1) outputs minus (n,) targets would be a matrix of differences."""
    seen: list[tuple[torch.Size, torch.Size]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.shape, target.shape))
        return (output - target).square().mean()

    algorithm = Learn2pFed(**BEGIN, **LOSS, network="joint", outer="folds", folds=2)
    run = simulation(algorithm, LeastSquares(3).federation(), Squeezed(), loss=loss, metric="mae", rounds=2)
    run.run()
    assert all(output == target and len(output) == 1 for output, target in seen)
    assert run.server.w.any()
    assert run.counters.left_out == 0


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EquipoiseError, match="fit = 'loss' has no closed solution"):
        Learn2pFed(fit="loss")
    with pytest.raises(EquipoiseError, match="solve_rate must be below 2 with fit = 'squares'"):
        Learn2pFed(solve="gradient", solve_rate=2.0)
    assert Learn2pFed(fit="loss", solve="gradient", solve_rate=3.0).solve_rate == 3.0

"""Learn2pFed with the task's own loss: its cells and its backward pass against the same network in one place."""

from typing import Any

import pytest

from equipoise.algorithms import Learn2pFed
from tests.support.unrolled import BEGIN, LOSS, TASKS, central, check_gradients, trained

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sets": "each", "positive": "log"},
    {"outer": "validation", "follow": ("eta", "theta")},
    {"outer": "folds", "folds": 3, "positive": "log"},
    {"outer": "folds", "folds": 4, "fold_order": "blocks"},
    {"backward": "local", "outer": "folds", "folds": 2},
]


@pytest.mark.parametrize("mode", ["stacked", "threads"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())) or "plain")
@pytest.mark.parametrize("task", TASKS)
def test_the_way_back_is_that_of_the_whole_network(task: str, variant: dict[str, Any], mode: str) -> None:
    if variant.get("outer") == "validation" and task == "regression":
        pytest.skip("no client has validation samples")
    if task == "own mean loss" and mode == "stacked":
        pytest.skip("a loss that gives only a mean cannot be stacked")
    algorithm = Learn2pFed(**BEGIN, **LOSS, **variant)
    run = trained(task, algorithm, mode=mode)
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * len(run.federation))
    check_gradients(run, whole, detach=algorithm.backward == "local")

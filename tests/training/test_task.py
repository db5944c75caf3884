"""What is the head of a task."""

import pytest
import torch
from torch import nn

from equipoise.algorithms import FedAvg
from equipoise.models.base import BodyAndHead
from equipoise.training.task import Task
from tests.support.problems import simulation

SAMPLE = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("head", "head"),
        (["head"], "head"),  # as TOML may write it
        ("body.0", "body.0"),
        ("head.weight", None),
        ("he*", None),  # a pattern is no name
        (["head", "body.0"], None),
        (nn.Linear, None),
        (None, None),
        ([], None),
    ],
)
def test_the_head_has_a_name_if_it_is_one_submodule(head: object, name: str | None) -> None:
    module = BodyAndHead(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3))
    assert Task(module, SAMPLE, head=head).head == name


def test_without_a_head_to_train_all_is_body() -> None:
    frozen = BodyAndHead(nn.Linear(4, 5), nn.Linear(5, 3))
    frozen.head.requires_grad_(False)
    for module in (frozen, nn.Sequential(nn.Linear(4, 3))):
        task = Task(module, SAMPLE)
        assert (task.head, task.space.body_size) == (None, task.space.size)


def test_dropout_of_nothing_is_no_obstacle_to_stacking() -> None:
    module = BodyAndHead(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.0)), nn.Linear(4, 3))
    runs = [simulation(FedAvg(lr=0.05, batch=4), module=module, mode=mode) for mode in ("threads", "auto")]
    for run in runs:
        run.run()
    assert runs[1].mode == "stacked"
    torch.testing.assert_close(runs[0].server.w, runs[1].server.w, rtol=1e-9, atol=1e-11)
    module.body[1].p = 0.1
    assert "dropout" in str(Task(module, (torch.zeros(2, 5), SAMPLE[1])).why_not_stacked)

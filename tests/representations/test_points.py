"""Points of a model where representations are read."""

import torch

from equipoise.algorithms import FedAvg
from equipoise.representations.points import HEAD, OUTPUT
from tests.support.problems import simulation


def test_the_outputs_depend_on_all_parameters_and_what_the_head_reads_on_the_body() -> None:
    run = simulation(FedAvg())
    run.close()
    space, output, head = run.task.space, run.task.point(OUTPUT), run.task.point(HEAD)
    assert (output.width, head.width) == (3, 8)
    assert output.reach.all()
    assert torch.equal(head.reach.nonzero().flatten(), torch.arange(space.body_size))

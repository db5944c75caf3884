"""A module as a vector."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from equipoise.parameter_space import ParameterSpace
from equipoise.training.task import Task
from tests.support.models import built, inputs


@pytest.mark.parametrize("name", list(MODELS))
def test_module_to_vector_and_back(name: str) -> None:
    module = built(name)
    space = ParameterSpace(module, "head")
    back = space.module(module, space.vector(module))
    x = torch.from_numpy(inputs(name, 3, np.random.default_rng(0)))
    x = x.float() if x.is_floating_point() else x
    torch.testing.assert_close(back(x), module.eval()(x))
    for (a, p), (b, q) in zip(module.named_parameters(), back.named_parameters(), strict=True):
        assert a == b
        assert torch.equal(p, q)
        assert q.is_contiguous()


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 3))
@settings(max_examples=25)
def test_body_and_head_join_to_the_whole(widths: list[int], head: int) -> None:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    module = nn.Sequential(*layers)
    names = [str(i) for i in range(len(layers))]
    space = ParameterSpace(module, names[: min(head, len(names))])
    vector = torch.randn(3, space.size)
    assert torch.equal(space.join(space.body(vector), space.head(vector)), vector)
    assert space.body(vector).shape[1] + space.head(vector).shape[1] == sum(p.numel() for p in module.parameters())
    one = space.join(space.body(vector[0]), space.head(vector))  # one body for a stack of heads
    assert torch.equal(one[2], torch.cat([space.body(vector[0]), space.head(vector[2])]))
    for part in (space.body(vector), space.head(vector)):  # slices, never copies
        assert part.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


def test_views_of_a_stack_are_the_views_of_its_rows() -> None:
    module = MODELS["lenet"]().build((3, 32, 32), 10)
    space = ParameterSpace(module, "head")
    stack = torch.randn(4, space.size)
    for name, view in space.views(stack).items():
        assert torch.equal(view[2], space.views(stack[2])[name])


def test_the_head_is_named_by_its_module() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    assert ParameterSpace(module, "1").body_size == 9
    assert ParameterSpace(module, None).body_size == 25
    with pytest.raises(EquipoiseError, match="no parameters under head='fc'; it has 0, 1"):
        ParameterSpace(module, "fc")


def test_a_replica_is_loaded_by_one_copy() -> None:
    module = BodyAndHead(nn.Linear(2, 3), nn.Linear(3, 2))
    task = Task(module, (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
    replica = task.replica()
    replica.vector.copy_(torch.arange(float(task.space.size)))
    assert replica.module.body.weight[0, 0] == 0
    assert replica.module.head.bias[-1] == task.space.size - 1
    assert torch.equal(task.space.vector(replica.module), replica.vector)

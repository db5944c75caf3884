"""A module as a vector."""

from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
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
    with pytest.raises(EquipoiseError, match="head='fc' matches no parameter of the model; its parts are 0, 1"):
        ParameterSpace(module, "fc")


def test_the_name_of_a_frozen_parameter_is_itself_and_no_pattern() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 1), "[ab]": nn.Linear(2, 1).requires_grad_(False)})
    with pytest.raises(EquipoiseError, match="only frozen parameters"):
        ParameterSpace(module, ["[ab].weight"])


NAMES = ["a", "b", "ab", "bn1", "lora_A", "lora_B", "[ab]"]
LEAVES = [lambda: nn.Linear(2, 1), lambda: nn.Linear(1, 2, bias=False), lambda: nn.BatchNorm1d(2), nn.Identity]
trees = st.recursive(
    st.tuples(st.sampled_from(LEAVES), st.booleans()),
    lambda below: st.dictionaries(st.sampled_from(NAMES), below, min_size=1, max_size=3),
    max_leaves=6,
)


def grown(tree: Any) -> nn.Module:
    """A module of the layers in a tree, some of them frozen."""
    if isinstance(tree, dict):
        return nn.ModuleDict({name: grown(below) for name, below in tree.items()})
    make, frozen = tree
    return make().requires_grad_(not frozen)


@st.composite
def patterns(draw: st.DrawFn, module: nn.Module) -> str:
    """A pattern that is a name of something in the module, with wildcards in place of some of it."""
    names = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_modules() if name]
    name = draw(st.sampled_from(names))
    start = draw(st.integers(0, len(name) - 1))
    end = draw(st.integers(start, len(name)))
    return draw(st.sampled_from([name, name[:start] + "*" + name[end:], name[:start] + "?" + name[start + 1 :]]))


def selected(module: nn.Module, chosen: list[str]) -> set[str]:
    """The trained parameters that patterns select, found by walking through the submodules."""
    known = {name for name, _ in [*module.named_parameters(), *module.named_modules()]}
    found = set()
    for pattern in chosen:
        fits = (
            (lambda name, p=pattern: name == p) if pattern in known else (lambda name, p=pattern: fnmatchcase(name, p))
        )
        for name, layer in module.named_modules():
            inside = [f"{name}.{each}" if name else each for each, _ in layer.named_parameters()]
            found |= set(inside) if name and fits(name) else set(filter(fits, inside))
    return found & {name for name, p in module.named_parameters() if p.requires_grad}


@given(trees, st.data())
@settings(max_examples=60)
def test_patterns_select_exactly_what_they_match(tree: Any, data: st.DataObject) -> None:
    module = grown({"top": tree})
    assume(any(p.requires_grad for p in module.parameters()))
    chosen = data.draw(st.lists(patterns(module), max_size=3))
    if not all(selected(module, [each]) for each in chosen):
        with pytest.raises(EquipoiseError, match=r"^head=.* matches (no parameter of the model; |only frozen)"):
            ParameterSpace(module, chosen)
        return
    wanted = selected(module, chosen)
    space = ParameterSpace(module, chosen)
    vector = torch.arange(float(2 * space.size)).view(2, -1)
    assert torch.equal(space.join(space.body(vector), space.head(vector)), vector)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    views, mask = space.views(vector), space.mask(chosen)
    assert views.keys() == trained.keys()
    assert {entry.name for entry in space.entries if entry.offset >= space.body_size} == wanted
    assert torch.equal(mask, torch.arange(space.size) >= space.body_size)
    for name, view in views.items():
        assert view.shape[1:] == trained[name].shape
        inside = space.head(vector) if name in wanted else space.body(vector)
        assert torch.isin(view.flatten(), inside.flatten()).all()
    plain = ParameterSpace(module)  # without a head the same parameters are in other places
    for entry in plain.entries:
        assert plain.mask(chosen)[entry.offset : entry.end].eq(entry.name in wanted).all()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.fc, self.bn2 = nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3)


def test_parameters_are_selected_by_the_kind_of_their_layer() -> None:
    module = nn.ModuleDict({"encoder": Encoder(), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 2)})
    space = ParameterSpace(module, "head")
    for kind in (nn.BatchNorm1d, nn.modules.batchnorm._BatchNorm):  # a class stands for its subclasses too
        assert torch.equal(space.mask(kind), space.mask("encoder.bn*"))
    assert torch.equal(space.mask(Encoder), space.mask("encoder"))  # and for all that is in the layer
    assert torch.equal(space.mask([nn.LayerNorm, "*.bias"]), space.mask("norm") | space.mask("*.bias"))
    assert torch.equal(space.mask(nn.ModuleDict), torch.ones(space.size, dtype=torch.bool))
    assert not space.mask([]).any()
    assert ParameterSpace(module, nn.BatchNorm1d).fingerprint() == ParameterSpace(module, "*.bn?").fingerprint()


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("bn*", r"head='bn\*' matches no parameter of the model; did you mean '\*.bn\*'\?"),
        ("fc", r"did you mean '\*.fc'\?"),
        ("encoder.fd", "did you mean 'encoder.fc'"),
        ("xyz*", "its parts are encoder, head$"),
        (["head", "q"], "head='q' matches no"),
        (nn.LSTM, "head=LSTM matches no .*; its parameters are in layers of the kinds BatchNorm1d, Linear$"),
        ("frozen", "head='frozen' matches only frozen parameters, which are neither trained nor sent"),
        (nn.Embedding, "head=Embedding matches only frozen"),
        (3, "head=3 is not allowed; it must be the name of a submodule"),
        ("", "head='' is not allowed"),
        (["head", None], r"head=\['head', None\] is not allowed"),
        (int, "head=int is not allowed"),
        (nn.Linear(2, 2), "head=a Linear is not allowed"),
    ],
)
def test_a_selection_of_nothing_gets_a_sentence(head: Any, sentence: str) -> None:
    layers = {"encoder": Encoder(), "frozen": nn.Embedding(2, 2).requires_grad_(False), "head": nn.Linear(3, 2)}
    with pytest.raises(EquipoiseError, match=sentence):
        ParameterSpace(nn.ModuleDict(layers), head)
    with pytest.raises(EquipoiseError, match=sentence.replace("head=", "mask=")):
        ParameterSpace(nn.ModuleDict(layers)).mask(head)


def test_a_model_with_many_parts_names_a_few() -> None:
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    with pytest.raises(EquipoiseError, match=r"its parts are 0, 1, 2, 3, 4, 5, 6, 7, and 12 more$"):
        ParameterSpace(module, "head")


def test_a_tied_parameter_is_selected_by_all_its_names_or_none() -> None:
    module = nn.ModuleDict({"embed": nn.Linear(3, 2, bias=False), "out": nn.Linear(3, 2)})
    module["out"].weight = module["embed"].weight
    with pytest.raises(EquipoiseError, match=r"matches out.weight but not embed.weight, and these are one tied"):
        ParameterSpace(module, "out")
    assert ParameterSpace(module, "*.weight").body_size == 2
    assert ParameterSpace(module, ["out", "embed"]).body_size == 0
    assert ParameterSpace(module, "out.bias").body_size == 6


def test_a_space_tells_what_it_holds() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2)), "*.bias")
    assert repr(space) == "ParameterSpace(4 parameters, 1292 numbers: body 1260, head 32)"


def test_a_replica_is_loaded_by_one_copy() -> None:
    module = BodyAndHead(nn.Linear(2, 3), nn.Linear(3, 2))
    task = Task(module, (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
    replica = task.replica()
    replica.vector.copy_(torch.arange(float(task.space.size)))
    assert replica.module.body.weight[0, 0] == 0
    assert replica.module.head.bias[-1] == task.space.size - 1
    assert torch.equal(task.space.vector(replica.module), replica.vector)


def test_a_vector_is_what_is_inside_and_outside_a_mask_for_one_client_and_for_a_stack() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    mask = space.mask(nn.LayerNorm)
    v = torch.arange(3.0 * space.size).view(3, -1)
    assert torch.equal(space.merge(mask, v[0, mask], v[0, ~mask]), v[0])
    assert torch.equal(space.merge(mask, v[:, mask], v[:, ~mask]), v)
    common = space.merge(mask, v[:, mask], v[0, ~mask])
    assert torch.equal(common[:, mask], v[:, mask])
    assert torch.equal(common[2, ~mask], v[0, ~mask])


def test_a_kind_of_layer_may_be_missing_where_that_is_allowed() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    assert not space.mask(nn.BatchNorm1d, optional=True).any()
    assert torch.equal(space.mask((nn.BatchNorm1d, nn.LayerNorm), optional=True), space.mask(nn.LayerNorm))
    with pytest.raises(EquipoiseError, match="matches no parameter"):
        space.mask(nn.BatchNorm1d)

"""The tables of docs/algorithms.md: what they say of messages, states, needs and models is what the algorithms do."""

import re
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.own_modules import HasOwnModules
from equipoise.algorithms.schema import MessageSchema, Shapes, infer_schema
from equipoise.models.base import BodyAndHead
from equipoise.state import State
from equipoise.training.task import Task
from tests.support.commands import ROOT
from tests.support.problems import classification, registered

TEXT = (ROOT / "docs" / "algorithms.md").read_text()
IN_WORDS = {"learn2pfed", "least-squares", "shared-least-squares"}
"""How much they send and keep depends on their settings, so the table says it in words."""
LATENT = 6
CLIENTS = 6


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the names in their first column."""
    part = TEXT.partition(heading)[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:3] == "| `"]
    found = {row[0].strip("`"): row[1:] for row in cells}
    assert len(found) == len(cells)
    return found


METHODS, FILES = rows("\n## All methods"), rows("\n## Files and papers")


@cache
def task() -> Task:
    """A model with every kind of part: means and spreads, batch normalisation, a linear head."""
    body = nn.Sequential(OrderedDict(encoder=nn.Linear(5, 2 * LATENT), norm=nn.BatchNorm1d(2 * LATENT)))
    return Task(BodyAndHead(body, nn.Linear(2 * LATENT, 3)), classification().prepared(torch.float32, False).sample())


def algorithm_of(name: str) -> Algorithm:
    """The algorithm, with a projection that is shorter than the model."""
    algorithm = registered(name)
    return algorithm.model_copy(update={"d_sub": 20}) if hasattr(algorithm, "d_sub") else algorithm


@cache
def schema(name: str) -> MessageSchema:
    algorithm = algorithm_of(name)
    extended = task().with_own_modules(algorithm, 0)
    return infer_schema(algorithm, extended.start(CLIENTS, 100))


def numbers(shapes: Shapes) -> int:
    return sum(State(t=torch.empty(shape)).numel for shape, _ in shapes.values())


def value(formula: str, name: str) -> int:
    """The number that a formula of the table stands for."""
    if formula == "–":
        return 0
    head = 3 * (2 * LATENT + 1)
    size = task().space.size
    known = {"P": size, "B": size - head, "H": head, "d": 2 * LATENT, "C": 3, "m": CLIENTS, "L": LATENT}
    known["N"] = 2 * 2 * LATENT
    algorithm = algorithm_of(name)
    text = formula.replace("−", "-").replace("²", "**2")
    text = re.sub(r"`(\w+)`", lambda setting: f"({getattr(algorithm, setting[1])})", text)
    text = re.sub(r"(?<=[\w)])\s*(?=[A-Za-z(])", "*", text)
    return int(eval(text, {"__builtins__": {}}, known))


def cells(name: str, column: int, separator: str) -> list[str]:
    """A cell of the first table in parts; "as `other`" is the cell of the other method."""
    cell = METHODS[name][column]
    if (other := re.fullmatch(r"as `([\w-]+)`", cell)) is not None:
        return cells(other[1], column, separator)
    return [part.strip() for part in cell.split(separator)]


def test_every_algorithm_has_one_row_in_both_tables() -> None:
    assert METHODS.keys() == FILES.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in IN_WORDS])
def test_what_is_sent_and_kept_is_what_the_table_says(name: str) -> None:
    down, up = (value(formula, name) for formula in cells(name, 1, ", "))
    assert (numbers(schema(name).down), numbers(schema(name).up)) == (down, up)
    assert numbers(schema(name).client) == value(cells(name, 3, ";")[0], name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_needed_is_what_the_table_says(name: str) -> None:
    requires, needs = registered(name).requires, METHODS[name][4]
    own_modules = isinstance(registered(name), HasOwnModules)
    assert ("a linear head" in needs) == (requires.linear_head or own_modules)
    if requires.head_module and not (requires.linear_head or own_modules):
        assert "one submodule as head" in needs
    assert bool(re.search("head|random representation", needs)) == requires.head
    assert bool(re.search("labels|cross-entropy", needs)) == requires.labels
    assert ("cross-entropy" in needs) == requires.cross_entropy
    assert "validation" in needs or not requires.validation


@pytest.mark.parametrize("name", ALGORITHMS)
def test_who_has_a_global_model_and_who_has_personal_ones_is_what_the_tables_say(name: str) -> None:
    algorithm = registered(name)
    extended = task().with_own_modules(algorithm, 0)
    server = algorithm.init_server(extended.start(CLIENTS, 100))
    assert (algorithm.global_model(server) is not None) == (not FILES[name][2].startswith("–"))
    overrides = type(algorithm).personal_model is not ALGORITHMS["fedavg"].personal_model
    assert overrides == (METHODS[name][0] != "nothing") or name == "knn-per"

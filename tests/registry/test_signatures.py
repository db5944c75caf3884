"""Settings from a function's signature."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from equipoise.errors import EquipoiseError
from equipoise.registry import arguments_of, settings_class
from equipoise.settings import Settings, read


@cache
def settings_of(function: Any, paths: bool = False) -> type[Settings]:
    found, _ = arguments_of(function, "f", (), ("name",), paths)
    return settings_class(Settings, function, found, {})


def every(
    a,
    b: int,
    c: "float" = 1,
    d=True,
    e="text",
    f=None,
    g: Literal["x", "y"] = "x",
    h: Annotated[int, Field(ge=1)] = 1,
    i: list[int] = [1],  # noqa: B006
    j: tuple[int, str] = (1, "a"),
    k: Sequence[float] | None = None,
    m: dict[str, int] = {},  # noqa: B006
    n: list[list[int]] = [],  # noqa: B006
    *args: Any,
    object: object = print,
    **more: Any,
) -> None:
    """Do everything.

    Args:
        b: how many
        c (float): how much
    """


def test_every_argument_that_toml_can_write_is_a_setting() -> None:
    rows = {row["name"]: row for row in settings_of(every).describe()}
    assert list(rows) == list("abcdefghijkmn")
    assert {name: row["allowed"] for name, row in rows.items()} == {
        "a": "any value",
        "b": "a whole number",
        "c": "a number",
        "d": "true or false",
        "e": "a string",
        "f": "any value",
        "g": "'x', 'y'",
        "h": "a whole number >= 1",
        "i": "a list, each a whole number",
        "j": "a list of 2",
        "k": "a list, each a number or left out",
        "m": "a table",
        "n": "a list, each a list, each a whole number",
    }
    assert (rows["b"]["meaning"], rows["c"]["meaning"], rows["d"]["meaning"]) == ("how many", "how much", "")
    assert settings_of(every).summary() == "Do everything."


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": 1}, "f.b is missing"),
        ({"b": 1}, "f.a is missing"),
        ({"a": 1, "b": 1.5}, "f.b = 1.5 is not allowed; it must be a whole number"),
        ({"a": 1, "b": 1, "g": "z"}, "f.g = 'z' is not allowed; it must be 'x', 'y'"),
        ({"a": 1, "b": 1, "h": 0}, "f.h = 0 is not allowed; it must be a whole number >= 1"),
        ({"a": 1, "b": 1, "i": ["x"]}, "f.i = ['x'] is not allowed; it must be a list, each a whole number"),
        ({"a": 1, "b": 1, "j": [1]}, "f.j = [1] is not allowed; it must be a list of 2"),
        ({"a": 1, "b": 1, "object": 1}, "unknown setting f.object"),
        ({"a": 1, "b": 1, "args": 1}, "unknown setting f.args"),
    ],
)
def test_what_is_wrong_is_told(table: dict[str, Any], words: str) -> None:
    with pytest.raises(EquipoiseError) as caught:
        read(settings_of(every), table, "f")
    assert words in str(caught.value)


@given(st.lists(st.integers()), st.lists(st.lists(st.integers())))
def test_lists_come_as_lists_and_tuples_as_tuples(flat: list[int], deep: list[list[int]]) -> None:
    found, _ = arguments_of(every, "f", (), ())
    made = read(settings_of(every), {"a": 0, "b": 1, "i": flat, "j": [3, "c"], "n": deep}, "f")
    values = {argument.name: argument.value(getattr(made, argument.name)) for argument in found}
    assert (values["i"], values["j"], values["n"]) == (flat, (3, "c"), deep)
    assert hash(made.i) == hash(tuple(flat)), "settings cannot change"


def test_some_arguments_are_given_and_some_names_are_taken() -> None:
    def function(seed: int, name: str) -> None: ...

    with pytest.raises(EquipoiseError, match="f has an argument 'name', which cannot be a setting"):
        arguments_of(function, "f", ("seed",), ("name",))
    found, wanted = arguments_of(function, "f", ("seed", "other"), ())
    assert ([argument.name for argument in found], wanted) == (["name"], ["seed"])


def test_an_argument_that_cannot_be_written_needs_a_default() -> None:
    def function(module: Settings) -> None: ...
    def path(file: Path, other: Path | None = None) -> None: ...

    for needs in (function, path):
        with pytest.raises(EquipoiseError, match=r"f needs an argument '(module|file)' that cannot be written"):
            arguments_of(needs, "f", (), ())
    found, _ = arguments_of(path, "f", (), (), paths=True)
    assert [(argument.name, argument.is_path) for argument in found] == [("file", True), ("other", True)]
    with pytest.raises(EquipoiseError, match="does not tell which arguments it takes"):
        arguments_of(dict, "f", (), ())

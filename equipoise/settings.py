"""Settings that are checked: the base of algorithms, models, partitions and the sections of a configuration."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equipoise.errors import EquipoiseError

LARGEST = 1e30
"""The limit of numbers: single precision ends at 3.4e38, and some of it is needed for products."""
MOST = 1_000_000_000
"""The limit of counts."""
DEEPEST = 2000
"""The limit of the number of layers."""
MOST_THREADS = 2048
"""The limit of the number of threads."""
# Limits that only catch mistakes; the allowed values mention them only where one is exceeded.
_GENEROUS = (LARGEST, -LARGEST, MOST, DEEPEST, MOST_THREADS)
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Depth = Annotated[int, Field(ge=1, le=DEEPEST)]
Threads = Annotated[int, Field(ge=0, le=MOST_THREADS)]


class Settings(BaseModel):
    """Immutable settings, checked when they are created.

    Unknown keys, wrong types and values out of range are errors. A string under a field explains it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    paper: ClassVar[str] = ""
    unwritten: ClassVar[frozenset[str]] = frozenset()
    """Settings that `table` leaves out where they have their default: those added when there were results already,
    whose digests of all settings must not change."""

    def __init__(self, **values: Any) -> None:
        self._check(_tuples(values), type(self).__name__)

    # tells pydantic that this __init__ only validates
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def _check(self, values: Mapping[str, Any], where: str) -> None:
        try:
            self.__pydantic_validator__.validate_python(dict(values), self_instance=self)
        except ValidationError as error:
            raise EquipoiseError(_sentence(type(self), error, values, where)) from None

    def table(self) -> dict[str, Any]:
        """Return the settings as a TOML table, including all defaults; what is None is left out."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        left_out = {key for key in self.unwritten if values[key] == type(self).model_fields[key].default}
        return {key: _plain(v) for key, v in values.items() if v is not None and key not in left_out}

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the class's docstring."""
        return (cls.__doc__ or "").strip().split("\n")[0]

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Return every parameter's name, default, allowed values and meaning, for `equipoise list`."""
        properties = cls.model_json_schema()["properties"] if cls.model_fields else {}
        return [
            {
                "name": name,
                "default": _plain(field.default) if not field.is_required() else None,
                "allowed": _allowed(properties[name]),
                "meaning": (_explanation(cls, name) if field.description is None else field.description).strip(),
            }
            for name, field in cls.model_fields.items()
        ]


def _explanation(cls: type, field: str) -> str:
    """Return the string under a field, in the class or in one that it derives from."""
    return next((text for owner in cls.__mro__ if (text := _strings_under_fields(owner).get(field, ""))), "")


@cache
def _strings_under_fields(cls: type) -> dict[str, str]:
    """Read a class's source when somebody asks; reading all at every import, as pydantic does, doubles its time."""
    try:
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # no file, as in an interactive session
        return {}
    found = {}
    for field, under in pairwise(getattr(parsed, "body", ())):
        match field, under:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def _plain(value: Any) -> Any:
    """Return a setting's value as TOML has it."""
    return value.table() if isinstance(value, Settings) else list(value) if isinstance(value, tuple) else value


def _allowed(schema: dict[str, Any], generous: bool = False) -> str:
    """Return the values that a schema allows, in words.

    Args:
        schema: the JSON schema of a setting.
        generous: whether limits that only catch mistakes are mentioned.
    """
    if "anyOf" in schema:
        return " or ".join("left out" if s.get("type") == "null" else _allowed(s, generous) for s in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"]).lower() if isinstance(schema["const"], bool) else repr(schema["const"])
    if "enum" in schema:
        return ", ".join(repr(v) for v in schema["enum"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}"
    if schema.get("type") == "array" and "items" in schema:
        return f"a list, each {_allowed(schema['items'], generous)}"
    if not schema.keys() & {"type", "$ref", "allOf", "additionalProperties"}:
        return "any value"
    words = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "string": "a string"}
    text = words.get(schema.get("type", ""), "a list" if schema.get("type") == "array" else "a table")
    bounds = [("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")]
    named = [(sign, schema[word]) for word, sign in bounds if word in schema]
    limits = [f"{sign} {limit:g}" for sign, limit in named if generous or limit not in _GENEROUS]
    if "multipleOf" in schema:
        text += f", a multiple of {schema['multipleOf']},"
    return " ".join([text, " and ".join(limits)]).strip()


S = TypeVar("S", bound=Settings)
_LONGEST = 300  # characters of a value in a sentence


def shown(value: Any) -> str:
    """Return a value as Python writes it, shortened to fit into a sentence."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a deeply nested list"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known word, or all if none is similar."""
    known = sorted(known)
    close = difflib.get_close_matches(word[:_LONGEST], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; available: {', '.join(known) or 'none'}"


def read(cls: type[S], table: Mapping[str, Any], where: str) -> S:
    """Read checked settings from a table.

    Args:
        cls: the class of the settings.
        table: their values.
        where: the name of the table; error messages call a setting `where`.key.
    """
    settings = cls.__new__(cls)
    settings._check(_tuples(table), where)
    return settings


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples, because TOML has only lists, and values of numpy into Python's own."""

    def deep(value: Any) -> Any:
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        return tuple(map(deep, value)) if isinstance(value, list) else value

    return {k: deep(v) for k, v in table.items()}


def _sentence(cls: type[Settings], error: ValidationError, values: Mapping[str, Any], where: str) -> str:
    """Return a sentence about the first error: what is wrong, and what would be right."""
    first = error.errors()[0]
    if not first["loc"]:
        text = " ".join(first["msg"].removeprefix("Value error, ").split())
        return f"{where or cls.__name__} is not allowed: {text[:_LONGEST]}"
    key = str(first["loc"][0])
    name = f"{where}.{key}" if where else key
    if first["type"] == "extra_forbidden":
        return f"unknown setting {name}{nearest(key, cls.model_fields)}"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return f"{name} is missing"
    # A limit that only catches mistakes is mentioned to those who exceed it.
    exceeded = first["type"] in ("less_than_equal", "greater_than_equal") and _limit(first) in _GENEROUS
    allowed = _allowed(cls.model_json_schema()["properties"][key], exceeded)
    value = list(values[key]) if isinstance(values[key], tuple) else values[key]
    return f"{name} = {shown(value)} is not allowed; it must be {allowed}"


def _limit(error: Any) -> Any:
    context = error.get("ctx", {})
    return context.get("le", context.get("ge"))

"""Settings that are checked: the base of algorithms, models, partitions and the sections of a configuration."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equipoise.errors import EquipoiseError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MOST = 1_000_000_000
"""The limit of counts, which only catches mistakes and is not mentioned in the allowed values."""
Count = Annotated[int, Field(ge=1, le=MOST)]


class Settings(BaseModel):
    """Immutable settings, checked when they are created.

    Unknown keys, wrong types and values out of range are errors. A string under a field explains it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    paper: ClassVar[str] = ""

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
        return {key: _plain(v) for key, v in values.items() if v is not None}

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
                "meaning": (field.description or "").strip(),
            }
            for name, field in cls.model_fields.items()
        ]


def _plain(value: Any) -> Any:
    """Return a setting's value as TOML has it."""
    return value.table() if isinstance(value, Settings) else list(value) if isinstance(value, tuple) else value


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join("left out" if s.get("type") == "null" else _allowed(s) for s in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"]).lower() if isinstance(schema["const"], bool) else repr(schema["const"])
    if "enum" in schema:
        return ", ".join(repr(v) for v in schema["enum"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}"
    if schema.get("type") == "array" and "items" in schema:
        return f"a list, each {_allowed(schema['items'])}"
    if not schema.keys() & {"type", "$ref", "allOf", "additionalProperties"}:
        return "any value"
    words = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "string": "a string"}
    text = words.get(schema.get("type", ""), "a list" if schema.get("type") == "array" else "a table")
    bounds = [("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")]
    limits = [f"{sign} {schema[word]:g}" for word, sign in bounds if word in schema and schema[word] != MOST]
    if "multipleOf" in schema:
        text += f", a multiple of {schema['multipleOf']},"
    return " ".join([text, " and ".join(limits)]).strip()


S = TypeVar("S", bound=Settings)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known word, or all if none is similar."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
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
        return f"{where or cls.__name__} is not allowed: {first['msg'].removeprefix('Value error, ')}"
    key = str(first["loc"][0])
    name = f"{where}.{key}" if where else key
    if first["type"] == "extra_forbidden":
        return f"unknown setting {name}{nearest(key, cls.model_fields)}"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return f"{name} is missing"
    allowed = next(row["allowed"] for row in cls.describe() if row["name"] == key)
    value = list(values[key]) if isinstance(values[key], tuple) else values[key]
    return f"{name} = {value!r} is not allowed; it must be {allowed}"

"""Settings that are checked: the base of algorithms, models, partitions and the sections of a configuration."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equipoise.errors import EquipoiseError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Immutable; unknown keys, wrong types and values out of range are errors. A string under a field explains it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    paper: ClassVar[str] = ""

    def table(self) -> dict[str, Any]:
        """As it stands in TOML, every default written out; what is off (None) is left out."""
        values = self.model_dump().items()
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values if v is not None}

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the class's documentation."""
        return (cls.__doc__ or "").strip().split("\n")[0]

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Every parameter with its type, default, allowed range and meaning, for `equipoise list`."""
        properties = cls.model_json_schema()["properties"] if cls.model_fields else {}
        return [
            {
                "name": name,
                "default": field.default if not field.is_required() else None,
                "allowed": _allowed(properties[name]),
                "meaning": (field.description or "").strip(),
            }
            for name, field in cls.model_fields.items()
        ]


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join("none" if s.get("type") == "null" else _allowed(s) for s in schema["anyOf"])
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(repr(v) for v in schema["enum"])
    words = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "string": "a string"}
    text = words.get(schema.get("type", ""), "a list" if schema.get("type") == "array" else "a table")
    bounds = [("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")]
    limits = [f"{sign} {schema[word]:g}" for word, sign in bounds if word in schema]
    return " ".join([text, " and ".join(limits)]).strip()


S = TypeVar("S", bound=Settings)


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or the whole list when nothing is near."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there is {', '.join(known) or 'none'}"


def read(cls: type[S], table: Mapping[str, Any], where: str) -> S:
    """`table` as checked settings; what is wrong is told with its full name, `where`.key."""

    def full(key: str) -> str:
        return f"{where}.{key}" if where else key

    for key in table:
        if key not in cls.model_fields:
            raise EquipoiseError(f"unknown setting {full(key)}{nearest(key, cls.model_fields)}")
    described = {row["name"]: row["allowed"] for row in cls.describe()}
    # TOML has no tuples; fields that are tuples take lists.
    table = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    try:
        return cls.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise EquipoiseError(f"{full(str(first['loc'][0]))} is missing") from None
        if not first["loc"]:  # a check over several settings at once
            raise EquipoiseError(f"{where or 'settings'}: {first['msg'].removeprefix('Value error, ')}") from None
        key = str(first["loc"][0])
        reason = described[key] if first["type"] != "value_error" else first["msg"].removeprefix("Value error, ")
        raise EquipoiseError(f"{full(key)} = {table[key]!r} is not allowed; it must be {reason}") from None

"""Checked settings from the signature of the user's own function or class."""

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import Field, create_model

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings

_PLAIN = (int, float, bool, str, type(None), Any)
_SEQUENCES = (list, tuple, Sequence)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Argument:
    """An argument of the user's function that is a setting."""

    name: str
    type: Any
    "type of the setting: what TOML can express"
    default: Any
    "value if the setting is left out; ... if it is required"
    takes: Any
    "type that the function takes, where it says so"

    def value(self, setting: Any) -> Any:
        """Return the setting as the function takes it: lists are stored as tuples, which cannot change."""
        return _as_lists(setting, self.takes)

    @property
    def is_path(self) -> bool:
        """Tell whether the function takes a path."""
        return Path in _members(self.takes)


def arguments_of(
    function: Callable[..., Any], what: str, given: Collection[str], taken: Collection[str], paths: bool = False
) -> tuple[list[Argument], list[str]]:
    """Return the arguments of a function that are settings, and the names of those that the run gives.

    Args:
        function: the function, or a class.
        what: what names it, for error messages, such as "model.name = 'net.py:Net'".
        given: names of the arguments that are not settings because the run gives them.
        taken: names that settings cannot have.
        paths: whether an argument may be a path.
    """
    found, wanted = [], []
    hints = _hints(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise EquipoiseError(f"{what} does not tell which arguments it takes; it must be written in Python") from None
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in given:
            wanted.append(name)
            continue
        if name in taken or name.startswith("_"):
            raise EquipoiseError(f"{what} has an argument {name!r}, which cannot be a setting; give it another name")
        required = parameter.default is parameter.empty
        takes = hints.get(name, _type_of(parameter.default) if not required else Any)
        setting = _setting_type(takes, paths)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            setting = None
        if setting is None:
            if required:
                raise EquipoiseError(
                    f"{what} needs an argument {name!r} that cannot be written as a setting; give it a default value"
                )
            continue
        default = tuple(parameter.default) if isinstance(parameter.default, list) else parameter.default
        default = str(default) if isinstance(default, Path) else default
        found.append(Argument(name, setting, ... if required else default, takes))
    return found, wanted


def settings_class(
    base: type[S], function: Callable[..., Any], arguments: Sequence[Argument], attributes: Mapping[str, Any]
) -> type[S]:
    """Return a class of settings with one field per argument.

    Args:
        base: the class that it derives from.
        function: the function, or a class, that has the arguments; its name and docstring are taken over.
        arguments: the arguments.
        attributes: further attributes of the class.
    """
    texts = docstring_of(function)
    fields: dict[str, Any] = {
        argument.name: (argument.type, Field(argument.default, description=_meaning(argument.name, texts)))
        for argument in arguments
    }
    made: type[S] = create_model(
        function.__name__, __base__=base, __module__=function.__module__, __doc__=function.__doc__, **fields
    )
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def docstring_of(function: Callable[..., Any]) -> str:
    """Return the docstring of a function or of a class, together with that of its constructor."""
    inner = function.__dict__.get("__init__") if isinstance(function, type) else None
    return "\n".join(inspect.cleandoc(f.__doc__) for f in (function, inner) if f is not None and f.__doc__)


def _meaning(name: str, text: str) -> str:
    """Return what a docstring says of an argument, in the style `name: meaning` or `name (type): meaning`."""
    found = re.search(rf"^\s*{re.escape(name)}\s*(?:\([^)]*\))?\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        called = inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
        return get_type_hints(called, include_extras=True)
    except Exception:  # a hint may name what exists for type checkers only
        return {}


def _type_of(default: Any) -> Any:
    """Return the type of a default value; of a class that TOML does not know, which is no setting."""
    return Any if default is None else type(default)


def _as_lists(value: Any, takes: Any) -> Any:
    """Return tuples as lists, at all depths where the function takes lists."""
    lists = [t for t in _members(takes) if t is list or get_origin(t) is list]
    if not isinstance(value, tuple) or not lists:
        return value
    (inner, *_) = get_args(lists[0]) or (Any,)
    return [_as_lists(item, inner) for item in value]


def _members(takes: Any) -> tuple[Any, ...]:
    return get_args(takes) if get_origin(takes) in (Union, types.UnionType) else (takes,)


def _setting_type(takes: Any, paths: bool) -> Any:
    """Return the type of a setting for an argument of this type, or None if TOML cannot express it."""
    origin, inner = get_origin(takes), get_args(takes)
    if takes in _PLAIN or origin is Literal:
        return takes
    if takes is Path:
        return str if paths else None
    if origin is Annotated:
        return takes if _setting_type(inner[0], paths) == inner[0] else None
    if origin in (Union, types.UnionType):
        members = [_setting_type(t, paths) for t in inner]
        return None if None in members else Union[tuple(members)]  # noqa: UP007
    if takes in (dict, Mapping) or origin in (dict, Mapping):
        return dict[str, Any]
    if takes in _SEQUENCES:
        return tuple[Any, ...]
    if origin in _SEQUENCES:
        items = [t if t is ... else _setting_type(t, paths) for t in inner]
        if None in items:
            return None
        return types.GenericAlias(tuple, tuple(items) if origin is tuple else (items[0], ...))
    return None

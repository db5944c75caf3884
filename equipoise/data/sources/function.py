"""The user's own data: a function that returns the clients, with its arguments as checked settings."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from equipoise.data.own_clients import as_pool
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.errors import EquipoiseError
from equipoise.registry import Argument, arguments_of, find_path, settings_class, short_name

_GIVEN = ("seed", "clients", "split")
_TAKEN = ("name", "partition", "only", "normalize", "most", "unseen")


class OwnFunction(Source):
    """The settings of the user's own function."""

    model_config = ConfigDict(protected_namespaces=())
    own: ClassVar[bool] = True
    label: ClassVar[str] = ""
    make: ClassVar[Callable[..., Any]]
    arguments: ClassVar[tuple[Argument, ...]] = ()
    given: ClassVar[tuple[str, ...]] = ()

    def title(self, name: str) -> str:
        """Return the name of the function."""
        return short_name(name)

    def load(self, ask: LoadRequest) -> Pool:
        """Call the function with the settings, and with `seed`, `clients` and `split` if it takes them."""
        facts = {"seed": ask.seed, "clients": ask.clients, "split": ask.split}
        values = {argument.name: self._value(argument, ask) for argument in self.arguments}
        values |= {name: facts[name] for name in self.given}
        what = f"data.name = {self.label!r}"
        try:
            found = type(self).make(**values)
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's code raises
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EquipoiseError(f"{what} failed: {text}") from error
        return as_pool(found, what, ask)

    def _value(self, argument: Argument, ask: LoadRequest) -> Any:
        value = argument.value(getattr(self, argument.name))
        if not argument.is_path or not isinstance(value, str):
            return value
        places = [*ask.folders, Path.cwd(), ask.folder.absolute()]
        path = find_path(value, places)
        if path is None:
            looked = "" if Path(value).is_absolute() else f" in {' or '.join(dict.fromkeys(map(str, places)))}"
            raise EquipoiseError(f"data.{argument.name} = {value!r} does not exist{looked}")
        return path


def adapt_source(name: str, found: Any) -> Any:
    """Return settings for the user's function; anything else is returned as it is.

    Args:
        name: the name that the user wrote.
        found: the object that has this name.
    """
    return found if isinstance(found, type) or not callable(found) else _own_function(name, found)


@cache  # so that the same code is the same class, and equal settings are equal
def _own_function(name: str, found: Any) -> type[OwnFunction]:
    arguments, given = arguments_of(found, f"data.name = {name!r}", _GIVEN, {*_TAKEN, *dir(Source)}, paths=True)
    attributes = {"label": name, "make": staticmethod(found), "arguments": tuple(arguments), "given": tuple(given)}
    return settings_class(OwnFunction, found, arguments, attributes)

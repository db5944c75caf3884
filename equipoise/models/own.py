"""The user's own models: a module's class, or a function that returns one, with its arguments as checked settings."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict
from torch import nn

from equipoise.errors import EquipoiseError
from equipoise.models.base import ModelSettings
from equipoise.registry import Argument, arguments_of, settings_class

_GIVEN = ("shape", "outputs")


class OwnModel(ModelSettings):
    """The settings of the user's own module."""

    model_config = ConfigDict(protected_namespaces=())
    label: ClassVar[str] = ""
    make: ClassVar[Callable[..., Any]]
    arguments: ClassVar[tuple[Argument, ...]] = ()
    given: ClassVar[tuple[str, ...]] = ()

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Call the user's class or function with the settings, and with `shape` and `outputs` if it takes them."""
        facts = {"shape": shape, "outputs": outputs}
        values = {argument.name: argument.value(getattr(self, argument.name)) for argument in self.arguments}
        try:
            module = type(self).make(**values, **{name: facts[name] for name in self.given})
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's code raises
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EquipoiseError(f"model.name = {self.label!r} cannot be built: {text}") from error
        if not isinstance(module, nn.Module):
            raise EquipoiseError(
                f"model.name = {self.label!r} returned {type(module).__name__}; it must return an nn.Module"
            )
        return module


def adapt_model(name: str, found: Any) -> Any:
    """Return settings for the user's module class or function; anything else is returned as it is.

    Args:
        name: the name that the user wrote.
        found: the object that has this name.
    """
    is_class = isinstance(found, type)
    makes_modules = issubclass(found, nn.Module) if is_class else callable(found) and not isinstance(found, nn.Module)
    return _own_model(name, found) if makes_modules else found


@cache  # so that the same code is the same class, and equal settings are equal
def _own_model(name: str, found: Any) -> type[OwnModel]:
    taken = {"name", *ModelSettings.model_fields, *dir(ModelSettings)}
    arguments, given = arguments_of(found, f"model.name = {name!r}", _GIVEN, taken)
    attributes = {"label": name, "make": staticmethod(found), "arguments": tuple(arguments), "given": tuple(given)}
    return settings_class(OwnModel, found, arguments, attributes)

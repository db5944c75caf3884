"""Registries: classes by name, from the package, from installed plug-ins, and from the user's own code."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings, nearest, read

S = TypeVar("S", bound=Settings)


class Registry(Mapping[str, type[S]], Generic[S]):
    """The classes of a kind by name.

    As a mapping it holds those of the package only. `find` also knows plug-ins that are installed under the entry point
    group `equipoise.KIND`, and the user's own code as "package.module:Name" or "path/file.py:Name".
    """

    def __init__(
        self,
        kind: str,
        base: type[S],
        entries: Mapping[str, type[S]],
        adapt: Callable[[str, Any], Any] | None = None,
    ):
        """Create a registry.

        Args:
            kind: what it holds, in the plural, such as "algorithms".
            base: the class that all entries derive from.
            entries: the classes of the package by name.
            adapt: turns the user's own objects of other types (functions, modules) into a class of the kind; it gets
                the name and the object, and returns the object itself if there is nothing to turn.
        """
        self.kind, self.base, self.entries, self.adapt = kind, base, dict(entries), adapt

    def __getitem__(self, name: str) -> type[S]:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def installed(self) -> dict[str, EntryPoint]:
        """Return the plug-ins that other installed packages provide, by name, without importing them."""
        return {point.name: point for point in entry_points(group=f"equipoise.{self.kind}")}

    def find(self, name: Any, where: str) -> type[S]:
        """Return the class with this name.

        Args:
            name: the name of an entry or of a plug-in, or the place of the user's own code.
            where: the setting that has the name, for error messages.
        """
        if isinstance(name, str) and name in self.entries:
            return self.entries[name]
        if isinstance(name, str) and ":" in name:
            return self._checked(name, load_object(name, where), where)
        plugins = self.installed()
        if isinstance(name, str) and name in plugins:
            try:
                found = plugins[name].load()
            except Exception as error:  # whatever the plug-in raises when it is imported
                raise EquipoiseError(
                    f"{where} = {name!r} is a plug-in that cannot be imported: {type(error).__name__}: {error}"
                ) from error
            return self._checked(name, found, where)
        raise EquipoiseError(f"{where} = {name!r} is unknown{nearest(str(name), [*self, *plugins])}")

    def _checked(self, name: str, found: Any, where: str) -> type[S]:
        if self.adapt is not None:
            found = self.adapt(name, found)
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise EquipoiseError(
                f"{where} = {name!r} is {_described(found)}; it must be a class that derives from "
                f"equipoise.{self.base.__name__}"
            )
        return found


def _described(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"


def load_object(name: str, where: str) -> Any:
    """Import the user's own code.

    Args:
        name: "package.module:Name" or "path/file.py:Name".
        where: the setting that has the name, for error messages.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise EquipoiseError(f"{where} = {name!r} is not allowed; own code is 'package.module:Name' or 'file.py:Name'")
    try:
        module = _import_file(Path(place), where) if place.endswith(".py") else importlib.import_module(place)
    except EquipoiseError:
        raise
    except Exception as error:  # whatever the user's code raises when it is imported
        raise EquipoiseError(
            f"{where} = {name!r}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise EquipoiseError(f"{where} = {name!r}: {place} has no {attribute}{nearest(attribute, names)}")
    return getattr(module, attribute)


def _import_file(path: Path, where: str) -> ModuleType:
    """Import a file once; its name among the modules depends on its place, so that two files may have one name."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise EquipoiseError(f"{where} names the file {path}, which does not exist")
    name = f"equipoise_own_{path.stem}_{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pydantic look up a class's module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def choose(registry: Registry[S], table: Mapping[str, Any], where: str, key: str = "name") -> tuple[str, S]:
    """Read the settings of the class that `table` names.

    Args:
        registry: where the name is looked up.
        table: the settings, with the name.
        where: the name of the table, for error messages.
        key: the key of the name in the table.

    Returns:
        The name, and the settings.
    """
    if key not in table:
        raise EquipoiseError(f"{where}.{key} is missing; available: {', '.join(registry)}")
    name = table[key]
    cls = registry.find(name, f"{where}.{key}")
    return name, read(cls, {k: v for k, v in table.items() if k != key or key in cls.model_fields}, where)


def name_of(registry: Mapping[str, type[S]], settings: S) -> str:
    """Return the registered name of settings, or the name of their class if it is not registered."""
    return next((name for name, cls in registry.items() if cls is type(settings)), type(settings).__name__)

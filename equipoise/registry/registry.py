"""Registries: the classes of a kind by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from equipoise.errors import EquipoiseError
from equipoise.registry.own_code import installed, is_own_code, load_object, load_plugin
from equipoise.settings import Settings, nearest, read, shown

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
        wanted: str = "",
    ):
        """Create a registry.

        Args:
            kind: what it holds, in the plural, such as "algorithms".
            base: the class that all entries derive from.
            entries: the classes of the package by name.
            adapt: turns the user's own objects of other types (functions, modules) into a class of the kind; it gets
                the name and the object, and returns the object itself if there is nothing to turn.
            wanted: what the user's own code may be, in words; by default a class that derives from `base`.
        """
        self.kind, self.base, self.entries, self.adapt = kind, base, dict(entries), adapt
        self.wanted = wanted or f"a class that derives from equipoise.{base.__name__}"

    def __getitem__(self, name: str) -> type[S]:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, name: Any, where: str) -> type[S]:
        """Return the class with this name.

        Args:
            name: the name of an entry or of a plug-in, or the place of the user's own code.
            where: the setting that has the name, for error messages.
        """
        if isinstance(name, str) and name in self.entries:
            return self.entries[name]
        if is_own_code(name):
            return self.check(name, load_object(name, where), where)
        plugins = installed(self.kind)
        if isinstance(name, str) and name in plugins:
            return self.check(name, load_plugin(plugins[name], where), where)
        if isinstance(name, str) and name.endswith(".py"):
            raise EquipoiseError(f"{where} = {shown(name)} is a file; say what in it, such as '{name}:Name'")
        raise EquipoiseError(f"{where} = {shown(name)} is unknown{nearest(str(name), [*self, *plugins])}")

    def check(self, name: str, found: Any, where: str) -> type[S]:
        """Return the user's object as a class of this kind, or raise an error if it cannot be one.

        Args:
            name: the name that the user wrote.
            found: the object that has this name.
            where: the setting that has the name, for error messages.
        """
        if self.adapt is not None:
            found = self.adapt(name, found)
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise EquipoiseError(f"{where} = {name!r} is {_described(found)}; it must be {self.wanted}")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise EquipoiseError(f"{where} = {name!r} is incomplete: {found.__name__} has no {', '.join(missing)}")
        return found


def _described(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"


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

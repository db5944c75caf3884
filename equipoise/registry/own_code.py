"""Import of the user's own code and of installed plug-ins, and the rules about what may be imported."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.settings import nearest


@dataclass(frozen=True)
class _Rules:
    folders: tuple[Path, ...] = ()
    "folders in which relative paths and modules are looked up, before the current one"
    given: Mapping[str, Any] | None = None
    "objects by the setting that names them; if this is not None, nothing else is used and nothing is imported"


_NO_RULES = _Rules()
_rules: ContextVar[_Rules] = ContextVar("rules", default=_NO_RULES)


@contextmanager
def use_folders(folders: Sequence[Path]) -> Iterator[None]:
    """Look up own code in these folders first, as long as the `with` block lasts; within `allow_only` they are ignored.

    Args:
        folders: the folders of the files that name the code.
    """
    token = _rules.set(_Rules(tuple(folders), _rules.get().given))
    try:
        yield
    finally:
        _rules.reset(token)


@contextmanager
def allow_only(given: Mapping[str, Any]) -> Iterator[None]:
    """Import nothing by name as long as the `with` block lasts: settings that name own code get these objects.

    Args:
        given: the objects by the setting that names them, such as "algorithm.name".
    """
    token = _rules.set(_Rules((), dict(given)))
    try:
        yield
    finally:
        _rules.reset(token)


def is_own_code(name: Any) -> bool:
    """Tell whether a name is the place of own code, such as "package.module:Name" or "path/file.py:Name"."""
    return isinstance(name, str) and ":" in name


def function_name(function: Any) -> str:
    """Return a name by which a function given in Python is recognised when a run is resumed.

    It is the place of the function, with a digest of its code and of the values that it closes over, because two
    lambdas have the same place.
    """
    place = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return place
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    plain = [value for value in cells if isinstance(value, (bool, int, float, str))]
    text = repr((code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")], function.__defaults__, plain))
    return f"{place}#{blake2b(text.encode(), digest_size=4).hexdigest()}"


def short_name(name: str) -> str:
    """Return a name without the place of the code, for names of folders and for titles."""
    return name.rpartition(":")[2] or name


def find_path(path: str | Path, folders: Sequence[Path]) -> Path | None:
    """Return the absolute path of a file or folder that exists, or None.

    Args:
        path: the path as the user wrote it.
        folders: where a relative path may begin; the last place is the current folder.
    """
    path = Path(path).expanduser()
    places = [Path()] if path.is_absolute() else [*folders, Path.cwd()]
    return next((found.resolve() for place in places if (found := place / path).exists()), None)


def installed(kind: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a kind that other installed packages provide, by name, without importing them.

    Args:
        kind: the kind in the plural, such as "algorithms"; the entry point group is `equipoise.KIND`.
    """
    return {point.name: point for point in entry_points(group=f"equipoise.{kind}")}


def load_plugin(point: EntryPoint, where: str) -> Any:
    """Import a plug-in.

    Args:
        point: the plug-in, as `installed` returns it.
        where: the setting that has the name, for error messages.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # whatever the plug-in raises when it is imported
        raise EquipoiseError(
            f"{where} = {point.name!r} is a plug-in that cannot be imported: {_one_line(error)}"
        ) from error


def load_object(name: str, where: str) -> Any:
    """Import the user's own code.

    Files and modules are looked up in the folder of the experiment's file, then in the current folder; modules also
    among the installed ones. In a deployment nothing is imported: only what app.py gives is used.

    Args:
        name: "package.module:Name" or "path/file.py:Name".
        where: the setting that has the name, for error messages.
    """
    rules = _rules.get()
    if rules.given is not None:
        if where in rules.given:
            return rules.given[where]
        raise EquipoiseError(
            f"{where} = {name!r} names code, and a deployment imports no code by name; import it in app.py and give it "
            "to App(...) there, or install it as a plug-in"
        )
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise EquipoiseError(f"{where} = {name!r} is not allowed; own code is 'package.module:Name' or 'file.py:Name'")
    try:
        if place.endswith(".py"):
            module = _import_file(place, rules.folders, where)
        else:
            with _first_on_path([*rules.folders, Path.cwd()]):
                module = importlib.import_module(place)
    except EquipoiseError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises when it is imported
        raise EquipoiseError(f"{where} = {name!r} cannot be imported: {_one_line(error)}") from error
    if not hasattr(module, attribute):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise EquipoiseError(f"{where} = {name!r}: there is no {attribute} in {place}{nearest(attribute, names)}")
    return getattr(module, attribute)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _import_file(place: str, folders: Sequence[Path], where: str) -> ModuleType:
    """Import a file once; its name among the modules depends on its place, so that two files may have one name."""
    path = find_path(place, folders)
    if path is None or not path.is_file():
        looked = dict.fromkeys(str(folder) for folder in (*folders, Path.cwd()))
        places = "" if Path(place).is_absolute() else f" in {' or '.join(looked)}"
        raise EquipoiseError(f"{where} names the file {place!r}, which does not exist{places}")
    name = f"equipoise_own_{path.stem}_{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pydantic look up a class's module
    try:
        with _first_on_path([path.parent]):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folders: Sequence[Path]) -> Iterator[None]:
    """Import from these folders first; later imports, inside the user's functions, still find what lies there."""
    added = [text for text in dict.fromkeys(str(folder) for folder in folders) if text not in sys.path]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = [*(text for text in sys.path if text not in added), *added]

"""The user's own code in an app: which files it consists of, and how app.py passes it on."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.registry import find_path, is_own_code

_RESERVED = {"app", "equipoise", *sys.stdlib_module_names}


@dataclass
class AppCode:
    """Own code that an experiment names."""

    given: dict[str, str] = field(default_factory=dict)
    "arguments of App in app.py, and the expressions that are passed"
    modules: list[str] = field(default_factory=list)
    "modules that app.py imports"
    files: dict[Path, Path] = field(default_factory=dict)
    "files to copy, by their place in the app"
    installed: list[str] = field(default_factory=list)
    "packages that are not copied and must be installed on every machine"

    @staticmethod
    def of(experiment: Experiment) -> "AppCode":
        """Find the code that an experiment names: algorithm, schedule, model, attack, reducer, metrics and callbacks.

        Args:
            experiment: the experiment; the code that it names has been imported.
        """
        found, folders = AppCode(), [*experiment.folders, Path.cwd()]
        names = {
            "algorithm": experiment.algorithm_name,
            "schedule": experiment.algorithm.schedule.function,
            "model": experiment.model_name,
            "attack": experiment.attack_name,
            "reducer": experiment.reducer_name,
        }
        for section, name in names.items():
            if is_own_code(name):
                found.given[section] = found._expression(name, folders)
        metrics = experiment.schedule.metrics or ()
        if any(map(is_own_code, metrics)):
            named = (found._expression(name, folders) if is_own_code(name) else repr(name) for name in metrics)
            found.given["metric"] = f"[{', '.join(named)}]"
        own = [
            f"{found._expression(name, folders)}(**{callback.table()!r})"
            for name, callback in zip(experiment.callback_names, experiment.callbacks, strict=True)
            if is_own_code(name)
        ]
        if own:
            found.given["callbacks"] = f"[{', '.join(own)}]"
        return found

    def _expression(self, name: str, folders: list[Path]) -> str:
        """Add the code at a place, and return the expression for it in app.py."""
        place, _, attribute = name.rpartition(":")
        module = self._add(place, folders)
        self.modules += [module] if module not in self.modules else []
        return f"{module}.{attribute}"

    def _add(self, place: str, folders: list[Path]) -> str:
        """Add the code at this place, and what it imports from beside it; return the name of its module in the app."""
        if place.endswith(".py"):
            path = find_path(place, folders)
            assert path is not None
            self._add_beside(path.parent, path.stem)
            return path.stem
        top = place.split(".")[0]
        root = next((folder for folder in folders if _lies_in(folder, top)), None)
        if root is not None and _comes_from(root, top):
            self._add_beside(root, top)
        else:
            self.installed += [top] if top not in self.installed else []
        return place

    def _add_beside(self, root: Path, name: str) -> None:
        """Add a module or package that lies in this folder, with all that it imports from there."""
        if not name.isidentifier() or name in _RESERVED or name.startswith("test_") or name.endswith("_test"):
            raise EquipoiseError(
                f"{root / name}.py cannot be part of an app under this name; rename the file, such as my_code.py"
            )
        package = root / name
        files = sorted(package.rglob("*.py")) if package.is_dir() else [root / f"{name}.py"]
        for file in files:
            target = file.relative_to(root)
            if self.files.setdefault(target, file) != file:
                raise EquipoiseError(f"{self.files[target]} and {file} have one name in the app; rename one of them")
        for file in files:
            for other in _imported(file):
                known = Path(f"{other}.py") in self.files or Path(other, "__init__.py") in self.files
                if not known and _lies_in(root, other):
                    self._add_beside(root, other)


def _lies_in(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def _comes_from(folder: Path, module: str) -> bool:
    """Tell whether a module that was imported is the one in this folder, and not an installed one."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    return origin is not None and Path(origin).resolve().is_relative_to(folder.resolve())


def _imported(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]

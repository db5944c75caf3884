"""A SuperNode that looks for messages five times a second instead of every three seconds.

    python -P -m equipoise.flower.warm.fast_poll [options of flower-supernode]

Flower has no setting for this: the seconds are literals in one of its files. They are changed only if that file still
sleeps exactly where it is known to; otherwise the SuperNode runs with Flower's own seconds, and says so.
"""

import ast
import importlib
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULE = "flwr.supernode.start_client_internal"
COMMAND = "flower-supernode"
KNOWN = {("start_client_internal", 3): 0.2, ("_push_messages", 0.5): 0.1, ("yield_object_contents", 0.5): 0.1}
"""Function and seconds of every sleep in that file, and what they become."""


def sleeps(source: str) -> list[tuple[str, Any]] | None:
    """Return function and seconds of every `time.sleep` in a source; None if it uses `time` in any other way."""
    found: list[tuple[str, Any]] = []
    used = 0

    def visit(node: ast.AST, function: str) -> None:
        nonlocal used
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Name) and node.id == "time":
            used += 1
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="time"), attr="sleep"), args=[ast.Constant(value=seconds)]
            ):
                found.append((function, seconds))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found if used == len(found) else None


def shorten() -> str:
    """Shorten the sleeps; return why that was not possible, or nothing."""
    try:
        module = importlib.import_module(MODULE)
        found = sleeps(Path(str(module.__file__)).read_text(encoding="utf-8"))
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return f"{MODULE} cannot be read ({error})"
    if found is None or sorted(found) != sorted(KNOWN) or getattr(module, "time", None) is not time:
        return f"{MODULE} of this version of Flower does not wait as it is known to"
    seconds: dict[float, float] = {before: after for (_, before), after in KNOWN.items()}

    def sleep(wanted: float) -> None:
        time.sleep(seconds.get(wanted, wanted))

    vars(module)["time"] = SimpleNamespace(sleep=sleep)
    return ""


def main() -> None:
    """Run the SuperNode."""
    if reason := shorten():
        print(f"equipoise: the SuperNode looks for messages as seldom as Flower does: {reason}", file=sys.stderr)
    sys.argv[0] = COMMAND
    (program,) = entry_points(group="console_scripts", name=COMMAND)
    sys.exit(program.load()())


if __name__ == "__main__":
    main()

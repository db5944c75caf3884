"""The API reference and the design page are complete and true."""

import ast
import re
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.algorithms.base import Algorithm
from tests.support.problems import simulation

ROOT = Path(__file__).parent.parent
REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
DESIGN = (ROOT / "docs" / "design.md").read_text()


@pytest.mark.parametrize("name", [name for name in eq.__all__ if not name.isupper() or name == "CFL"])
def test_every_public_name_is_in_the_api_reference(name: str) -> None:
    public = getattr(eq, name)
    assert f"::: {public.__module__}.{name}\n" in REFERENCE + "\n"


def test_what_the_api_reference_names_exists() -> None:
    paths = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
    assert len(paths) == len(set(paths)) > 60
    for path in paths:
        module, _, name = path.rpartition(".")
        file = ROOT / (path.replace(".", "/") + ".py")
        if not file.exists():
            assert hasattr(__import__(module, fromlist=[name]), name), path


def test_the_smallest_algorithm_in_the_design_is_fedavg() -> None:
    [code] = re.findall(r"```python\n(.*?)```", DESIGN, re.DOTALL)
    names: dict[str, object] = {"__name__": "smallest"}
    exec(code, names)
    cls = names["Smallest"]
    assert isinstance(cls, type)
    assert issubclass(cls, Algorithm)
    runs = [simulation(made(lr=0.05, batch=4), mode="stacked") for made in (cls, eq.FedAvg)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].server.w, runs[1].server.w)


def test_files_that_the_design_names_exist() -> None:
    named = set(re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|json|toml))`", DESIGN))
    assert len(named) > 50
    for path in named - {"paper/tables.toml"}:
        assert (ROOT / "equipoise" / path).exists() or (ROOT / path).exists(), path
    rooms = {path.name for path in (ROOT / "equipoise").iterdir() if (path / "__init__.py").exists()}
    assert rooms == {name for name in rooms if f"`{name}/`" in DESIGN}


def _public_functions() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "equipoise").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", ast.get_docstring(node) or ""))
    return found


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """As far as a list of words that are no verbs can tell."""
    not_verbs = r"(A|An|The|Of|With|Without|What|Who|Whose|Which|Where|How|For|From|In|As|All|Each|Every|One|Its|It)\b"
    wrong = [where for where, text in _public_functions() if re.match(not_verbs, text)]
    assert not wrong

"""The notebooks in examples/ run as they are, and say what they said when they were stored."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support.commands import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs nbformat and nbclient, which `make setup` installs")
pytest.importorskip("nbclient", reason="needs nbclient, which `make setup` installs")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def texts(notebook: object) -> str:
    """What the cells print and return."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join([each.get("text", "") + str(each.get("data", {}).get("text/plain", "")) for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_as_it_is(path: Path) -> None:
    execute = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))["execute"]
    stored, now = nbformat.read(path, as_version=4), execute(path)
    pictures = sum("image/png" in each.get("data", {}) for cell in now.cells for each in cell.get("outputs", []))
    assert pictures >= 2
    # Figures may differ in the last digits on another processor; what they are of does not.
    assert re.sub(r"[\d.]+|0x\w+", "#", texts(now)) == re.sub(r"[\d.]+|0x\w+", "#", texts(stored))
    assert "same predictions: True" in texts(now)

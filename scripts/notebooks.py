"""Execute the notebooks in examples/ and store them with their outputs.

    python scripts/notebooks.py [--check]

With --check they are executed in a temporary folder and not stored; an error in a cell is an error.
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples"
_CELL_SECONDS = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """Return a notebook as it is after all its cells ran, in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=_CELL_SECONDS, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of execution
        if "outputs" in cell:  # warnings of other packages about the place of execution
            cell.outputs = [each for each in cell.outputs if "TqdmWarning" not in each.get("text", "")]
    return notebook


def main() -> None:
    """Execute all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="do not store the outputs")
    options = parser.parse_args()
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        if not options.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()

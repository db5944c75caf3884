"""Facts about the house: where files are, what they say of themselves, and what loads PyTorch."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

import equipoise
from tests.support.commands import ROOT, equipoise_command, small
from tests.support.waiting import LIMIT

PACKAGE = ROOT / "equipoise"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})


def dotted(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT).parts)


def test_at_most_twelve_files_are_at_the_root_of_the_package() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.parametrize("folder", FOLDERS, ids=dotted)
def test_every_package_says_what_lives_there(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert text
    assert text.split("\n")[0].endswith(".")


def test_every_package_is_installed() -> None:
    """The experiments, which are beside the package here, are installed inside it."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert sorted(installed) == sorted([*map(dotted, FOLDERS), "equipoise.experiments"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.toml").write_text(tomli_w.dumps(small()))
    assert equipoise_command("run", "small.toml", "--out", "run", "--quiet", cwd=folder).returncode == 0
    return folder


READING = ["--help", "--version", "list algorithms", "list models mlp --json", "compare run", "watch run --once"]
WITHOUT_TORCH = """
import contextlib, io, sys
from equipoise.cli.app import main
for words in sys.argv[1:]:
    sys.argv = ["equipoise", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as end:
            assert not end.code, (words, end.code)
    assert printed.getvalue(), words
    assert "torch" not in sys.modules, words
    print(words)
"""


def test_commands_that_only_read_do_not_load_pytorch(runs: Path) -> None:
    """One process runs all of them, as starting it takes longer than they do."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *READING]
    done = subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == READING


def test_the_program_and_the_package_have_one_version() -> None:
    command = [sys.executable, "-m", "equipoise", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, f"equipoise {equipoise.__version__}\n")

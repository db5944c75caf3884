"""Run the command line, and check what it prints."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from equipoise.cli.app import main
from tests.support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
"""The folder of the project."""
WIDTH = 160
"""Columns of the terminal; a test may set another number."""
SMALL = """
rounds = {rounds}
participation = 3
checkpoint_every = 2
[data]
name = "digits-by-writer"
clients = 6
[model]
name = "softmax"
[algorithm]
name = "{name}"
lr = 0.1
"""


def equipoise_command(
    *arguments: object, cwd: Path, real: bool = False, **options: object
) -> subprocess.CompletedProcess:
    """The command with what it says and its exit code; in a process of its own only if it must be `real`.

    Starting PyTorch takes seconds, and most of these tests are about what is printed.
    """
    env = {"COLUMNS": str(WIDTH), "EQUIPOISE_DATA": str(cwd / "data")}
    words = [*map(str, arguments)]
    if real or options:
        command = [sys.executable, "-m", "equipoise", *words]
        env = {**os.environ, **env}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT, **options)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, env),
        mock.patch.object(sys, "argv", ["equipoise", *words]),
    ):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def is_one_sentence(error: Exception, *words: str) -> str:
    """Check that an error is told in one line that has these words in it, and return that line."""
    sentence = str(error)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence
    return sentence


def one_sentence(done: subprocess.CompletedProcess, code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("equipoise: ")
    for word in words:
        assert word in last


def small(**more: Any) -> dict[str, Any]:
    """Three clients of a straight line, two rounds."""
    tables: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": "linear", "clients": 3, "samples": 12},
        "model": {"name": "linear"},
        "algorithm": {"name": "ditto", "lr": 0.1},
    }
    for key, value in more.items():
        tables[key] = {**tables[key], **value} if isinstance(value, dict) and key in tables else value
    return tables

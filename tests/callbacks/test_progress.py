"""Runs that are started from Python talk: progress where somebody looks, and every message."""

import io
import os
import pty
import re
import select
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import equipoise as eq
from equipoise.callbacks.progress import BarCallback, in_notebook, progress_from_python
from tests.support.callbacks import StopAt, train
from tests.support.forked import Forked
from tests.support.problems import classification


def overflowing(*clients: int) -> eq.Federation:
    """The small federation, in which training overflows on the samples of these clients."""
    federation = classification()
    x = federation.x.clone()
    for who in clients:
        x[torch.from_numpy(federation.train[who])] = 3e38
    return replace(federation, x=x)


def train_linear(*clients: int, **options: Any) -> None:
    """Train with samples of these clients on which training overflows."""
    eq.train(nn.Linear(5, 3), overflowing(*clients), eq.FedAvg(batch=4, epochs=3), head=None, **options)


def warned(*clients: int, rounds: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", ResourceWarning)  # of what other tests left behind
        train_linear(*clients, rounds=rounds)
    assert {each.category for each in found} <= {eq.RunWarning}
    assert all(each.filename == __file__ for each in found)  # they point at the line that trains
    return [str(each.message) for each in found]


def test_a_dropped_update_warns_in_every_run() -> None:
    expected = [
        f"round {round}: the update of client-2 has NaN or infinite numbers and was left out" for round in (1, 2)
    ]
    assert warned(2) == expected
    assert warned(2) == expected  # Python itself would show it once only
    assert warned() == []


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ((1, 4), "2 of 6 updates have NaN or infinite numbers and were left out: client-1, client-4"),
        ((0, 1, 2, 3, 5), "5 of 6 updates have NaN or infinite numbers and were left out: "
         "client-0, client-1, client-2 and 2 others"),
    ],
)  # fmt: skip
def test_many_dropped_updates_are_one_sentence(bad: tuple[int, ...], sentence: str) -> None:
    assert warned(*bad, rounds=1) == [f"round 1: {sentence}"]


def test_when_all_updates_are_bad_only_the_failure_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(eq.RunFailed, match="every client's update has NaN or infinite numbers"):
            train_linear(*range(6), rounds=1)


def test_a_warning_that_is_an_error_ends_the_run_as_itself(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", eq.RunWarning)
        with pytest.raises(eq.RunWarning, match="the update of client-2"):
            train_linear(2, rounds=3, out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "round-000001.json").exists()


def test_privacy_says_what_it_does_not_cover() -> None:
    privacy = eq.Privacy(clip=1.0, sigma=1.0)
    with pytest.warns(eq.RunWarning, match="clients' scores and failures to train are not covered") as found:
        train([], rounds=1, privacy=privacy)
    assert len(found) == 1


def test_a_stop_is_no_warning(capsys: pytest.CaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train([StopAt(round=2)])
    assert capsys.readouterr().err == "equipoise: the run stopped after round 2: round 2 was enough\n"


@pytest.mark.parametrize("options", [{}, {"progress": False}])
def test_nothing_is_shown_where_nobody_looks(options: dict[str, Any], capfd: pytest.CaptureFixture) -> None:
    train([], rounds=2, **options)
    assert capfd.readouterr() == ("", "")


def test_lines_are_printed_where_there_is_no_terminal_but_somebody_asks(capsys: pytest.CaptureFixture) -> None:
    train([], rounds=20, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"round {k} of 20" for k in range(2, 21, 2)]
    assert re.fullmatch(r"round 2 of 20  personal [\d.]+% global [\d.]+%", lines[0])
    train([eq.Progress(every=3), StopAt(round=7)], rounds=20)
    err = capsys.readouterr().err
    assert re.findall(r"round (\d+) of 20", err) == ["3", "6", "7"]


def test_a_notebook_gets_lines_on_its_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class ZMQInteractiveShell: ...

    shell = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert in_notebook()
    train([], rounds=3)
    printed = capsys.readouterr()
    assert re.findall(r"round (\d) of 3", printed.out) == ["1", "2", "3"]
    assert printed.err == ""
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
    assert progress_from_python(None) == []


def train_at(terminal: str) -> None:
    """Train, with a terminal as standard error."""
    os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY), 2)
    train([StopAt(round=3)], rounds=6)


@pytest.mark.slow
def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    shown = b""
    with Forked(tmp_path / "log", train_at, os.ttyname(terminal), environment=environment) as process:
        while (alive := process.process.is_alive()) or select.select([screen], [], [], 0)[0]:
            if select.select([screen], [], [], 0.05 if alive else 0)[0]:
                shown += os.read(screen, 4096)
        assert process.wait() == 0, process.said()
    os.close(terminal)
    os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "ditto" in text
    assert "3/6 rounds" in text
    assert "equipoise: the run stopped after round 3: round 3 was enough" in text


def test_a_long_message_is_one_line() -> None:
    """So that a path in it can be copied."""
    console = Console(file=io.StringIO(), width=40)
    BarCallback(None, "run", console).on_message(f"ended. Its log: /{'folder/' * 20}one.log")
    assert console.file.getvalue() == f"equipoise: ended. Its log: /{'folder/' * 20}one.log\n"  # type: ignore[attr-defined]

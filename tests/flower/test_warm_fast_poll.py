"""Flower's seconds between two looks for messages are changed only where they are known."""

import importlib
import time
from pathlib import Path

import pytest

from equipoise.flower.warm import fast_poll


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of Flower that would be changed, which is as before after the test."""
    module = importlib.import_module(fast_poll.MODULE)
    monkeypatch.setattr(module, "time", time)
    return Path(str(module.__file__)).read_text()


def test_the_installed_flower_is_known(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(fast_poll.sleeps(source) or []) == sorted(fast_poll.KNOWN)
    assert fast_poll.shorten() == ""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    module = importlib.import_module(fast_poll.MODULE)
    for seconds in (3, 0.5, 7):
        module.time.sleep(seconds)
    assert slept == [0.2, 0.1, 7]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("time.sleep(3)", "time.sleep(2)"),
        ("time.sleep(3)", "time.sleep(INTERVAL)"),
        ("time.sleep(3)", "wait(3)"),
        ("time.sleep(3)", "time.sleep(3); time.monotonic()"),
        ("time.sleep(3)", "time.sleep(3); time.sleep(0.5)"),
        ("def _push_messages(", "def _send_messages("),
    ],
)
def test_another_flower_is_left_alone(
    before: str, after: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source.count(before) == 1
    module = importlib.import_module(fast_poll.MODULE)
    (tmp_path / "other.py").write_text(source.replace(before, after))
    monkeypatch.setattr(module, "__file__", str(tmp_path / "other.py"))
    assert "does not wait as it is known to" in fast_poll.shorten()
    assert module.time is time

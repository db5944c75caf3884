"""Messages of a run as Python warnings."""

import sys
import warnings
from pathlib import Path
from typing import ClassVar

from equipoise.callbacks.base import Callback

_PACKAGE = str(Path(__file__).parents[1])


class RunWarning(UserWarning):
    """A message of a run that was started from Python, such as a client whose update was dropped."""


class WarnMessages(Callback):
    """Shows every message of a run as a `RunWarning` at the line that started the run."""

    affects_results: ClassVar[bool] = False

    def on_message(self, text: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        # With a registry of its own, a message is also shown if an earlier run had the same.
        warnings.warn_explicit(text, RunWarning, frame.f_code.co_filename, frame.f_lineno, registry={})

    def on_stop(self, text: str) -> None:
        print(f"equipoise: {text}", file=sys.stderr)  # the user asked for it, so it is no warning

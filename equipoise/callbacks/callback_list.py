"""The callbacks of one run, called together; one that raises does not lose the run."""

import copy
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from equipoise.callbacks.base import Callback, Line, RunContext
from equipoise.callbacks.messages import RunWarning
from equipoise.callbacks.trackers import Tracker
from equipoise.errors import EquipoiseError, Interrupted, RunFailed


class CallbackList:
    """Forwards the events of a run to its callbacks.

    An error in a callback never interrupts a round: it is kept in `failure` until the run has saved its state and calls
    `check`. Trackers that fail are dropped with a warning.
    """

    def __init__(self, callbacks: Sequence[Callback] = (), settings: Mapping[str, Any] | None = None):
        """Create the list.

        Args:
            callbacks: the callbacks; they are called in this order.
            settings: all settings of the run, for those who ask.
        """
        self.callbacks, self.settings = list(callbacks), dict(settings or {})
        self.folder: Path | None = None
        self.beginning = False
        "whether `on_run_begin` is being called"
        self.failure: Exception | None = None
        self.saved: dict[str, dict[str, Any]] = {}
        "what the checkpoint that the run resumes from has of each callback"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tell the callbacks if the run fails or is stopped by the user."""
        try:
            yield
        except BaseException as error:
            failed = not isinstance(error, Interrupted | KeyboardInterrupt)
            self._forward("on_interrupt", lambda callback: callback.on_interrupt(failed))
            raise

    def on_data_progress(self, done: int, total: int) -> None:
        """Forward the progress in decoding the data."""
        self._forward("on_data_progress", lambda callback: callback.on_data_progress(done, total))

    def on_message(self, text: str) -> None:
        """Forward a message for the user."""
        self._forward("on_message", lambda callback: callback.on_message(text))

    def on_stop(self, text: str) -> None:
        """Forward the news that a callback stopped the run."""
        self._forward("on_stop", lambda callback: callback.on_stop(text))

    def on_run_begin(self, run: RunContext) -> None:
        """Forward the start of a run, and give callbacks back the state that was saved."""
        self.folder = run.folder
        for callback in self.callbacks:
            callback.attach(run)
        self.beginning = True
        self._forward("on_run_begin", lambda callback: callback.on_run_begin())
        self.check()
        for key, callback in self._keys().items():
            if (state := self.saved.get(key)) is not None:
                self._call("load_state_dict", callback, partial(type(callback).load_state_dict, state=state))
        self.check()
        self.beginning = False

    def on_evaluation(self, line: Line) -> None:
        """Forward the scores of a round."""
        self._forward("on_evaluation", lambda callback: callback.on_evaluation(copy.deepcopy(line)))

    def on_round_end(self, line: Line, affects_results: bool) -> None:
        """Forward the end of a round: first to callbacks that may affect results, later to the others."""
        some = [callback for callback in self.callbacks if callback.affects_results == affects_results]
        self._forward("on_round_end", lambda callback: callback.on_round_end(copy.deepcopy(line)), some)

    def on_run_end(self, summary: dict[str, Any]) -> None:
        """Forward the end of the run."""
        self._forward("on_run_end", lambda callback: callback.on_run_end(copy.deepcopy(summary)))
        self.check()

    def check(self) -> None:
        """Raise the first error of a callback, if there was one."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint keeps of the callbacks."""
        found: dict[str, dict[str, Any]] = {}

        def keep(key: str, callback: Callback) -> None:
            if state := callback.state_dict():
                found[key] = json.loads(json.dumps(state, allow_nan=False))

        for key, callback in self._keys().items():
            self._call("state_dict", callback, partial(keep, key))
        return found

    def _keys(self) -> dict[str, Callback]:
        """Return the callbacks by the names of their classes; several of one class are numbered."""
        counts: Counter[str] = Counter()
        keys: dict[str, Callback] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            counts[name] += 1
            keys[f"{name} {counts[name]}"] = callback
        return keys

    def _forward(self, hook: str, event: Callable[[Callback], None], some: Sequence[Callback] | None = None) -> None:
        for callback in list(self.callbacks if some is None else some):
            self._call(hook, callback, event)

    def _call(self, hook: str, callback: Callback, event: Callable[[Callback], None]) -> None:
        name = type(callback).__name__
        try:
            event(callback)
        except Interrupted:
            raise
        except (EquipoiseError, RunWarning) as error:  # it says itself what is wrong; warnings may be errors
            self.failure = self.failure or error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if isinstance(callback, Tracker):
                self.callbacks = [other for other in self.callbacks if other is not callback]
                self.on_message(f"{name} failed and is not used any more: {what}")
                return
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"the callback {name} failed in {hook}: {what} ({Path(place.filename).name}, line {place.lineno})"
            self.failure = self.failure or _failure(hook, text, self.folder)
            self.failure.__cause__ = self.failure.__cause__ or error


def _failure(hook: str, text: str, folder: Path | None) -> EquipoiseError:
    """Return the error for a callback that raised: what happened, and what is left of the run."""
    if hook in ("on_data_progress", "on_run_begin", "load_state_dict"):
        return EquipoiseError(text)
    if hook == "on_run_end":
        return RunFailed(f"the run is finished and its results are complete, but {text}")
    saved = "nothing is saved, as the run has no folder" if folder is None else "all rounds so far are saved"
    return RunFailed(f"{text}; the run stops, and {saved}")

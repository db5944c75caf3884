"""Checkpoints at other times than those of `checkpoint_every`."""

import time
from typing import Any, ClassVar

from equipoise.callbacks.base import Callback, Line
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Positive


class Checkpoints(Callback):
    """Writes further checkpoints, from which a run can be resumed: every few rounds, or every few minutes."""

    affects_results: ClassVar[bool] = False
    every: Count | None = None
    "number of rounds between two checkpoints"
    minutes: Positive | None = None
    "a checkpoint is written after the first round that ends this long after the last one"

    def model_post_init(self, context: Any) -> None:
        """Check that at least one of the settings is given."""
        if self.every is None and self.minutes is None:
            raise ValueError("it needs every = ROUNDS or minutes = MINUTES")

    def on_run_begin(self) -> None:
        if self.run.folder is None:
            raise EquipoiseError("checkpoints need a run folder; say out=...")
        self.saved = time.monotonic()

    def on_round_end(self, line: Line) -> None:
        due = self.every is not None and line["round"] % self.every == 0
        if due or (self.minutes is not None and time.monotonic() - self.saved >= 60 * self.minutes):
            self.run.save_checkpoint()
            self.saved = time.monotonic()

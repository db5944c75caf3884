"""The interface for following the progress of a run."""

from typing import Any


class RunCallback:
    """Receives the events of a run; this base class ignores them."""

    def on_data_progress(self, done: int, total: int) -> None:
        """Handle progress in decoding the data: `done` of `total` parts."""

    def on_run_begin(self, rounds: int, done: int) -> None:
        """Handle the start of a run, of which `done` of `rounds` rounds are already finished."""

    def on_round_end(self, line: dict[str, Any]) -> None:
        """Handle the end of a round; `line` is its line in metrics.jsonl."""

    def on_run_end(self, summary: dict[str, Any]) -> None:
        """Handle the end of the run; `summary` is the content of summary.json."""

    def on_message(self, text: str) -> None:
        """Handle a message for the user: a warning or other news, in one sentence."""

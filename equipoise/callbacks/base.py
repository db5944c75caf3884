"""Whoever wants to see how a run goes."""

from typing import Any


class RunCallback:
    """Told of every round; this one keeps quiet."""

    def on_data_progress(self, done: int, total: int) -> None:
        """Data are being decoded; this much of it is done."""

    def on_run_begin(self, rounds: int, done: int) -> None:
        """`done` of `rounds` are there already."""

    def on_round_end(self, line: dict[str, Any]) -> None:
        """A round is over; `line` is what metrics.jsonl says of it."""

    def on_run_end(self, summary: dict[str, Any]) -> None:
        """All rounds are done; `summary` is what summary.json says."""

    def on_message(self, text: str) -> None:
        """Something a person should know, in a sentence."""

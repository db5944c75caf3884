"""Whoever wants to see how a run goes."""

from typing import Any


class RunCallback:
    """Told of every round; this one keeps quiet."""

    def reading(self, done: int, total: int) -> None:
        """Data are being decoded; this much of it is done."""

    def begin(self, rounds: int, done: int) -> None:
        """`done` of `rounds` are there already."""

    def round(self, line: dict[str, Any]) -> None:
        """A round is over; `line` is what metrics.jsonl says of it."""

    def end(self, summary: dict[str, Any]) -> None:
        """All rounds are done; `summary` is what summary.json says."""

    def tell(self, text: str) -> None:
        """Something a person should know, in a sentence."""

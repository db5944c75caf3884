"""The progress of the current round, kept in checkpoints so that a restarted server can continue within the round."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from equipoise.equilibrium import Solves, SolveStats
from equipoise.flower.codec import group, named
from equipoise.state import State


@dataclass
class RoundProgress:
    """A round of which some exchanges may be done."""

    participants: tuple[str, ...] = ()
    "names of the clients in the round, while some but not all of its exchanges are done"
    asked: int = 0
    "number of clients that its first exchange asked"
    restarts: int = 0
    "number of times it was started again because too few of its clients were left"
    seconds: float = 0.0
    "time that its exchanges have taken"
    solves: Solves = field(default_factory=Solves)
    "counts of its equilibrium solves"
    diagnostics: list[dict[str, float]] = field(default_factory=list)
    "what the clients of its last exchange report of their updates; not saved, because that exchange ends the round"
    server_before: State = field(default_factory=State)
    "the server's state before it"

    def restarted(self) -> "RoundProgress":
        """Return the progress of the same round, started again."""
        return RoundProgress(restarts=self.restarts + 1, seconds=self.seconds)

    def facts(self, client_seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON; `client_seconds` are those of the round."""
        return {
            "within": [self.asked, self.participants],
            "round": {
                "restarts": self.restarts,
                "seconds": self.seconds,
                "solves": asdict(self.solves),
                "client_seconds": dict(client_seconds),
            },
        }

    def tensors(self, begun: bool) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors, if the round has `begun`."""
        return named(self.server_before if begun else State(), "before")

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Take back what was saved; return the seconds of each client."""
        self.asked, participants = facts.get("within", (0, ()))
        self.participants = tuple(participants)
        self.server_before = group(tensors, "before")
        saved = facts.get("round", {})  # absent in checkpoints of version 0.1
        self.restarts, self.seconds = saved.get("restarts", 0), saved.get("seconds", 0.0)
        self.solves = Solves(**{way: SolveStats(**counts) for way, counts in saved.get("solves", {}).items()})
        return dict(saved.get("client_seconds", {}))

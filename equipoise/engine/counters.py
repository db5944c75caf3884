"""What a run counts: bytes, samples, rejected updates, equilibrium solves, seconds; and what clients report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum

from equipoise.equilibrium import Solves
from equipoise.settings import LARGEST
from equipoise.storage.diagnostics import DIAGNOSTICS


@dataclass
class Counters:
    """Totals over the rounds of a run; the names of the fields are those in checkpoints."""

    bytes_up: int = 0
    bytes_down: int = 0
    gradient_samples: int = 0
    left_out: int = 0
    solves: Solves = field(default_factory=Solves)
    seconds: float = 0.0

    def sums(self) -> dict[str, int]:
        """Return the totals that go into every line of metrics.jsonl."""
        return {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "gradient_samples": self.gradient_samples,
        }


def solver_figures(solves: Solves) -> dict[str, float]:
    """Return iterations per solve and the unconverged fraction: of fixed points, and of gradients if solved for."""
    figures: dict[str, float] = {}
    if solves.forward.solves:
        figures |= {"solver_iterations": solves.forward.mean, "unconverged": solves.forward.failed}
    if solves.backward.solves:
        figures |= {"gradient_iterations": solves.backward.mean, "gradients_unconverged": solves.backward.failed}
    if solves.forward.measured:
        figures["spectral_radius"] = solves.forward.radius / solves.forward.measured
    return figures


def diagnostic_figures(clients: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the mean of each diagnostic over the clients that report it; impossible numbers are ignored."""
    found: dict[str, list[float]] = {}
    for client in clients:
        for name, value in client.items():
            if abs(value) <= LARGEST:  # not if it is NaN
                found.setdefault(name, []).append(value)
    # In whatever order clients and names come, the figures are the same bytes.
    means = {name: fsum(values) / len(values) for name, values in sorted(found.items())}
    return {DIAGNOSTICS: means} if means else {}

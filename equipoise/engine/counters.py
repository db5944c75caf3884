"""What a run counts: bytes, samples, rejected updates, equilibrium solves, seconds."""

from dataclasses import dataclass, field

from equipoise.equilibrium import Solves


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

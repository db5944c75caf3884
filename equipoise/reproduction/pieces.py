"""The runs that belong to a part of an exhibit."""

from dataclasses import dataclass
from pathlib import Path

from equipoise.reproduction.exhibits import ExhibitPart
from equipoise.runs.sweep import Sweep, SweepRun, group, tuned


@dataclass(frozen=True)
class Piece:
    """The runs of one file that belong to a part of an exhibit, and their folder."""

    part: ExhibitPart
    file: str
    every: tuple[SweepRun, ...]
    sweep: Sweep
    folder: Path
    seconds: float | None
    "seconds that one of its runs takes, if known"

    def trials(self) -> list[SweepRun]:
        """Return the runs by which settings are chosen, if any are tuned."""
        return tuned(self.every, self.sweep, self.folder)[0]

    def wanted(self) -> list[SweepRun]:
        """Return the runs with the chosen settings; none until all trials are done."""
        return tuned(self.every, self.sweep, self.folder)[1]

    def planned(self) -> list[SweepRun]:
        """Return all runs that there will be; until settings are chosen, arbitrary ones take their place."""
        trials, wanted = tuned(self.every, self.sweep, self.folder)
        if trials and not wanted:
            groups = {group(cell, self.sweep.tune): cell.identity for cell in trials}
            wanted = [cell for cell in self.every if cell.identity in groups.values()]
        return list({(cell.identity, cell.seed): cell for cell in (*trials, *wanted)}.values())

    def weight(self, cell: SweepRun) -> float:
        """Return the weight of a run in the overall progress."""
        return cell.experiment.schedule.rounds if self.seconds is None else self.seconds

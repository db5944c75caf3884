"""The runs that belong to a part of an exhibit."""

from dataclasses import dataclass
from pathlib import Path

from equipoise.reproduction.exhibits import ExhibitPart
from equipoise.runs.sweep import Sweep, SweepRun
from equipoise.runs.sweep_results import SweepResults
from equipoise.runs.tuning import group, trial_of, trials_of, tuned


@dataclass(frozen=True)
class Piece:
    """The runs of one file that belong to a part of an exhibit, and their results."""

    part: ExhibitPart
    file: str
    every: tuple[SweepRun, ...]
    sweep: Sweep
    results: SweepResults
    seconds: float | None
    "seconds that one of its runs takes, if known"

    @property
    def folder(self) -> Path:
        """Return the folder of all run folders."""
        return self.results.out

    def over(self, cell: SweepRun) -> bool:
        """Tell whether a run is finished or failed."""
        return self.results.done(cell) or self.results.failed(cell)

    def trials(self) -> list[SweepRun]:
        """Return the runs by which settings are chosen, if any are tuned."""
        return trials_of(self.every, self.sweep)

    def wanted(self) -> list[SweepRun]:
        """Return the runs with the chosen settings; none until all trials are done."""
        return tuned(self.every, self.sweep, self.results)[1]

    def planned(self) -> list[SweepRun]:
        """Return all runs that there will be; until settings are chosen, arbitrary ones take their place."""
        trials, wanted = tuned(self.every, self.sweep, self.results)
        if trials and not wanted:
            tried = {(trial.identity, trial.seed) for trial in trials}
            with_trial = [cell for cell in self.every if _key(trial_of(cell, self.sweep)) in tried]
            groups = {group(cell, self.sweep.tune): cell.identity for cell in with_trial}
            wanted = [cell for cell in self.every if cell.identity in groups.values()]
        return list({_key(cell): cell for cell in (*trials, *wanted)}.values())

    def weight(self, cell: SweepRun) -> float:
        """Return the weight of a run in the overall progress."""
        return cell.experiment.schedule.rounds if self.seconds is None else self.seconds


def _key(cell: SweepRun) -> tuple[str, int]:
    return cell.identity, cell.seed

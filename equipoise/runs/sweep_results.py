"""Where the results of planned runs are: in run folders, or in records of runs that were made elsewhere."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from equipoise.runs.recorded_runs import RecordedRuns
from equipoise.runs.sweep import SweepRun
from equipoise.storage.result_records import Record
from equipoise.storage.run_folder import RunFolder
from equipoise.storage.run_index import FinishedRun, find_runs


class SweepResults:
    """The results of a sweep's runs. What a run folder has takes precedence over records."""

    def __init__(self, out: Path, records: RecordedRuns | None = None) -> None:
        """Look for results.

        Args:
            out: the folder of all run folders.
            records: records of earlier runs, if any.
        """
        self.out, self.records = out, records or RecordedRuns()
        self._found: dict[tuple[str, int], tuple[Path, Record] | None] = {}

    def _record(self, cell: SweepRun) -> tuple[Path, Record] | None:
        key = cell.identity, cell.seed
        if key not in self._found:
            self._found[key] = self.records.find(cell.experiment)
        return self._found[key]

    def record(self, cell: SweepRun) -> Record | None:
        """Return the record of a run that has no finished or failed run folder; None if there is none."""
        found = None if cell.done(self.out) or cell.failed(self.out) else self._record(cell)
        return None if found is None else found[1]

    def to_run(self, wanted: Iterable[SweepRun]) -> list[SweepRun]:
        """Return the runs without those that are only recorded."""
        return [cell for cell in wanted if self.record(cell) is None]

    def done(self, cell: SweepRun) -> bool:
        """Tell whether a run is finished."""
        record = self.record(cell)
        return cell.done(self.out) or (record is not None and not record.failed)

    def failed(self, cell: SweepRun) -> bool:
        """Tell whether a run failed."""
        record = self.record(cell)
        return cell.failed(self.out) or (record is not None and bool(record.failed))

    def path(self, cell: SweepRun) -> Path:
        """Return the run folder; of a run that is only recorded, the file of the record and the run's name in it."""
        found = self._record(cell) if self.record(cell) is not None else None
        return cell.folder(self.out) if found is None else found[1].as_run(found[0]).path

    def summary(self, cell: SweepRun) -> dict[str, Any]:
        """Return the summary of a finished run."""
        record = self.record(cell)
        return RunFolder(cell.folder(self.out)).read_summary() if record is None else record.summary

    def runs(self, cells: Iterable[SweepRun]) -> list[FinishedRun]:
        """Return those of the runs that are finished."""
        found = []
        for cell in cells:
            if not self.done(cell):
                continue
            recorded = self._record(cell) if self.record(cell) is not None else None
            found += find_runs([cell.folder(self.out)]) if recorded is None else [recorded[1].as_run(recorded[0])]
        return found

    def versions(self, cells: Sequence[SweepRun]) -> list[str]:
        """Return the versions of this package that made the runs which are only recorded."""
        found = {record.versions.get("equipoise", "unknown") for cell in cells if (record := self.record(cell))}
        return sorted(found)

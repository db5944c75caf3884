"""Recording of a sweep while it runs, so that it can be continued elsewhere."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from equipoise.runs.recording import record_run
from equipoise.runs.sweep import SweepRun
from equipoise.runs.sweep_results import SweepResults
from equipoise.storage import atomic_files
from equipoise.storage.result_records import Record, add_records, check_records_file
from equipoise.storage.run_folder import RunFolder


class SweepRecorder:
    """Adds the finished and failed runs of a sweep to a file of records."""

    def __init__(self, file: Path, results: SweepResults, scale: str = "") -> None:
        """Check that the file can be written.

        Args:
            file: the file of records.
            results: where the results of the sweep's runs are.
            scale: the scale of the sweep, to note in the records.
        """
        check_records_file(file)
        atomic_files.make_folder(file.parent)
        self.file, self.results, self.scale = file, results, scale

    def add(self, cells: Iterable[SweepRun], trial: bool) -> None:
        """Add those of the runs that are finished or failed.

        Args:
            cells: the runs.
            trial: whether they only served to choose values for others.
        """
        if found := [record for cell in cells if (record := self._record(cell, trial)) is not None]:
            add_records(self.file, found)

    def _record(self, cell: SweepRun, trial: bool) -> Record | None:
        recorded = self.results.record(cell)
        if recorded is not None:
            return replace(recorded, trial=trial)
        out = self.results.out
        # Nothing is known of a run that failed because the training that it shares failed elsewhere.
        described = RunFolder(cell.folder(out)).config.exists()
        over = described and (cell.done(out) or cell.failed(out))
        return record_run(cell.folder(out), self.scale, trial) if over else None

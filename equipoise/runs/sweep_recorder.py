"""Recording of a sweep while it runs, so that it can be continued elsewhere."""

from collections.abc import Iterable
from pathlib import Path

from equipoise.runs.recorded_runs import RecordedRuns
from equipoise.runs.recording import record_run
from equipoise.runs.sweep import SweepRun
from equipoise.runs.sweep_results import SweepResults
from equipoise.storage.result_records import Record, add_records, mark_trials, prepare_records_file
from equipoise.storage.run_folder import RunFolder


class SweepRecorder:
    """Adds the finished and failed runs of a sweep to a file of records.

    Only what run folders have is written. Lines of runs that were made elsewhere may be newer than what this process
    has read, so nothing of them changes except whether they are trials.
    """

    def __init__(self, file: Path, results: SweepResults, scale: str = "") -> None:
        """Check that the file can be written.

        Args:
            file: the file of records.
            results: where the results of the sweep's runs are.
            scale: the scale of the sweep, to note in the records.
        """
        prepare_records_file(file)
        self.file, self.results, self.scale = file, results, scale

    def add(self, cells: Iterable[SweepRun], trial: bool) -> None:
        """Add those of the runs whose folders are here and which are finished or failed.

        Args:
            cells: the runs.
            trial: whether they only served to choose values for others.
        """
        if found := [record for cell in cells if (record := self._record(cell, trial)) is not None]:
            add_records(self.file, found)

    def mark(self, every: Iterable[SweepRun], chosen: Iterable[SweepRun]) -> None:
        """Write which of the recorded runs of a sweep are trials, once values are chosen.

        Args:
            every: all runs of the sweep, or of a part of it, and its trials.
            chosen: those with the chosen values.
        """
        wanted = {(cell.identity, cell.seed) for cell in chosen}
        cells = {(cell.identity, cell.seed): cell for cell in every}

        def decide(records: list[Record]) -> dict[int, bool]:
            numbers = {id(record): i for i, record in enumerate(records)}
            book = RecordedRuns({self.file: records})
            return {
                numbers[id(record)]: key not in wanted
                for key, cell in cells.items()
                for _, record in book.find_all(cell.experiment)
            }

        mark_trials(self.file, decide)

    def _record(self, cell: SweepRun, trial: bool) -> Record | None:
        out = self.results.out
        # Nothing is known of a run that failed because the training that it shares failed elsewhere.
        described = RunFolder(cell.folder(out)).config.exists()
        over = described and (cell.done(out) or cell.failed(out))
        return record_run(cell.folder(out), self.scale, trial) if over else None

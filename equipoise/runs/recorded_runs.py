"""Recognition of planned runs among records, also of those that an earlier version of the package made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.config.defaults import default_settings
from equipoise.config.experiment import Experiment
from equipoise.runs.recording import kept_settings
from equipoise.storage.result_records import Record, read_records
from equipoise.storage.run_folder import flatten
from equipoise.storage.run_index import FinishedRun


def matches(recorded: Mapping[str, Any], planned: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Tell whether a recorded run is the planned one.

    All recorded settings must be those of the planned run. A setting that the record lacks did not exist when the run
    was made, so the planned run must have its default. A default that has changed since then makes another run, as
    records have the values of all settings that existed. A setting that the planned run leaves out has its default.

    Args:
        recorded: the settings of the record.
        planned: the settings of the planned run that affect its results.
        defaults: the defaults of the settings of the planned run.
    """
    left_out = {key: defaults[key] for key in recorded.keys() - planned.keys() if defaults.get(key) is not None}
    known = {**planned, **left_out}
    # 1 == 1.0, but 1 client per round is not a share of 1.0
    if any(key not in known or _text(known[key]) != _text(value) for key, value in recorded.items()):
        return False
    return all(key in defaults and defaults[key] == planned[key] for key in planned.keys() - recorded.keys())


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


class RecordedRuns:
    """The records of some files, in which planned runs are looked up."""

    def __init__(self, records: Mapping[Path, Sequence[Record]] | None = None) -> None:
        self._by_key: dict[tuple[int, Any], list[tuple[Path, Record]]] = {}
        for file, some in (records or {}).items():
            for record in some:
                key = record.seed, record.settings.get("algorithm.name")
                self._by_key.setdefault(key, []).append((file, record))

    @staticmethod
    def read(files: Sequence[Path]) -> "RecordedRuns":
        """Read the records in these files; a file that does not exist has none."""
        return RecordedRuns({file: read_records(file) for file in files if file.exists()})

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def find(self, experiment: Experiment) -> tuple[Path, Record] | None:
        """Return the record of a planned run and its file; None if there is none.

        Of several records the one with the most settings is returned, which is the one of the latest version.
        """
        found = self.find_all(experiment)
        return max(found, key=lambda each: (len(each[1].settings), not each[1].failed), default=None)

    def find_all(self, experiment: Experiment) -> list[tuple[Path, Record]]:
        """Return all records of a planned run, which several versions may have made, and their files."""
        some = self._by_key.get((experiment.schedule.seed, experiment.algorithm_name))
        if not some:
            return []
        planned, defaults = kept_settings(flatten(experiment.tables())), default_settings(experiment)
        return [each for each in some if matches(each[1].settings, planned, defaults)]

    def run(self, experiment: Experiment) -> FinishedRun | None:
        """Return a planned run as it was recorded; None if it was not, or failed."""
        found = self.find(experiment)
        return None if found is None or found[1].failed else found[1].as_run(found[0])

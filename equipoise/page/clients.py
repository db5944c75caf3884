"""The scores of single clients, from clients.csv."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from equipoise.report import Run


@dataclass(frozen=True)
class Table:
    names: list[str]
    columns: dict[str, np.ndarray]

    def scores(self, kind: str) -> np.ndarray:
        """On test samples; NaN where a client has none, or does not count."""
        found = self.columns.get(f"{kind}_test_metric")
        return np.full(len(self.names), np.nan) if found is None else found


class Clients:
    """Read once, however many charts ask."""

    @cached_property
    def _tables(self) -> dict[Path, Table | None]:
        return {}

    def of(self, run: Run) -> Table | None:
        if run.path not in self._tables:
            self._tables[run.path] = _read(run.path / "clients.csv")
        return self._tables[run.path]


def _read(path: Path) -> Table | None:
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Who took no part is scored otherwise, and who is malicious does not count.
    rows = [row for row in rows if "true" not in (row.get("unseen"), row.get("malicious"))]
    if not rows:
        return None
    names = [name for name in rows[0] if name.endswith("_metric")]
    columns = {name: np.array([float(row[name]) if row[name] else np.nan for row in rows]) for name in names}
    return Table([row["client"] for row in rows], columns)

"""The user's own data: a folder with one file per client."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from equipoise.data.client_files import TableFormat, check_finite, clients_in, first_table, is_client, read_client
from equipoise.data.federation import SPLITS
from equipoise.data.own_clients import pool_of_clients
from equipoise.data.own_paths import own_path
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.data.table_targets import TargetRule
from equipoise.errors import EquipoiseError

Name = Annotated[str, Field(min_length=1)]


class Folder(Source):
    """Your own data: a folder with one CSV, NPZ, safetensors or Parquet file per client."""

    own: ClassVar[bool] = True

    path: str = ""
    "folder with one file or folder per client, named after it; by default the data folder (--data)"
    target: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    "column of CSV and Parquet files that is to be predicted, or several columns of numbers"
    features: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    "columns of CSV and Parquet files that are the inputs; by default all except the target"
    labels: bool | None = None
    "whether the target of CSV and Parquet files is a label; by default it is if it is text or whole numbers"
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    "labels that are text, in the order of their classes; by default all labels of all clients, sorted"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    "character between two values of a CSV file"

    def title(self, name: str) -> str:
        """Return the name of the folder."""
        return Path(self.path).name or name

    @property
    def table_format(self) -> TableFormat:
        """Return which columns of tables are read."""
        target = (self.target,) if isinstance(self.target, str) else self.target or ()
        if both := set(target) & set(self.features or ()):
            raise EquipoiseError(f"data.features has {min(both)!r}, which is the target; leave it out")
        return TableFormat(target, self.features or (), self.delimiter)

    @property
    def target_rule(self) -> TargetRule:
        """Return what the targets of tables are."""
        return TargetRule(", ".join(map(repr, self.table_format.target)), self.labels, self.classes or ())

    def load(self, ask: LoadRequest) -> Pool:
        """Read all clients' files."""
        return self._load(ask)[0]

    def resolved(self, ask: LoadRequest) -> "Folder":
        """Return the settings with columns and classes written out, for clients that see only their own file.

        Args:
            ask: the request, with the folder of the data.
        """
        return self.model_copy(update=self._load(ask)[1])

    def _load(self, ask: LoadRequest) -> tuple[Pool, dict[str, Any]]:
        """Return the samples, and the settings that were found in the files."""
        clients, ignored = self._clients(ask)
        table = self.table_format
        tables = (first_table(file) for files in clients.values() for file in files.values())
        if (first := next(filter(None, tables), None)) is not None:
            table = table.of(first)
        read: list[tuple[str, str, Any, Any, Path]] = []
        for done, (name, files) in enumerate(clients.items()):
            for part, file in files.items():
                read += [(name, key, x, y, file) for key, (x, y) in _parts(part, file, table).items()]
            ask.progress(done + 1, len(clients))
        targets, classes = self.target_rule.read([(y, file) for *_, y, file in read])
        entries: dict[str, dict[str, Any]] = {name: {} for name in clients}
        for (name, part, x, _, _), y in zip(read, targets, strict=True):
            entries[name][part] = (x, y)
        pool = pool_of_clients(list(entries), [parts.get("", parts) for parts in entries.values()], ask)
        notes = (f"files that are no data are not used: {', '.join(ignored)}",) if ignored else ()
        pool = replace(pool, notes=notes, classes=len(classes) if classes else pool.classes)
        return pool, {"features": table.features or None, "classes": classes or None}

    def _clients(self, ask: LoadRequest) -> tuple[dict[str, dict[str, Path]], list[str]]:
        """Return the files of each client by part ("" if they are undivided), and the names of other files."""
        folder = own_path(self.path, ask, files=False)
        parts = [part for part in SPLITS if (folder / part).is_dir()]
        clients: dict[str, dict[str, Path]] = {}
        ignored = []
        for part in parts or [""]:
            for name, file in clients_in(folder / part).items():
                clients.setdefault(name, {})[part] = file
            others = [path.name for path in (folder / part).iterdir() if not is_client(path)]
            ignored += sorted(name for name in others if not name.startswith((".", "__")))
        for files in clients.values():
            if parts and "train" not in files:
                raise EquipoiseError(f"{next(iter(files.values()))} has no counterpart in {folder / 'train'}")
        return clients, ignored


def _parts(part: str, file: Path, table: TableFormat) -> dict[str, tuple[Any, Any]]:
    """Return the parts of a client's file or folder, which lies in the folder of a part or (if "") does not."""
    samples = read_client(file, table)
    if part and isinstance(samples, dict):
        raise EquipoiseError(f"{file} is divided into {', '.join(samples)}, but lies in the folder {part}")
    found = samples if isinstance(samples, dict) else {part: samples}
    for pair in found.values():
        check_finite(pair, file)
    return found

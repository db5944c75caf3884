"""One client's samples in files: arrays (npz, safetensors) or tables (CSV, Parquet), in one part or in three."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from equipoise.data.archives import ends_with_zip
from equipoise.data.federation import SPLITS
from equipoise.data.table_files import TABLES, column_names, read_columns
from equipoise.data.text_encoding import check_name
from equipoise.errors import EquipoiseError, first_line

_ARRAYS = (".safetensors", ".npz")
SUFFIXES = (*_ARRAYS, *TABLES)
"""The endings of files with samples."""
_SERIES = "series."  # begins the names of the arrays of time series
_NAMES = "x and y, or train.x and train.y, and optionally validation.x, validation.y, test.x and test.y"
_FILES = ".safetensors, .npz, .csv or .parquet file"


@dataclass(frozen=True)
class TableFormat:
    """How the columns of a table become samples."""

    target: tuple[str, ...] = ()
    "columns of the target; one may be text"
    features: tuple[str, ...] = ()
    "columns of the inputs; empty: all others"
    delimiter: str = ","
    "character between two values of a CSV file"
    like: Path | None = None
    "file whose columns the features are, for error messages"

    def of(self, path: Path) -> "TableFormat":
        """Return the format with the features of this file, or raise an error if its columns are not the same."""
        names = column_names(path, self.delimiter)
        if not self.target:
            raise EquipoiseError(
                f"data.target is missing: name the column of {path} that is to be predicted; it has {', '.join(names)}"
            )
        for name in self.target:
            if name not in names:
                mark = next((c for c in ";\t|" if len(names) == 1 and c in names[0]), "")
                hint = f"; if values are separated by {mark!r}, set data.delimiter = {mark!r}" if mark else ""
                raise EquipoiseError(f"{path} has no column {name!r} (data.target); it has {', '.join(names)}{hint}")
        others = [name for name in names if name not in self.target]
        if not self.features:
            if "" in others:
                raise EquipoiseError(
                    f"{path}: column {names.index('') + 1} has no name; name it, remove it (pandas: to_csv(..., "
                    "index=False)), or name the inputs with data.features"
                )
            if not others:
                raise EquipoiseError(f"{path} has no columns besides the target {', '.join(self.target)}")
            return TableFormat(self.target, tuple(others), self.delimiter, path)
        for name in self.features:
            if name not in names:
                known = f", which {self.like} has" if self.like else ", which data.features names"
                raise EquipoiseError(f"{path} has no column {name!r}{known}")
        if self.like is not None and (more := [name for name in others if name not in self.features]):
            raise EquipoiseError(
                f"{path} has the column {more[0]!r}, which {self.like} has not; name the inputs with data.features"
            )
        return self


def is_client(path: Path) -> bool:
    """Tell whether this may be a client's file or folder, by its name."""
    return not path.name.startswith((".", "__")) and (path.is_dir() or path.suffix in SUFFIXES)


def first_table(path: Path) -> Path | None:
    """Return a client's file if it is a table, or the first table in its folder; None if there is none."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return next((file for file in files if file.suffix in TABLES), None)


def clients_in(folder: Path) -> dict[str, Path]:
    """Return the files and folders of clients in a folder by the clients' names, which are those of the files.

    Args:
        folder: the folder; files of other kinds in it are ignored.
    """
    if not folder.is_dir():
        raise EquipoiseError(f"{folder} is not a folder with one file or folder per client")
    found: dict[str, Path] = {}
    for path in sorted(filter(is_client, folder.iterdir())):
        name = path.name if path.is_dir() else path.stem
        check_name(path, name)
        if name in found:
            raise EquipoiseError(f"{found[name]} and {path.name} have one name; rename or remove one of them")
        found[name] = path
    if not found:
        raise EquipoiseError(
            f"{folder} has no data: put one file per client there, named after the client, such as ward-3.csv; files "
            f"may be {', '.join(SUFFIXES)}"
        )
    return found


def read_client(path: Path, table: TableFormat) -> Any:
    """Return the samples of a client's file or folder in the form that `from_clients` takes.

    Targets of tables are numbers, or text.

    Args:
        path: a file with x and y, a table, or a folder with such files named train, validation and test.
        table: the format of tables.
    """
    return read_client_and_series(path, table)[0]


def read_client_and_series(path: Path, table: TableFormat) -> tuple[Any, dict[str, Tensor]]:
    """Return the samples as `read_client` does, and the arrays of the series that they are windows of, if any.

    Args:
        path: the client's file or folder.
        table: the format of tables.
    """
    arrays = read_arrays(path, table)
    series = {name.removeprefix(_SERIES): arrays.pop(name) for name in list(arrays) if name.startswith(_SERIES)}
    pairs: dict[str, tuple[Any, Any]] = {}
    for prefix in ("", *SPLITS):
        x, y = (f"{prefix}.{k}" if prefix else k for k in ("x", "y"))
        if (x in arrays) != (y in arrays):
            raise EquipoiseError(f"{path} has only one of {x} and {y}; both are needed")
        if x in arrays:
            pairs[prefix] = arrays.pop(x), arrays.pop(y)
    if arrays:
        raise EquipoiseError(f"{path} has {', '.join(sorted(arrays))}; the arrays must be {_NAMES}")
    if "" in pairs and len(pairs) > 1:
        raise EquipoiseError(f"{path} has both undivided samples and divided ones; the arrays must be {_NAMES}")
    if "" not in pairs and "train" not in pairs:
        raise EquipoiseError(f"{path} has no training samples; the arrays must be {_NAMES}")
    return pairs.get("", pairs), series


def read_clients(path: Path, table: TableFormat) -> dict[str, Any]:
    """Return the samples of several clients by name, in the form that `from_clients` takes.

    Args:
        path: the file of one client, or a folder with one file (or one folder of train, validation and test files) per
            client. A client is named after its file or folder.
        table: the format of tables.
    """
    if not path.exists():
        raise EquipoiseError(f"there is no file or folder {path}")
    if not path.is_dir():
        return {path.stem: read_client(path, table)}
    found = clients_in(path)
    if all(name in SPLITS for name in found):
        return {path.resolve().name: read_client(path, table)}
    return {name: read_client(each, table) for name, each in found.items()}


def read_arrays(path: Path, table: TableFormat | None = None) -> dict[str, Any]:
    """Return the arrays of a file, or of all files of a folder; x in train.npz is returned as train.x.

    Args:
        path: the file or folder.
        table: the format of tables, which are returned as x and y.
    """
    table = table or TableFormat()
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        if not found:
            raise EquipoiseError(f"{path} has no data: put a {_FILES} there, with {_NAMES}")
        if (first := first_table(path)) is not None:  # all of them have the same columns
            table = table.of(first)
        arrays: dict[str, Any] = {}
        for file in found:
            prefix = f"{file.stem}." if file.stem in SPLITS else ""
            for name, array in _read_file(file, table).items():
                if prefix + name in arrays:
                    raise EquipoiseError(f"{path} has {prefix + name} twice; keep one of its files")
                arrays[prefix + name] = array
        return arrays
    if path.suffix not in SUFFIXES:
        raise EquipoiseError(f"{path} is not a folder, nor a {_FILES}")
    return _read_file(path, table)


def _read_file(path: Path, table: TableFormat) -> dict[str, Any]:
    if path.suffix in TABLES:
        return _read_table(path, table)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _read_npz(path)
    except FileNotFoundError:
        raise EquipoiseError(f"there is no file {path}") from None
    except Exception as error:  # damaged files make numpy, zipfile and safetensors raise errors of a dozen kinds
        raise EquipoiseError(f"{path} cannot be read as arrays: {first_line(error)}") from None


def _read_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file, all of which are read to their ends, where their checksums are compared."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no .npz file, or a pickled one")
    found = {}
    with zipfile.ZipFile(path) as archive:
        if not ends_with_zip(path, archive):
            raise ValueError("something follows the archive")
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"it has {name[:40]!r} twice")
            with archive.open(info) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)  # never pickle: it could run code
                if member.read(1):
                    raise ValueError(f"{name[:40]!r} is longer than its header says")
            found[name] = torch.from_numpy(np.ascontiguousarray(array))
    return found


def _read_table(path: Path, table: TableFormat) -> dict[str, Any]:
    table = table.of(path)
    text = table.target if len(table.target) == 1 else ()
    columns = read_columns(path, [*table.features, *table.target], text, table.delimiter)
    if not len(columns[table.target[0]]):
        raise EquipoiseError(f"{path} has no samples, only the names of its columns")
    y = columns[table.target[0]] if text else np.stack([columns[name] for name in table.target], axis=1)
    return {"x": torch.from_numpy(np.stack([columns[name] for name in table.features], axis=1)), "y": y}


def check_finite(pair: tuple[Any, Any], path: Path) -> None:
    """Raise an error that names the file and the column if there is NaN or infinity among the samples."""
    for name, values in zip(("x", "y"), pair, strict=True):
        if not isinstance(values, Tensor) or not values.is_floating_point() or torch.isfinite(values).all():
            continue
        first = torch.nonzero(~torch.isfinite(values))[0].tolist()
        column = f", column {first[1] + 1}" if values.ndim == 2 else ""
        raise EquipoiseError(
            f"{path}: there is NaN or infinity in {name}{column}, first in sample {first[0] + 1}; fill it in, or "
            "remove the sample"
        )

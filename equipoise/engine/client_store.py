"""Storage of the clients' states: in memory as long as they fit, otherwise in files.

Files are segments: each holds the states of some clients as rows, and never changes after it is written. A table
records which row of which segment is a client's newest state. A checkpoint writes only what changed since the last one.
When most rows of a segment are outdated, the others are copied to the next segment and the old one is removed.
"""

import json
import math
import os
import struct
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from equipoise.distributed.ranks import Ranks
from equipoise.state import State
from equipoise.storage import tensor_files

_SEGMENT_BYTES = 128 << 20
_NOT_SAVED = -1
_OPEN_FILES = 64
_MOST_CLIENTS = 10_000_000  # that a checkpoint may name beyond those of the run, so that a damaged one needs no memory


def _between(values: np.ndarray, low: int, high: int) -> bool:
    """Tell whether all values are at least `low` and less than `high`."""
    return not len(values) or bool(low <= values.min() and values.max() < high)


class _Pending:
    """States in memory, the oldest first, and their size in bytes."""

    def __init__(self) -> None:
        self.states: OrderedDict[int, State] = OrderedDict()
        self.bytes = 0

    def add(self, who: int, state: State) -> None:
        self.remove(who)
        self.states[who] = state
        self.bytes += state.nbytes

    def get(self, who: int) -> State | None:
        return self.states.get(who)

    def remove(self, who: int) -> None:
        if (state := self.states.pop(who, None)) is not None:
            self.bytes -= state.nbytes

    def remove_oldest(self) -> None:
        self.remove(next(iter(self.states)))


class _Segment:
    """A safetensors file from which single rows are read, because mapping the whole file would count as memory."""

    def __init__(self, path: Path):
        self.file = path.open("rb", buffering=0)
        (length,) = struct.unpack("<Q", self.file.read(8))
        header = json.loads(self.file.read(length))
        self.fields = {
            name: (tensor_files.DTYPES[entry["dtype"]], entry["shape"], 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def read(self, row: int) -> State:
        sizes = {name: math.prod(shape[1:]) for name, (_, shape, _) in self.fields.items()}
        return State(
            {name: self.part(row, name, 0, sizes[name]).view(shape[1:]) for name, (_, shape, _) in self.fields.items()}
        )

    def part(self, row: int, name: str, low: int, high: int) -> torch.Tensor:
        """Return the numbers low to high of a row."""
        dtype, (_, *shape), first = self.fields[name]
        if high <= low:
            return torch.empty(0, dtype=dtype)
        begin = first + (row * math.prod(shape) + low) * dtype.itemsize
        content = bytearray(os.pread(self.file.fileno(), (high - low) * dtype.itemsize, begin))
        return torch.frombuffer(content, dtype=dtype)


class RenumberedStore:
    """A view of a store in which clients have other numbers."""

    def __init__(self, store: "ClientStore", order: Sequence[int]):
        self.store, self.order = store, order

    def get(self, who: int) -> State:
        """Return a client's state."""
        return self.store.get(self.order[who])

    def part(self, who: int, name: str, low: int, high: int) -> torch.Tensor:
        """Return the numbers low to high of one vector of a client's state."""
        return self.store.part(self.order[who], name, low, high)


class ClientStore:
    """The states of all clients of a run."""

    def __init__(
        self,
        clients: int,
        initial: State,
        folder: Path | None = None,
        memory: int = 1 << 30,
        prefix: str = "clients",
        part: tuple[int, int] = (0, 1),
    ):
        """Create a store.

        Args:
            clients: number of clients; more can be added.
            initial: the state of clients that have none yet.
            folder: the folder for segments; without it all states stay in memory.
            memory: memory limit in bytes, if there is a folder.
            prefix: what the names of the segments begin with.
            part: number of this process and number of processes, which take turns in numbering segments.
        """
        self.initial, self.folder, self.memory, self.prefix = initial, folder, memory, prefix
        self.segment = np.full(clients, _NOT_SAVED, dtype=np.int64)  # where each client's newest saved state is
        self.row = np.zeros(clients, dtype=np.int64)
        self.changed = _Pending()  # not in a segment yet
        self.kept = _Pending()  # in a segment, and still in memory
        self.turn, self.processes = part
        self.written = 0
        "number of segments so far, of all processes"
        self.own: np.ndarray | None = None
        "mask of the clients that belong to this process; None: all of them"
        self.moved: set[int] = set()
        "clients whose states were written since the last checkpoint"
        self.fresh: list[int] = []
        "segments that this process has written since then"
        self.rows: dict[int, int] = {}  # rows in each segment
        self.open: dict[int, _Segment] = {}  # recently read

    def get(self, who: int) -> State:
        """Return a client's state; the initial one if none was stored."""
        state = self.changed.get(who) or self.kept.get(who)
        if state is not None:
            return state
        if who >= len(self.segment) or self.segment[who] == _NOT_SAVED:
            return self.initial
        state = self._opened(who).read(int(self.row[who]))
        self._keep(who, state)
        return state

    def part(self, who: int, name: str, low: int, high: int) -> torch.Tensor:
        """Return the numbers low to high of one vector of a client's state, without reading more than that."""
        state = self.changed.get(who) or self.kept.get(who)
        if state is None and (who >= len(self.segment) or self.segment[who] == _NOT_SAVED):
            state = self.initial
        return (
            self._opened(who).part(int(self.row[who]), name, low, high)
            if state is None
            else state[name].flatten()[low:high]
        )

    def put(self, who: int, state: State) -> None:
        """Store a client's new state."""
        if not state:
            return
        if who >= len(self.segment):
            more = who + 1 - len(self.segment)
            self.segment = np.pad(self.segment, (0, more), constant_values=_NOT_SAVED)
            self.row = np.pad(self.row, (0, more))
        # A row of a stack is copied; otherwise it would keep the whole stack in memory.
        state = State({k: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for k, t in state.items()})
        self.kept.remove(who)
        self.changed.add(who, state)
        if self.folder is not None and self.changed.bytes > self.memory // 2:
            self.flush()

    def flush(self) -> None:
        """Write the changed states, and the current rows of segments that are mostly outdated."""
        if self.folder is None:
            return
        for number in self._mostly_outdated():
            for who in np.flatnonzero(self.segment == number).tolist():
                if self.changed.get(who) is None and (self.own is None or self.own[who]):
                    self.changed.add(who, self.get(who))
        waiting = sorted(self.changed.states)
        limit = max(1, _SEGMENT_BYTES // max(1, self.initial.nbytes))
        for first in range(0, len(waiting), limit):
            self._write(waiting[first : first + limit])

    def _write(self, clients: list[int]) -> None:
        states = [self.changed.states[who] for who in clients]
        tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        # Process k of n writes the segments k, n + k, 2 n + k and so on, counted from the last checkpoint.
        number = self.written + self.turn
        tensor_files.write_tensors(self._path(number), tensors)
        for row, (who, state) in enumerate(zip(clients, states, strict=True)):
            self.segment[who], self.row[who] = number, row
            self.changed.remove(who)
            self._keep(who, state)
        self.open.pop(number, None)
        self.moved.update(clients)
        self.fresh.append(number)
        self.rows[number] = len(clients)
        self.written += self.processes

    def _current_rows(self) -> dict[int, int]:
        """Return how many clients' newest states are in each segment that has any, by its number."""
        numbers, counts = np.unique(self.segment[self.segment >= 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def _mostly_outdated(self) -> list[int]:
        current = self._current_rows()
        return [number for number, rows in self.rows.items() if 0 < 2 * current.get(number, 0) < rows]

    def _keep(self, who: int, state: State) -> None:
        self.kept.add(who, state)
        while self.kept.bytes > self.memory // 2:
            self.kept.remove_oldest()

    def fresh_segments(self) -> list[Path]:
        """Return the files that this process has written since the last checkpoint."""
        return [self._path(number) for number in self.fresh]

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / self.segment_name(number)

    def segment_name(self, number: int) -> str:
        """Return the file name of a segment."""
        return f"{self.prefix}-{number:06d}.safetensors"

    def _opened(self, who: int) -> _Segment:
        """Return the open segment with a client's newest saved state."""
        number = int(self.segment[who])
        if number not in self.open:
            if len(self.open) >= _OPEN_FILES:
                self.open.clear()
            self.open[number] = _Segment(self._path(number))
        return self.open[number]

    def segments(self) -> list[Path]:
        """Return the files that hold at least one client's newest state."""
        return [self._path(number) for number in self._current_rows()]

    def table(self) -> dict[str, torch.Tensor]:
        """Return the clients that have a state and where the newest is, for a checkpoint."""
        who = np.flatnonzero(self.segment >= 0)
        columns = {"who": who, "segment": self.segment[who], "row": self.row[who]}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def merge(self, ranks: Ranks) -> None:
        """Make the tables those of all processes, after each has written its changed states.

        The states of other processes' clients are then read from the segments of those processes.
        """
        if ranks.size > 1:
            who = np.array(sorted(self.moved), dtype=np.int64)
            places = {"who": who, "segment": self.segment[who], "row": self.row[who]}
            found = ranks.gather({name: torch.from_numpy(column) for name, column in places.items()})
            self.written = max(ranks.gather_json(self.written))
            counts = ranks.gather_json({str(number): rows for number, rows in self.rows.items()})
            self.rows = {int(number): rows for part in counts for number, rows in part.items()}
            for rank, part in enumerate(found):
                if rank != ranks.rank:
                    others = part["who"].numpy()
                    self.segment[others], self.row[others] = part["segment"].numpy(), part["row"].numpy()
                    for each in others.tolist():
                        self.kept.remove(each)
        self.moved.clear()
        self.fresh.clear()

    def forget_segments(self, keep: Collection[str]) -> None:
        """Forget the segments whose files were removed, which are all but these."""
        for number in list(self.rows):
            if self.segment_name(number) not in keep:
                del self.rows[number]
                self.open.pop(number, None)

    def check(self, table: dict[str, torch.Tensor], written: int, rows: dict[int, int], files: Collection[str]) -> None:
        """Raise ValueError unless `restore` can use what a checkpoint saved, whoever wrote it.

        Args:
            table: what `table` returned.
            written: number of segments written so far.
            rows: number of rows of each segment.
            files: the files of the checkpoint.
        """
        wrong = ValueError(f"its table of {self.prefix} is damaged")
        if not {"segment", "row"} <= table.keys() <= {"who", "segment", "row"}:
            raise wrong
        if any(t.dtype != torch.int64 or t.dim() != 1 or len(t) != len(table["row"]) for t in table.values()):
            raise wrong
        segment, row = table["segment"].numpy(), table["row"].numpy()
        who = table["who"].numpy() if "who" in table else np.arange(len(segment))
        if len(np.unique(who)) != len(who) or not _between(who, 0, max(len(self.segment), _MOST_CLIENTS)):
            raise wrong
        if not _between(segment, _NOT_SAVED, written):
            raise wrong
        saved = segment != _NOT_SAVED
        numbers, places = np.unique(segment[saved], return_inverse=True)
        counts = np.array([rows.get(number, 0) for number in numbers.tolist()], dtype=np.int64)
        if not _between(row[saved], 0, 1 << 62) or bool((row[saved] >= counts[places]).any()):
            raise wrong
        for number in numbers.tolist():
            if self.segment_name(number) not in files or not self._has_rows(number, rows[number]):
                raise ValueError(f"{self.segment_name(number)} does not have the states that it should have")

    def _has_rows(self, number: int, rows: int) -> bool:
        """Tell whether a segment can be read and has so many rows."""
        try:
            with safe_open(self._path(number), framework="pt") as file:
                columns = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name, column in columns.items():
                dtype, shape = tensor_files.DTYPES.get(column.get_dtype()), column.get_shape()
                like = self.initial.get(name)
                if shape[:1] != [rows] or (like is not None and (like.dtype, [*like.shape]) != (dtype, shape[1:])):
                    return False
            return self.initial.keys() <= columns.keys()
        except (SafetensorError, OSError):
            return False

    def restore(self, table: dict[str, torch.Tensor], written: int, rows: dict[int, int]) -> None:
        """Restore what a checkpoint saved.

        Args:
            table: what `table` returned.
            written: number of segments written so far.
            rows: number of rows of each segment.
        """
        segment, row = table["segment"].numpy(), table["row"].numpy()
        who = table["who"].numpy() if "who" in table else np.arange(len(segment))  # older tables have all clients
        clients = max(len(self.segment), int(who.max(initial=-1)) + 1)
        self.segment, self.row = np.full(clients, _NOT_SAVED, dtype=np.int64), np.zeros(clients, dtype=np.int64)
        self.segment[who], self.row[who] = segment, row
        self.written, self.rows = written, rows
        self.open.clear()

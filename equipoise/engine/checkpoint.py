"""Checkpoints, from which an interrupted run resumes with exactly the same results.

A checkpoint is a manifest (JSON) that lists its files with their digests. The last few are kept, in case the newest is
damaged or the run has gone wrong and must go back.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equipoise.distributed.ranks import Ranks
from equipoise.engine.checkpoint_manifest import (
    Manifest,
    find_manifests,
    moment,
    place_of,
    read_manifest,
    write_manifest,
)
from equipoise.engine.client_store import ClientStore
from equipoise.errors import EquipoiseError
from equipoise.state import State
from equipoise.storage import atomic_files, tensor_files

KEPT = 3
"""Number of checkpoints that are kept unless a setting says otherwise."""
_NEWEST = 2  # are kept even within a round, in case the newest is damaged
Groups = dict[str, dict[str, Tensor]]


@dataclass
class Checkpoint:
    """The content of a checkpoint."""

    round: int
    step: int
    "number of finished exchanges of the next round"
    server: State
    kept: dict[str, Tensor]
    "other tensors of the run: tables of scores, the initial model of a deployment"
    facts: dict[str, Any]
    "other values of the run as JSON: counters, lengths of the logs"
    all_facts: list[dict[str, Any]] = field(default_factory=list)
    "the same of every checkpoint whose manifest can be read, also of newer ones: some counts never go back"


class CheckpointFolder:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, ranks: Ranks | None = None, keep: int = KEPT):
        """Create the folder.

        Args:
            folder: the folder.
            ranks: the processes of the run; each writes its clients' states, and the first all the rest.
            keep: number of checkpoints of complete rounds that are kept.
        """
        self.folder, self.ranks, self.keep = folder, ranks or Ranks(), keep
        atomic_files.make_folder(folder)
        self.digests: dict[str, str] = {}  # segments never change: each is read for its digest once

    def save(
        self,
        round: int,
        step: int,
        server: State,
        stores: Mapping[str, ClientStore],
        kept: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> None:
        """Write a checkpoint; files that a kept manifest lists are never overwritten.

        Args:
            round: number of finished rounds.
            step: number of finished exchanges of the next round.
            server: the server's state.
            stores: the clients' states as "store", and others by name.
            kept: other tensors of the run.
            facts: other values of the run, as JSON.
        """
        for store in stores.values():
            store.flush()
            for path in store.fresh_segments():
                self.digests.pop(path.name, None)
            own = {path.name: self._digest(path) for path in store.fresh_segments()}
            for digests in self.ranks.gather_json(own):
                self.digests |= digests
            store.merge(self.ranks)
        keep = self._write(round, step, server, stores, kept, facts) if self.ranks.leader else None
        keep = self.ranks.gather_json(keep)[0]
        for store in stores.values():
            store.forget_segments(keep)

    def _write(
        self,
        round: int,
        step: int,
        server: State,
        stores: Mapping[str, ClientStore],
        kept: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> list[str]:
        """Write the server's state and the manifest; return the names of all files that are kept."""
        when = moment(round, step)
        newest = self.folder / f"round-{when}.json"
        listed = self._listed(newest)
        name = next(name for letter in ("", "b") if (name := f"server-{when}{letter}.safetensors") not in listed)
        tensors = {f"server.{k}": t for k, t in server.items()}
        tensors |= {f"kept.{k}": t for k, t in kept.items()}
        tensors |= {f"{group}.{k}": t for group, store in stores.items() for k, t in store.table().items()}
        tensor_files.write_tensors(self.folder / name, {k: t.cpu().clone() for k, t in tensors.items()})
        self.digests.pop(name, None)
        content = {
            "round": round,
            "step": step,
            "server": name,
            "files": {
                path.name: self._digest(path)
                for path in [self.folder / name, *(path for store in stores.values() for path in store.segments())]
            },
            **{
                group: {"written": store.written, "rows": {str(k): v for k, v in store.rows.items()}}
                for group, store in stores.items()
            },
            "facts": facts,
        }
        write_manifest(newest, content)
        return self._remove_old(stores.values(), newest)

    def _listed(self, path: Path) -> Collection[str]:
        """Return the files of a checkpoint that may be there already, and is about to be replaced."""
        try:
            return read_manifest(path).files if path.is_file() else ()
        except ValueError:
            return ()

    def _digest(self, path: Path) -> str:
        if path.name not in self.digests:
            self.digests[path.name] = atomic_files.digest(path)
        return self.digests[path.name]

    def manifests(self) -> list[Path]:
        """Return the manifests, the newest first."""
        return find_manifests(self.folder)

    def _remove_old(self, stores: Iterable[ClientStore], newest: Path) -> list[str]:
        """Remove the files that none of the kept checkpoints needs; return the names of the others.

        Manifests of later rounds are removed too: the run resumed from before them, because they were damaged or it
        was told to go back.
        """
        keep: set[str] = set()
        seen = complete = 0
        for path in [p for p in self.manifests() if place_of(p) <= place_of(newest)]:
            try:
                manifest = read_manifest(path)
            except ValueError:
                continue  # a damaged one does not count, and goes
            seen, complete = seen + 1, complete + (not manifest.step)
            if seen <= _NEWEST or (not manifest.step and complete <= self.keep):
                keep |= {path.name, *manifest.files}
        segments = [f"{store.prefix}-*.safetensors" for store in stores]
        for pattern in ("round-*.json", "server-*.safetensors", *segments, "*.part"):
            for path in self.folder.glob(pattern):
                if path.name not in keep and not path.is_dir():
                    path.unlink()
        return sorted(keep)

    def load(
        self, stores: Mapping[str, ClientStore], back: int = 0, check: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Restore stores from an intact checkpoint, and return the checkpoint and complaints about damaged ones.

        Damaged checkpoints do not count. Of those before the newest, only complete rounds count.

        Args:
            stores: the clients' states as "store", and others by name.
            back: 0 for the newest intact checkpoint, N for the Nth before it; an error if there are fewer.
            check: raises ValueError if a checkpoint with these facts cannot be used.
        """
        complaints: list[str] = []
        intact: list[int] = []
        for path in self.manifests():
            if intact and place_of(path)[1]:
                continue
            try:
                manifest, groups = self._read(path, stores, check)
            except ValueError as error:
                complaints.append(f"the checkpoint {path.name} cannot be used: {error}")
                continue
            intact.append(manifest.round)
            if len(intact) <= back:
                continue
            for group, (written, rows) in manifest.tables.items():
                stores[group].restore(groups[group], written, rows)
            self.digests = dict(manifest.files)
            self.ranks.check_equal("checkpoints", path.name)
            server, kept = State(groups["server"]), groups["kept"]
            saved = Checkpoint(manifest.round, manifest.step, server, kept, manifest.facts, self._all_facts())
            return saved, complaints
        self.ranks.check_equal("checkpoints", intact)
        if back:
            damaged = "; damaged ones do not count" if complaints else ""
            raise EquipoiseError(_too_few(self.folder, intact, back) + damaged)
        return None, complaints

    def _all_facts(self) -> list[dict[str, Any]]:
        found = []
        for path in self.manifests():
            try:
                found.append(read_manifest(path).facts)
            except ValueError:
                continue
        return found

    def _read(
        self, path: Path, stores: Mapping[str, ClientStore], check: Callable[[dict[str, Any]], None] | None
    ) -> tuple[Manifest, Groups]:
        """Read a checkpoint, with nothing restored yet; raise ValueError if anything is wrong with it."""
        manifest = read_manifest(path)
        for name, expected in manifest.files.items():
            try:
                found = atomic_files.digest(self.folder / name)
            except FileNotFoundError:
                raise ValueError(f"{name} is missing") from None
            except OSError as error:
                raise ValueError(f"{name} cannot be read ({error.strerror or error})") from None
            if found != expected:
                raise ValueError(f"{name} is damaged")
        groups: Groups = {"server": {}, "kept": {}, **{group: {} for group in manifest.tables}}
        try:
            for key, tensor in load_file(self.folder / manifest.server).items():
                group, _, name = key.partition(".")
                groups[group][name] = tensor
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError):
            raise ValueError(f"{manifest.server} is not the state of a server") from None
        for group, (written, rows) in manifest.tables.items():
            if group not in stores:
                raise ValueError(f"{ascii(group)[:80]} is nothing that a checkpoint has")
            stores[group].check(groups[group], written, rows, manifest.files)
        if check is not None:
            check(manifest.facts)
        return manifest, groups

    def places(self) -> list[tuple[int, int]]:
        """Return round and step of the checkpoints that `load` would count, the newest first."""
        return _places(self.folder)


def _places(folder: Path) -> list[tuple[int, int]]:
    found = [place_of(path) for path in find_manifests(folder)]
    return [place for k, place in enumerate(found) if not k or not place[1]]


def check_reach(folder: Path, back: int) -> None:
    """Raise an error if a folder has too few checkpoints to go back by so many, damaged ones included."""
    if back and back >= len(places := _places(folder)):
        raise EquipoiseError(_too_few(folder, [round for round, _ in places], back))


def _too_few(folder: Path, rounds: list[int], back: int) -> str:
    if not rounds:
        return f"there is no checkpoint in {folder} to go back to"
    listed = ", ".join(map(str, rounds))
    there = f"only that of round {listed}" if len(rounds) == 1 else f"those of rounds {listed}"
    return (
        f"there is no checkpoint {back} before the newest one; {folder} has {there}, so the most is --back "
        f"{len(rounds) - 1} (keep_checkpoints is the number that is kept)"
    )

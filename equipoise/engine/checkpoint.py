"""Checkpoints, from which an interrupted run resumes with exactly the same results.

A checkpoint is a manifest (JSON) that lists its files with their digests. The last two are kept, in case the newest is
damaged.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equipoise.distributed.ranks import Ranks
from equipoise.engine.client_store import ClientStore
from equipoise.state import State
from equipoise.storage import atomic_files, tensor_files

_KEEP = 2


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


def _digest_of(manifest: dict[str, Any]) -> str:
    return blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


class CheckpointFolder:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, ranks: Ranks | None = None):
        """Create the folder.

        Args:
            folder: the folder.
            ranks: the processes of the run; each writes its clients' states, and the first all the rest.
        """
        self.folder, self.ranks = folder, ranks or Ranks()
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
        """Write a checkpoint; files that a manifest lists are never overwritten.

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
        when = f"{round:06d}" + (f"s{step:03d}" if step else "")
        names = [f"server-{when}{letter}.safetensors" for letter in ("", "b")]
        name = next((name for name in names if not (self.folder / name).exists()), names[0])
        tensors = {f"server.{k}": t for k, t in server.items()}
        tensors |= {f"kept.{k}": t for k, t in kept.items()}
        tensors |= {f"{group}.{k}": t for group, store in stores.items() for k, t in store.table().items()}
        tensor_files.write_tensors(self.folder / name, {k: t.cpu().clone() for k, t in tensors.items()})
        self.digests.pop(name, None)
        manifest = {
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
        newest = f"round-{when}.json"
        atomic_files.write_json(self.folder / newest, {**manifest, "digest": _digest_of(manifest)})
        return self._remove_old(stores.values(), newest)

    def _digest(self, path: Path) -> str:
        if path.name not in self.digests:
            self.digests[path.name] = atomic_files.digest(path)
        return self.digests[path.name]

    def manifests(self) -> list[Path]:
        """Return the manifests, the newest first."""
        return sorted(self.folder.glob("round-*.json"), reverse=True)

    def _remove_old(self, stores: Iterable[ClientStore], newest: str) -> list[str]:
        """Remove the files that none of the kept checkpoints needs; return the names of the others.

        Manifests of later rounds are removed too: the run resumed from before them, so they were damaged.
        """
        keep: set[str] = set()
        for path in [p for p in self.manifests() if p.name <= newest][:_KEEP]:
            try:
                keep |= {path.name, *json.loads(path.read_text())["files"]}
            except (ValueError, KeyError):
                continue
        segments = [f"{store.prefix}-*.safetensors" for store in stores]
        for pattern in ("round-*.json", "server-*.safetensors", *segments, "*.part"):
            for path in self.folder.glob(pattern):
                if path.name not in keep:
                    path.unlink()
        return sorted(keep)

    def load(self, stores: Mapping[str, ClientStore]) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint, if there is one, and complaints about newer ones that are damaged."""
        complaints: list[str] = []
        for path in self.manifests():
            try:
                manifest = json.loads(path.read_text())
                if manifest.pop("digest") != _digest_of(manifest):
                    raise ValueError("it is damaged")
                for name, expected in manifest["files"].items():
                    if atomic_files.digest(self.folder / name) != expected:
                        raise ValueError(f"{name} is damaged")
                name = manifest.get("server", f"server-{manifest['round']:06d}.safetensors")
                tensors = load_file(self.folder / name)
                groups: dict[str, dict[str, Tensor]] = {"server": {}, "kept": {}, **{group: {} for group in stores}}
                for key, tensor in tensors.items():
                    group, field = key.split(".", 1)
                    groups[group][field] = tensor
                for group, store in stores.items():
                    if group in manifest:
                        rows = {int(k): v for k, v in manifest[group]["rows"].items()}
                        store.restore(groups[group], manifest[group]["written"], rows)
                self.digests = dict(manifest["files"])
                round, step = manifest["round"], manifest.get("step", 0)
                self.ranks.check_equal("checkpoints", path.name)
                return Checkpoint(round, step, State(groups["server"]), groups["kept"], manifest["facts"]), complaints
            except FileNotFoundError as error:
                complaints.append(f"the checkpoint {path.name} cannot be used: {Path(error.filename).name} is missing")
            except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
                complaints.append(f"the checkpoint {path.name} cannot be used: {error}")
        self.ranks.check_equal("checkpoints", None)
        return None, complaints

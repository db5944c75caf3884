"""Saving a run so that it can go on as if nothing had happened.

A checkpoint is a manifest (JSON) that names its files with their digests. The last two are kept, so that there is one
to fall back on.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equipoise.engine.client_store import ClientStore
from equipoise.state import State
from equipoise.storage import atomic_files, tensor_files

_KEEP = 2


@dataclass
class Checkpoint:
    """A checkpoint read back."""

    round: int
    step: int
    "how many exchanges of the next round were done"
    server: State
    kept: dict[str, Tensor]
    "what else the run keeps: tables of scores, where a deployment began"
    facts: dict[str, Any]
    "counters, and the length of the log at that round"


def _digest_of(manifest: dict[str, Any]) -> str:
    return blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


class CheckpointFolder:
    def __init__(self, folder: Path):
        self.folder = folder
        atomic_files.make_folder(folder)
        self.digests: dict[str, str] = {}  # segments never change: each is read for its digest once

    def save(
        self,
        round: int,
        step: int,
        server: State,
        store: ClientStore,
        kept: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> None:
        """After so many rounds and exchanges of the next. What a manifest speaks of is never written over."""
        store.flush()
        when = f"{round:06d}" + (f"s{step:03d}" if step else "")
        names = [f"server-{when}{letter}.safetensors" for letter in ("", "b")]
        name = next((name for name in names if not (self.folder / name).exists()), names[0])
        tensors = {f"server.{k}": t for k, t in server.items()}
        tensors |= {f"kept.{k}": t for k, t in kept.items()}
        tensors |= {f"store.{k}": t for k, t in store.table().items()}
        tensor_files.write_tensors(self.folder / name, {k: t.clone() for k, t in tensors.items()})
        self.digests.pop(name, None)
        manifest = {
            "round": round,
            "step": step,
            "server": name,
            "files": {path.name: self._digest(path) for path in [self.folder / name, *store.segments()]},
            "store": {"written": store.written, "rows": {str(k): v for k, v in store.rows.items()}},
            "facts": facts,
        }
        newest = f"round-{when}.json"
        atomic_files.write_json(self.folder / newest, {**manifest, "digest": _digest_of(manifest)})
        self._tidy(store, newest)

    def _digest(self, path: Path) -> str:
        if path.name not in self.digests:
            self.digests[path.name] = atomic_files.digest(path)
        return self.digests[path.name]

    def manifests(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("round-*.json"), reverse=True)

    def _tidy(self, store: ClientStore, newest: str) -> None:
        """Remove what none of the kept checkpoints needs; later ones were damaged, or this would not be the newest."""
        keep: set[str] = set()
        for path in [p for p in self.manifests() if p.name <= newest][:_KEEP]:
            try:
                keep |= {path.name, *json.loads(path.read_text())["files"]}
            except (ValueError, KeyError):
                continue
        for pattern in ("round-*.json", "server-*.safetensors", "clients-*.safetensors", "*.part"):
            for path in self.folder.glob(pattern):
                if path.name not in keep:
                    path.unlink()
        for number in list(store.rows):
            if f"clients-{number:06d}.safetensors" not in keep:
                del store.rows[number]

    def load(self, store: ClientStore) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with those that are not."""
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
                groups: dict[str, dict[str, Tensor]] = {"server": {}, "kept": {}, "store": {}}
                for key, tensor in tensors.items():
                    group, field = key.split(".", 1)
                    groups[group][field] = tensor
                rows = {int(k): v for k, v in manifest["store"]["rows"].items()}
                store.restore(groups["store"], manifest["store"]["written"], rows)
                self.digests = dict(manifest["files"])
                round, step = manifest["round"], manifest.get("step", 0)
                return Checkpoint(round, step, State(groups["server"]), groups["kept"], manifest["facts"]), complaints
            except FileNotFoundError as error:
                complaints.append(f"the checkpoint {path.name} cannot be used: {Path(error.filename).name} is missing")
            except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
                complaints.append(f"the checkpoint {path.name} cannot be used: {error}")
        return None, complaints

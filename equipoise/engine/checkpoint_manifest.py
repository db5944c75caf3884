"""Manifests of checkpoints: JSON files that list the files of a checkpoint with their digests.

A manifest is read as if a stranger had written it. Whatever is wrong with it is a ValueError in a few words, after
which an older checkpoint can be tried.
"""

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.storage import atomic_files

_NAME = re.compile(r"round-(\d{6,12})(?:s(\d{3,6}))?\.json")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # a name in the folder itself, never a path to elsewhere
_MOST = 10**12  # rounds, segments and rows


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest, checked as far as that is possible without the files that it lists."""

    name: str
    round: int
    step: int
    server: str
    "file of the server's state"
    files: dict[str, str]
    "digests of all files by name"
    tables: dict[str, tuple[int, dict[int, int]]]
    "of each store: number of segments written so far, and number of rows of each segment"
    facts: dict[str, Any]


def place_of(path: Path) -> tuple[int, int]:
    """Return the round of a manifest, and the exchanges of the next round that it includes, by its name."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2] or 0)


def find_manifests(folder: Path) -> list[Path]:
    """Return the manifests in a folder, the newest first."""
    found = [path for path in folder.glob("round-*.json") if _NAME.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=place_of, reverse=True)


def moment(round: int, step: int) -> str:
    """Return how names of files say when a checkpoint was written."""
    return f"{round:06d}" + (f"s{step:03d}" if step else "")


def digest_of(content: dict[str, Any]) -> str:
    """Return the digest of a manifest's content."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with its own digest."""
    atomic_files.write_json(path, {**content, "digest": digest_of(content)})


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; raise ValueError if anything is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("digest", None) != digest_of(content):
            raise ValueError("it is damaged")
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except (RecursionError, ValueError, OverflowError, MemoryError):
        raise ValueError("it is damaged") from None
    return _checked(path, content)


def _checked(path: Path, content: dict[str, Any]) -> Manifest:
    round, step = _count(content.get("round"), "round"), _count(content.get("step", 0), "step")
    if (round, step) != place_of(path):
        raise ValueError("its name is not that of its round")
    files = _table(content.get("files"), "files")
    for name, digest in files.items():
        if not _PLAIN.fullmatch(name) or not isinstance(digest, str):
            raise ValueError(f"it lists {ascii(name)[:80]}, which is not a file of a checkpoint")
    server = content.get("server", f"server-{round:06d}.safetensors")  # version 0.1 did not name it
    if not isinstance(server, str) or server not in files:
        raise ValueError("it does not list the file of the server's state")
    tables = {}
    for group in content.keys() - {"round", "step", "server", "files", "facts"}:
        table = _table(content[group], group)
        rows = _table(table.get("rows"), f"{group}.rows")
        if not all(number.isascii() and number.isdecimal() and len(number) <= 12 for number in rows):
            raise ValueError(f"{group}.rows is not a table of segments")
        counts = {int(number): _count(count, f"{group}.rows") for number, count in rows.items()}
        tables[group] = _count(table.get("written"), f"{group}.written"), counts
    facts = _table(content.get("facts"), "facts")
    for key in ("logs", "log_digests"):
        _table(facts.get(key, {}), f"facts.{key}")
    for length in facts.get("logs", {}).values():
        _count(length, "facts.logs")
    return Manifest(path.name, round, step, server, files, tables, facts)


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is not a number that can be there")
    return value


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a table")
    return value

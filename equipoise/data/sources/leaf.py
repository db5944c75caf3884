"""Readers of LEAF's JSON files: `users`, `num_samples`, and `user_data` with the lists `x` and `y` of every user."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.data.archives import content, opened
from equipoise.data.source import DataProgress
from equipoise.data.text_encoding import check_name
from equipoise.errors import EquipoiseError

_HEAD = 4 << 20  # bytes; users and their counts are at the beginning of LEAF's files


def leaf_files(folder: Path) -> list[Path]:
    """Return the files that together contain every sample once.

    LEAF's steps leave the same samples in several folders, from all_data to train and test; the last ones are used,
    train first, because its samples are the earlier ones.
    """
    for base in (folder, folder / "data"):
        for places in ((base / "train", base / "test"), (base / "all_data",), (base,)):
            if found := [path for place in places for path in _json_files(place)]:
                return found
    return []


def _json_files(folder: Path) -> list[Path]:
    """Return the JSON files of a folder; one that is there both packed and unpacked counts once."""
    found: dict[str, Path] = {}
    for ending in (".json", ".json.gz", ".json.xz"):
        for path in folder.glob(f"*{ending}"):
            if path.is_file():
                found.setdefault(path.name.removesuffix(ending), path)
    return [found[name] for name in sorted(found)]


def read_json(path: Path, limit: int = 1 << 30) -> Any:
    """Read a JSON file, packed or not, of at most `limit` bytes."""
    data = content(path, limit)
    try:
        return json.loads(data, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise EquipoiseError(f"{path} is not valid JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary, and reject keys that appear twice: Python would keep the last only, and lose data."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:40]!r} appears twice in one table")
    return table


def users_of(path: Path, tables: Any) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Iterate over the users of a file with their lists x and y, after checking LEAF's format."""
    data = tables.get("user_data") if isinstance(tables, dict) else None
    users = tables.get("users") if isinstance(tables, dict) else None
    counts = tables.get("num_samples") if isinstance(tables, dict) else None
    if not isinstance(data, dict) or not isinstance(users, list) or not isinstance(counts, list):
        raise EquipoiseError(
            f"{path} is not in LEAF's format: it needs the lists users, num_samples and the table user_data"
        )
    if len(users) != len(counts):
        raise EquipoiseError(
            f"{path} has {len(users)} users and {len(counts)} numbers of samples; there must be one number per user"
        )
    if twice := next((user for user, times in Counter(map(repr, users)).items() if times > 1), None):
        raise EquipoiseError(f"{path} lists the user {twice} twice; every user may be listed only once")
    for user, count in zip(users, counts, strict=True):
        samples = data.get(user) if isinstance(user, str) else None
        if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in "xy"):
            raise EquipoiseError(f"{path}: user {user!r} has no lists x and y in user_data")
        check_name(path, user)
        x, y = samples["x"], samples["y"]
        if not len(x) == len(y) == count:
            raise EquipoiseError(
                f"{path}: user {user!r} has {len(x)} inputs, {len(y)} targets and num_samples {count!r}; "
                "they must agree"
            )
        yield user, x, y


def each_user(paths: list[Path], progress: DataProgress) -> Iterator[tuple[Path, str, list[Any], list[Any]]]:
    """Iterate over the users of all files: the file, the user, and the lists x and y."""
    seen: dict[tuple[Path, str], Path] = {}
    for k, path in enumerate(paths):
        for user, x, y in users_of(path, read_json(path)):
            # A user may be in train and in test, but twice in one folder would mean that its samples are there twice.
            other = seen.setdefault((path.parent, user), path)
            if other != path:
                raise EquipoiseError(f"{path} and {other.name} both contain the user {user!r}; remove one of them")
            yield path, user, x, y
        progress(k + 1, len(paths))


def count_samples(paths: list[Path]) -> int | None:
    """Return the sum of num_samples, read from the beginning of the files; None if it is not found there."""
    total = 0
    for path in paths:
        with opened(path) as file:
            head = file.read(_HEAD)
        found = re.search(rb'"num_samples"\s*:\s*\[([\d\s,]*)\]', head)
        counts = found[1].replace(b",", b" ").split() if found else [b"unknown"]
        if any(len(count) > 9 or not count.isdigit() for count in counts):
            return None
        total += sum(int(count) for count in counts)
    return total

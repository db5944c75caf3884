"""LEAF's JSON: `users`, `num_samples`, and `user_data` with the lists `x` and `y` of every user."""

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

_HEAD = 4 << 20  # users and their counts stand at the beginning of LEAF's files


def leaf_files(folder: Path) -> list[Path]:
    """The files that together hold every sample once.

    LEAF keeps the same samples in several folders on its way from all_data to train and test; the last are taken, in
    the order of time.
    """
    for base in (folder, folder / "data"):
        for places in ((base / "train", base / "test"), (base / "all_data",), (base,)):
            if found := [path for place in places for path in _json_files(place)]:
                return found
    return []


def _json_files(folder: Path) -> list[Path]:
    """A file that lies there packed and unpacked is one file."""
    found: dict[str, Path] = {}
    for ending in (".json", ".json.gz", ".json.xz"):
        for path in folder.glob(f"*{ending}"):
            if path.is_file():
                found.setdefault(path.name.removesuffix(ending), path)
    return [found[name] for name in sorted(found)]


def read_json(path: Path, limit: int = 1 << 30) -> Any:
    data = content(path, limit)
    try:
        return json.loads(data, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise EquipoiseError(f"{path} is not valid JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice, and Python keeps the last; here that would be somebody's data lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice in one table")
    return table


def users_of(path: Path, tables: Any) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user with its lists x and y, checked for what LEAF promises."""
    data = tables.get("user_data") if isinstance(tables, dict) else None
    users = tables.get("users") if isinstance(tables, dict) else None
    counts = tables.get("num_samples") if isinstance(tables, dict) else None
    if not isinstance(data, dict) or not isinstance(users, list) or not isinstance(counts, list):
        raise EquipoiseError(
            f"{path} is not in LEAF's format: it needs the lists users, num_samples and the table user_data"
        )
    if len(users) != len(counts):
        raise EquipoiseError(
            f"{path} names {len(users)} users and {len(counts)} numbers of samples; there must be as many"
        )
    if twice := next((user for user, times in Counter(map(repr, users)).items() if times > 1), None):
        raise EquipoiseError(f"{path} lists the user {twice} twice; every user may stand there once")
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
    seen: dict[tuple[Path, str], Path] = {}
    for k, path in enumerate(paths):
        for user, x, y in users_of(path, read_json(path)):
            # A user may be in train and in test; twice in one folder, its samples would be there twice.
            other = seen.setdefault((path.parent, user), path)
            if other != path:
                raise EquipoiseError(f"{path} and {other.name} both hold the user {user!r}; remove one of them")
            yield path, user, x, y
        progress(k + 1, len(paths))


def count_samples(paths: list[Path]) -> int | None:
    """The sum of num_samples, from the heads of the files; None where they have other heads."""
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

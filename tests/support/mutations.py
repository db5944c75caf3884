"""Random changes of bytes, texts and nested tables, for fuzzing."""

import math
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 255, 256, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e-30, 1e9, 1e30, 1e39, 1e300, math.inf, -math.inf, math.nan),
]
TEXTS: list[str] = [
    *("", "x", "linear", "mlp", "fedavg", "auto", "true", "é" * 40, "\n", "a\nb", "\0", "\u2028", "'", '"', "../../x"),
    *("x.py:Name", "x:y", ":", "/", "a" * 5000, "%s%n{}", "{0!r}", "NaN", "head", "*", "[", "1e400", "\ud7ff", "名"),
]
ODD: list[Any] = [
    *NUMBERS,
    *TEXTS,
    True,
    False,
    [],
    {},
    [[]],
    [1, 2, 3],
    ["a"],
    [1, "a"],
    {"name": 1},
    {"a": {"b": []}},
]


def odd_value(rng: random.Random, more: Sequence[Any] = ()) -> Any:
    """A value that is seldom right; sometimes a long or a deep one."""
    kind = rng.random()
    if kind < 0.05:
        value: Any = rng.choice([1, "a", []])
        for _ in range(rng.choice([3, 30, 300])):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    if kind < 0.08:
        return [rng.choice([0, 1.5, "a"])] * rng.choice([10, 1000, 20_000])
    return rng.choice([*ODD, *more])


def mutate_tree(rng: random.Random, tree: Any, more: Sequence[Any] = (), moment: bool = False) -> str:
    """Change one place of nested dictionaries and lists, and return what was done.

    Args:
        rng: what is changed, and how.
        tree: the dictionary or list.
        more: values to try besides the odd ones.
        moment: whether dates are values too.
    """
    place, where = tree, []
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        where.append(str(key))
        if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    value = datetime(2020, 1, 1, tzinfo=UTC) if moment and rng.random() < 0.03 else odd_value(rng, more)
    if not keys:
        place.append(value) if isinstance(place, list) else place.update({"a": value})
        return "something into an empty place"
    how = rng.random()
    if how < 0.15:
        del place[key]
        return f"{'.'.join(where)} removed"
    if how < 0.3 and isinstance(place, dict):
        place[rng.choice([t for t in TEXTS if len(t) < 300])] = place.pop(key)
        return f"{'.'.join(where)} renamed"
    if how < 0.35 and isinstance(place, list):
        place.extend(place * rng.choice([1, 2, 50]))
        return f"{'.'.join(where)} repeated"
    if how < 0.45 and isinstance(place, dict):
        place[rng.choice(["a", "name", "kind", "lr", "clients", "hidden"])] = value
        return f"something beside {'.'.join(where)}"
    if how < 0.6 and isinstance(place[key], (int, float)) and not isinstance(place[key], bool):
        third = place[key] / 3 if abs(place[key]) < 1e300 else 0.5
        place[key] = rng.choice([-place[key], place[key] * 1000, third, repr(third), [place[key]]])
        return f"{'.'.join(where)} is another number"
    place[key] = value
    return f"{'.'.join(where)} = {type(value).__name__}"


def mutate_bytes(rng: random.Random, data: bytes, snippets: Sequence[bytes] = ()) -> bytes:
    """Return other bytes: cut, flipped, zeroed, doubled, with something inserted, removed or moved.

    Args:
        rng: what is changed, and how.
        data: the bytes.
        snippets: pieces that are inserted.
    """
    content = bytearray(data)
    hows: list[Callable[[random.Random, bytearray, Sequence[bytes]], None]] = [_flip, _flip, _cut, _zero, _insert]
    hows += [_insert, _remove, _double, _move, _empty]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if content:
            rng.choice(hows)(rng, content, snippets)
    return bytes(content)


def _place(rng: random.Random, content: bytearray) -> int:
    """A place; headers and the directories at the end of archives get more than their share."""
    ends = [rng.randrange(min(64, len(content))), rng.randrange(max(0, len(content) - 256), len(content))]
    return rng.choice([rng.randrange(len(content)), rng.randrange(len(content)), *ends])


def _flip(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[_place(rng, content)] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])


def _cut(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    del content[_place(rng, content) :]


def _zero(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    at = _place(rng, content)
    content[at : at + 64] = bytes(len(content[at : at + 64]))


def _insert(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    at = rng.choice([_place(rng, content), len(content)])
    content[at:at] = rng.choice([*snippets, bytes(rng.randrange(256) for _ in range(rng.randrange(1, 32)))])


def _remove(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    at = _place(rng, content)
    del content[at : at + rng.choice([1, 4, 50])]


def _double(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    if len(content) < 1 << 20:
        content.extend(content)


def _move(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    begin, end = sorted((_place(rng, content), _place(rng, content)))
    piece = content[begin : min(end, begin + 4096)]
    at = _place(rng, content)
    content[at:at] = piece


def _empty(rng: random.Random, content: bytearray, snippets: Sequence[bytes]) -> None:
    if rng.random() < 0.1:
        content.clear()

"""Encodings of characters and of clients' names as numbers."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from equipoise.errors import EquipoiseError

ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))
"""The newline and all printable ASCII characters; code 0 stands for every other character."""
SYMBOLS = len(ALPHABET) + 1
"""The number of codes."""

_CODES = np.zeros(128, np.uint8)
_CODES[[ord(c) for c in ALPHABET]] = np.arange(1, SYMBOLS)


def encode(text: str) -> np.ndarray:
    """Return one code per character; the code is the same for all texts, so that models do not depend on the roles."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.where(points < 128, _CODES[np.minimum(points, 127)], 0).astype(np.uint8)


def decode(codes: np.ndarray) -> str:
    """Return the text of these codes."""
    return "".join("\N{REPLACEMENT CHARACTER}" if c == 0 else ALPHABET[c - 1] for c in codes)


def check_name(path: Path, name: str) -> None:
    """Raise an error unless a client's name is short and printable, because it is shown and written in many places."""
    if not name or len(name) > 200 or not name.isprintable():
        raise EquipoiseError(
            f"{path}: {name[:40]!r} cannot be a client's name; it must be 1 to 200 printable characters"
        )


def names_to_bytes(names: Iterable[str]) -> np.ndarray:
    """Return names as an array of bytes, for files that hold arrays only."""
    return np.frombuffer(json.dumps(list(names)).encode(), np.uint8)


def names_from_bytes(array: np.ndarray) -> list[str]:
    """Return the names that `names_to_bytes` stored."""
    names: list[str] = json.loads(array.tobytes())
    return names


def numbered(clients: int) -> list[str]:
    """Return the names client-0, client-1, ... with leading zeros, so that they sort."""
    digits = len(str(clients - 1))
    return [f"client-{i:0{digits}d}" for i in range(clients)]

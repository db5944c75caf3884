"""Characters and names as numbers."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from equipoise.errors import EquipoiseError

ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))
"""A line's end and all that can be printed in ASCII; number 0 stands for everything else."""
SYMBOLS = len(ALPHABET) + 1

_CODES = np.zeros(128, np.uint8)
_CODES[[ord(c) for c in ALPHABET]] = np.arange(1, SYMBOLS)


def encode(text: str) -> np.ndarray:
    """One number a character; the same for every text, so that no model depends on which roles were read."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.where(points < 128, _CODES[np.minimum(points, 127)], 0).astype(np.uint8)


def decode(codes: np.ndarray) -> str:
    return "".join("\N{REPLACEMENT CHARACTER}" if c == 0 else ALPHABET[c - 1] for c in codes)


def check_name(path: Path, name: str) -> None:
    """A client's name is shown and written in many places: it must be text that can be."""
    if not name or len(name) > 200 or not name.isprintable():
        raise EquipoiseError(
            f"{path}: {name[:40]!r} cannot be a client's name; it must be 1 to 200 printable characters"
        )


def names_to_bytes(names: Iterable[str]) -> np.ndarray:
    """Names as an array, for files that hold arrays only."""
    return np.frombuffer(json.dumps(list(names)).encode(), np.uint8)


def names_from_bytes(array: np.ndarray) -> list[str]:
    names: list[str] = json.loads(array.tobytes())
    return names


def numbered(clients: int) -> list[str]:
    """client-0, client-1, ... with as many digits as the last one needs, so that they sort."""
    digits = len(str(clients - 1))
    return [f"client-{i:0{digits}d}" for i in range(clients)]

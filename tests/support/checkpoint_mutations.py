"""Damage to a folder of checkpoints, by chance or by somebody who repairs the digests afterwards."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from equipoise.engine.checkpoint_manifest import digest_of
from equipoise.storage import atomic_files

ODD: list[Any] = [
    *(None, True, -1, 0, 7, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../../run.toml", "/etc/passwd", "."),
    *([], {}, [[[]]], {"a": {"b": []}}, [1, 2], {"1": 1}, {"../x": "0"}),
]


def mutate(rng: random.Random, folder: Path, forge: bool = True) -> str:
    """Damage a folder of checkpoints in one way, and return a description.

    Args:
        rng: what is damaged, and how.
        folder: the folder `checkpoint` of a run.
        forge: whether digests may be made to fit what was changed.
    """
    files = sorted(p for p in folder.iterdir() if p.is_file())
    if not files:
        return "nothing: there is no file left"
    path = rng.choice(files)
    how: Callable[[random.Random, Path], str] = rng.choice([_flip, _cut, _append, _remove, _replace, _structure])
    try:
        return _forge(rng, folder) if forge and rng.random() < 0.5 else f"{path.name}: {how(rng, path)}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, SafetensorError):
        return f"{path.name}: {_append(rng, path)}"  # it was damaged before, and has no structure to change


def _flip(rng: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return _append(rng, path)
    at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    content[at] ^= bit
    path.write_bytes(content)
    return f"byte {at} changed by {bit}"


def _cut(rng: random.Random, path: Path) -> str:
    content = path.read_bytes()
    length = rng.randrange(len(content) + 1)
    path.write_bytes(content[:length])
    return f"cut to {length} of {len(content)} bytes"


def _append(rng: random.Random, path: Path) -> str:
    more = rng.randbytes(rng.randrange(1, 40))
    path.write_bytes(path.read_bytes() + more)
    return f"{more!r} appended"


def _remove(rng: random.Random, path: Path) -> str:
    path.unlink()
    if rng.random() < 0.3:
        path.mkdir()
        return "a folder in its place"
    return "removed"


def _replace(rng: random.Random, path: Path) -> str:
    contents = [b"", b"null", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe\x00", b"1" * 10_000, rng.randbytes(300)]
    content = rng.choice(contents)
    path.write_bytes(content)
    return f"replaced by {content[:20]!r}, {len(content)} bytes"


def _structure(rng: random.Random, path: Path) -> str:
    if path.suffix != ".json":
        return _flip(rng, path)
    content = json.loads(path.read_text())
    what = _change(rng, content)
    path.write_text(json.dumps(content))
    return what


def _change(rng: random.Random, content: Any) -> str:
    """Change one value, key or entry anywhere in a JSON value."""
    place, names = content, []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        names.append(str(key))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.3:
            break
        place = inner
    where, kind = ".".join(names), rng.random()
    if kind < 0.2:
        del place[key]
        return f"{where} removed"
    if kind < 0.3 and isinstance(place, dict):
        place[rng.choice(["", "x", "../x", "9" * 30, "²"])] = place.pop(key)
        return f"{where} renamed"
    value = rng.choice(ODD)
    place[key] = value
    return f"{where} = {value!r}"


def _forge(rng: random.Random, folder: Path) -> str:
    """Change a manifest or a file of tensors, and make all digests fit."""
    path = rng.choice(sorted(p for p in folder.glob("round-*.json") if p.is_file()))
    content = json.loads(path.read_text())
    content.pop("digest")
    if rng.random() < 0.4:
        name = rng.choice(sorted(content["files"]))
        what = f"{name}: {_forge_tensors(rng, folder / name)}"
        content["files"][name] = atomic_files.digest(folder / name)
    else:
        what = _change(rng, content)
    path.write_text(json.dumps({**content, "digest": digest_of(content)}))
    return f"{path.name}, digests repaired: {what}"


def _forge_tensors(rng: random.Random, path: Path) -> str:
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    name = rng.choice(sorted(tensors))
    t = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
        what = "removed"
    elif kind == 1:
        tensors[rng.choice(["x", "x.y", "", "store.x", name + "x"])] = tensors.pop(name)
        what = "renamed"
    elif kind == 2:
        tensors[name], what = t.double() if t.dtype != torch.float64 else t.int(), "of another type"
    elif kind == 3:
        tensors[name], what = torch.cat([t.flatten(), t.flatten()]), "longer"
    elif kind == 4 and t.numel():
        tensors[name] = torch.full_like(t, rng.choice([-1, -7, 2**40]) if not t.is_floating_point() else float("nan"))
        what = "with odd numbers"
    else:
        path.write_bytes(rng.randbytes(100))
        return "rubbish"
    save_file(tensors, path)
    return f"{name} {what}"

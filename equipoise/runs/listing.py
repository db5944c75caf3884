"""What there is to choose from, as plain data for `equipoise list`.

Reading the registries loads PyTorch, which takes seconds. The package therefore contains a catalogue of them,
`catalogue.json`, which is used as long as it belongs to the source files at hand; `make catalogue` writes it.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings, nearest
from equipoise.storage import atomic_files

CATALOGUE = Path(__file__).with_name("catalogue.json")
_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("algorithms", "attacks", "callbacks", "data", "equilibrium", "models", "reducers", "settings.py")
Listing = dict[str, list[dict[str, Any]]]


def listing(kind: str, name: str | None = None) -> list[dict[str, Any]]:
    """List everything of a kind, or the entry with this name.

    Args:
        kind: "algorithms", "models", "data", "partitions", "attacks", "reducers" or "callbacks".
        name: the name of one entry.
    """
    entries = _from_catalogue().get(kind) or from_registries()[kind]
    found = [entry for entry in entries if name in (None, entry["name"])]
    if not found and name is not None:
        names = [entry["name"] for entry in entries]
        raise EquipoiseError(f"there is no {name!r} among the {kind}{nearest(name, names)}")
    return found


def from_registries() -> Listing:
    """Describe everything in the registries."""
    from equipoise.algorithms import ALGORITHMS
    from equipoise.attacks import ATTACKS
    from equipoise.callbacks import CALLBACKS
    from equipoise.data.partitions import PARTITIONS
    from equipoise.data.sources import SOURCES
    from equipoise.models import MODELS
    from equipoise.reducers import REDUCERS

    registries: dict[str, Mapping[str, Any]] = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "data": SOURCES,
        "partitions": PARTITIONS,
        "attacks": ATTACKS,
        "reducers": REDUCERS,
        "callbacks": CALLBACKS,
    }
    return {kind: [_entry(name, cls) for name, cls in registry.items()] for kind, registry in registries.items()}


def _entry(name: str, cls: type[Settings]) -> dict[str, Any]:
    from equipoise.equilibrium import Options

    parameters = [row for row in cls.describe() if row["name"] != "kind"]
    # Those of an equilibrium layer come last, and are the same for all models that have one.
    common = [row["name"] for row in parameters if issubclass(cls, Options) and row["name"] in Options.model_fields]
    parameters.sort(key=lambda row: row["name"] in common)
    return {"name": name, "summary": cls.summary(), "paper": cls.paper, "parameters": parameters, "of_layer": common}


def source_digest() -> str:
    """Return a digest of the source files that the registries are made of."""
    hasher = blake2b(digest_size=16)
    for source in _SOURCES:
        path = _PACKAGE / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            hasher.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            hasher.update(file.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return hasher.hexdigest()


def write_catalogue() -> None:
    """Write the catalogue of the registries as they are now."""
    atomic_files.write_json(CATALOGUE, {"sources": source_digest(), **from_registries()})


def _from_catalogue() -> Listing:
    """Read the catalogue; it is empty if it does not belong to the source files at hand."""
    try:
        found: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if found.pop("sources", "") == source_digest() else {}


if __name__ == "__main__":
    write_catalogue()

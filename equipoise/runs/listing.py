"""What there is to choose from, as plain data for `equipoise list`.

Reading the registries loads PyTorch, which takes seconds. The package therefore contains a catalogue of them,
`catalogue.json`, which is used as long as it belongs to the source files at hand; `make catalogue` writes it.
"""

import json
from hashlib import blake2b
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.errors import EquipoiseError
from equipoise.registry import Registry, installed, is_own_code
from equipoise.settings import Settings, nearest
from equipoise.storage import atomic_files

if TYPE_CHECKING:
    from equipoise.metrics import AnyMetric

CATALOGUE = Path(__file__).with_name("catalogue.json")
_PACKAGE = Path(__file__).parents[1]
_METRICS = "metrics"
_SOURCES = (
    *("algorithms", "attacks", "callbacks", "data", "equilibrium", _METRICS, "models", "optimizers", "reducers"),
    "settings.py",
)
Listing = dict[str, list[dict[str, Any]]]


def listing(kind: str, name: str | None = None) -> list[dict[str, Any]]:
    """List everything of a kind, or the entry with this name.

    Plug-ins are imported, because only they know their settings. An entry's `package` is the one that provides it,
    empty for those of Equipoise.

    Args:
        kind: "algorithms", "models", "data", "partitions", "attacks", "reducers", "metrics" or "callbacks".
        name: the name of one entry, or the place of own code.
    """
    if name is not None and is_own_code(name):
        return [{**_found(kind, name), "package": ""}]
    entries = [{**entry, "package": ""} for entry in _from_catalogue().get(kind) or from_registries()[kind]]
    names = [entry["name"] for entry in entries]
    plugins = {key: point for key, point in installed(kind).items() if key not in names}
    if name is None:
        return [*entries, *(_plugin_entry(kind, point) for point in plugins.values())]
    if name in plugins:
        return [_plugin_entry(kind, plugins[name])]
    if name not in names:
        raise EquipoiseError(f"there is no {name!r} among the {kind}{nearest(name, [*names, *plugins])}")
    return [entries[names.index(name)]]


def _plugin_entry(kind: str, point: EntryPoint) -> dict[str, Any]:
    package = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    try:
        return {**_found(kind, point.name), "package": package}
    except EquipoiseError as error:  # one broken plug-in does not hide the others
        described = {"name": point.name, "summary": str(error), "paper": "", "parameters": [], "of_layer": []}
        return {**described, "package": package}


def _found(kind: str, name: str) -> dict[str, Any]:
    """Describe a plug-in or own code."""
    if kind != _METRICS:
        return _entry(name, _registries()[kind].find(name, kind))
    from equipoise.metrics import find_metrics

    return _metric_entry(find_metrics(name)[0])


def from_registries() -> Listing:
    """Describe everything in the registries, without plug-ins."""
    from equipoise.metrics import METRICS

    found = {kind: [_entry(name, cls) for name, cls in registry.items()] for kind, registry in _registries().items()}
    return {**found, _METRICS: [_metric_entry(metric) for metric in METRICS.values()]}


def _metric_entry(metric: "AnyMetric") -> dict[str, Any]:
    """Describe a metric, which has no settings."""
    return {"name": metric.name, "summary": metric.summary, "paper": "", "parameters": [], "of_layer": []}


def _registries() -> dict[str, Registry[Any]]:
    from equipoise.algorithms import ALGORITHMS
    from equipoise.attacks import ATTACKS
    from equipoise.callbacks import CALLBACKS
    from equipoise.data.partitions import PARTITIONS
    from equipoise.data.sources import SOURCES
    from equipoise.models import MODELS
    from equipoise.reducers import REDUCERS

    return {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "data": SOURCES,
        "partitions": PARTITIONS,
        "attacks": ATTACKS,
        "reducers": REDUCERS,
        "callbacks": CALLBACKS,
    }


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

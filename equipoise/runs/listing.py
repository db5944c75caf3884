"""What there is to choose from, as plain data for `equipoise list`."""

from typing import Any

from equipoise.algorithms import ALGORITHMS
from equipoise.attacks import ATTACKS
from equipoise.data.partitions import PARTITIONS
from equipoise.data.sources import SOURCES
from equipoise.equilibrium import Options
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.reducers import REDUCERS
from equipoise.settings import Settings, nearest


def _entry(name: str, cls: type[Settings]) -> dict[str, Any]:
    parameters = [row for row in cls.describe() if row["name"] != "kind"]
    # Those of an equilibrium layer come last, and are the same for all models that have one.
    common = [row["name"] for row in parameters if issubclass(cls, Options) and row["name"] in Options.model_fields]
    parameters.sort(key=lambda row: row["name"] in common)
    return {"name": name, "summary": cls.summary(), "paper": cls.paper, "parameters": parameters, "of_layer": common}


def listing(kind: str, name: str | None = None) -> list[dict[str, Any]]:
    """All there is of a kind, or the one of that name."""
    registries: dict[str, dict[str, Any]] = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "data": SOURCES,
        "partitions": PARTITIONS,
        "attacks": ATTACKS,
        "reducers": REDUCERS,
    }
    registry = registries[kind]
    if name is not None and name not in registry:
        raise EquipoiseError(f"there is no {name!r} among the {kind}{nearest(name, registry)}")
    return [_entry(key, cls) for key, cls in registry.items() if name in (None, key)]

"""What there is to choose from, as plain data for `equipoise list`."""

from typing import Any

from equipoise.algorithms import ALGORITHMS
from equipoise.data.partitions import PARTITIONS
from equipoise.data.sources import SOURCES
from equipoise.models import MODELS
from equipoise.settings import Settings


def _entries(registry: dict[str, Any]) -> list[dict[str, Any]]:
    def entry(name: str, cls: type[Settings]) -> dict[str, Any]:
        parameters = [row for row in cls.describe() if row["name"] != "kind"]
        return {"name": name, "summary": cls.summary(), "paper": cls.paper, "parameters": parameters}

    return [entry(name, cls) for name, cls in registry.items()]


def listing(kind: str) -> list[dict[str, Any]]:
    registries: dict[str, dict[str, Any]] = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "data": SOURCES,
        "partitions": PARTITIONS,
    }
    return _entries(registries[kind])

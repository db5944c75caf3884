"""Suggestions for settings that were written in the wrong place."""

from collections.abc import Iterable, Mapping
from typing import Any

from equipoise.algorithms import ALGORITHMS
from equipoise.attacks import ATTACKS
from equipoise.config.deployment import Deploy
from equipoise.config.device_classes import Devices
from equipoise.config.engine import Engine
from equipoise.data.config import DataSettings
from equipoise.data.sources import SOURCES
from equipoise.models import MODELS
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS
from equipoise.settings import Settings, nearest

_SETTINGS: dict[str, type[Settings]] = {"engine": Engine, "deploy": Deploy, "privacy": Privacy, "devices": Devices}
_NAMED: dict[str, Mapping[str, type[Settings]]] = {
    "algorithm": ALGORITHMS,
    "model": MODELS,
    "data": SOURCES,
    "attack": ATTACKS,
    "reducer": REDUCERS,
}


def suggest_setting(key: str, tables: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return the end of a message about an unknown setting or section at the top of a configuration.

    Args:
        key: the unknown name.
        tables: the configuration, which says whose settings there can be.
        known: the settings and sections that are allowed at the top.
    """
    found = [f"{section}.{key}" for section, keys in _keys(tables).items() if key in keys]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return nearest(key, known)


def _keys(tables: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the settings that each section can have, those that are in the configuration first."""
    found: dict[str, set[str]] = {}
    for section, registry in _NAMED.items():
        table = tables.get(section)
        if isinstance(table, Mapping):
            named = registry.get(str(table.get("name")))
            found[section] = set() if named is None else set(named.model_fields)
    found.setdefault("data", set()).update({*DataSettings.model_fields, "partition"})
    return found | {section: set(cls.model_fields) for section, cls in _SETTINGS.items()}

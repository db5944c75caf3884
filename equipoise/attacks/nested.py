"""Attacks that contain another attack, as a setting that is a table with its name."""

from typing import Any

from equipoise.attacks.base import Attack
from equipoise.errors import EquipoiseError
from equipoise.registry import Registry, choose, name_of
from equipoise.settings import shown

_OUTER = ("fraction", "clients")
"""Settings that only the outer attack has: who is malicious."""


def read_inner(value: Any, where: str) -> Any:
    """Return the attack that a table describes; anything that is no table is returned as it is.

    Args:
        value: the table, with the name of the attack and its settings.
        where: the name of the setting, for error messages.
    """
    if not isinstance(value, dict):
        return value
    for key in _OUTER:
        if key in value:
            raise EquipoiseError(f"{where}.{key} = {shown(value[key])} has no effect; write attack.{key}")
    return choose(Registry("attacks", Attack, Attack.registry), value, where)[1]


def inner_table(inner: Attack) -> dict[str, Any]:
    """Return the table of an inner attack."""
    settings = {key: value for key, value in inner.table().items() if key not in _OUTER}
    return {"name": name_of(Attack.registry, inner), **settings}

"""The few figures by which a result is shown in one line."""

from collections.abc import Mapping
from typing import Any

from equipoise.storage.model_kinds import KINDS


def headlines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each kind of model in a summary with its score, such as ("personal", "accuracy 0.912")."""
    found = []
    for prefix, figures in (("", summary), ("unseen ", summary.get("unseen", {}))):
        for kind in KINDS:
            for name, value in list(figures.get(kind, {}).items())[:1]:
                found.append((f"{prefix}{kind}", f"{name} {'–' if value is None else format(value, '.4g')}"))
    return found

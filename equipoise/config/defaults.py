"""The default values of the settings of an experiment, by the names that they have in a flat table."""

from typing import Any

from equipoise.config.experiment import Experiment
from equipoise.settings import Settings
from equipoise.storage.run_folder import flatten

_IDENTIFYING = ("name", "kind")
"""Settings that say what the others belong to; they are never left out as defaults."""


def default_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the default of every setting that has one, for the methods, models and data of an experiment.

    Args:
        experiment: the experiment; its names and kinds decide which settings there are.

    Returns:
        Defaults by dotted names; a setting that is left out by default has None.
    """
    parts: list[tuple[str, Settings | None]] = [
        ("", experiment.schedule),
        ("model.", experiment.model),
        ("algorithm.", experiment.algorithm),
        ("attack.", experiment.attack),
        ("reducer.", experiment.reducer),
        ("privacy.", experiment.privacy),
        ("devices.", experiment.devices),
        ("engine.", experiment.engine),
        ("deploy.", experiment.deploy),
    ]
    if experiment.data is not None:
        data = experiment.data
        parts += [("data.", data.dealing), ("data.", data.source), ("data.partition.", data.partition)]
    for name, callback in zip(experiment.callback_names, experiment.callbacks, strict=True):
        parts.append((f"callbacks.{name}.", callback))
    found: dict[str, Any] = {}
    for prefix, settings in parts:
        if settings is not None:
            found |= _defaults(settings, prefix)
    return found


def _defaults(settings: Settings, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            own = flatten(value.table()) if value == field.default else _defaults(value, "")
            found |= {f"{prefix}{name}.{key}": default for key, default in own.items()}
        elif not field.is_required() and name not in _IDENTIFYING:
            default = field.get_default(call_default_factory=True)
            found[prefix + name] = list(default) if isinstance(default, tuple) else default
    return found

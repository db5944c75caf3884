"""A client's time series as arrays, beside its samples in a file: what its forecasts are scored and scaled by."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from equipoise.data.series_facts import SeriesFacts
from equipoise.errors import EquipoiseError

_TYPES: dict[str, type[np.generic]] = {
    "values": np.float32,
    "begins": np.int64,
    "start": np.int64,
    "shift": np.float64,
    "size": np.float64,
    "trained_until": np.int64,
    "owner": np.int64,
    "target": np.int64,
    "steps": np.int64,
}
_STEPS = ("step", "horizon", "window")  # what is in the array `steps`


def series_arrays(series: SeriesFacts, samples: np.ndarray) -> dict[str, np.ndarray]:
    """Return the series that some samples are windows of, and where in them the samples are; other series are left out.

    Args:
        series: the series of all owners.
        samples: indices of the samples, in the order in which they are written.
    """
    owners, owner = np.unique(series.owner[samples], return_inverse=True)
    own = [series.values[series.begins[k] : series.begins[k + 1]] for k in owners]
    begins = np.concatenate([[0], np.cumsum([len(values) for values in own])])
    found = {
        "values": np.concatenate([np.empty(0), *own]),
        "begins": begins,
        **{name: getattr(series, name)[owners] for name in ("start", "shift", "size", "trained_until")},
        "owner": owner,
        "target": series.target[samples] - series.begins[owners][owner] + begins[owner],
        "steps": np.array([getattr(series, name) for name in _STEPS]),
    }
    return {name: array.astype(_TYPES[name]) for name, array in found.items()}


def series_of_arrays(arrays: Mapping[str, Tensor], samples: int, path: Path) -> SeriesFacts:
    """Return the series in a client's file, or raise an error if they do not fit its samples.

    Args:
        arrays: the arrays, as `series_arrays` returned them.
        samples: the number of samples, which are in the order of training, validation and test.
        path: the file, for error messages.
    """
    found = {name: tensor.numpy() for name, tensor in arrays.items()}
    wrong = next((name for name, dtype in _TYPES.items() if name not in found or found[name].dtype != dtype), None)
    wrong = wrong or next((name for name in found if name not in _TYPES or found[name].ndim != 1), None)
    if wrong is None:
        wrong = _impossible(found, samples)
    if wrong is not None:
        raise EquipoiseError(
            f"{path}: the array series.{wrong} is missing, of a wrong kind, or does not fit the others; leave out all "
            "arrays series.*, or write the file again"
        )
    step, horizon, window = found.pop("steps").tolist()
    names = tuple(f"series {k}" for k in range(len(found["start"])))
    return SeriesFacts(names, step, horizon, window=window, **found)  # type: ignore[arg-type]


def _impossible(found: Mapping[str, np.ndarray], samples: int) -> str | None:
    """Return the name of the first array that does not fit the others; None if all fit."""
    begins, owner, target, steps = (found[name] for name in ("begins", "owner", "target", "steps"))
    owners = len(found["start"])
    if len(steps) != len(_STEPS) or steps[0] < 1 or steps[1] < 1 or steps[2] < 0:
        return "steps"
    if len(begins) != owners + 1 or begins[0] != 0 or begins[-1] != len(found["values"]) or (np.diff(begins) < 0).any():
        return "begins"
    if any(len(found[name]) != owners for name in ("shift", "size", "trained_until")):
        return "start"
    if not np.isfinite(found["shift"]).all():
        return "shift"
    if not (np.isfinite(found["size"]) & (found["size"] > 0)).all():
        return "size"
    if ((found["trained_until"] < 0) | (found["trained_until"] > np.diff(begins))).any():
        return "trained_until"
    if len(owner) != samples or (samples and not (owner.min() >= 0 and owner.max() < owners)):
        return "owner"
    if len(target) != samples or ((target < begins[owner]) | (target + steps[1] > begins[owner + 1])).any():
        return "target"
    return None

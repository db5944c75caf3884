"""A client's data: arrays or tables in files, or what the user's Python function returns."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.data.client_files import first_table, read_client_and_series
from equipoise.data.federation import SPLITS, Federation, from_clients
from equipoise.data.series_arrays import series_arrays, series_of_arrays
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.sources.folder import Folder
from equipoise.errors import EquipoiseError
from equipoise.flower.deployment_plan import DeploymentPlan
from equipoise.storage.tensor_files import write_tensors

DataFunction = Callable[[Mapping[str, Any]], Any]
"""A function that gets the client's settings and returns (x, y), a torch Dataset, a dictionary of train, validation and
test, or a federation of one client."""


def client_data(
    plan: DeploymentPlan, name: str, settings: Mapping[str, Any], hook: DataFunction | None = None
) -> Federation:
    """Return the client's data as a federation of one client, checked against the section [deploy].

    Args:
        plan: what the deployment does.
        name: the client's name.
        settings: the client's settings; `data` is the folder or file, where there is no hook.
        hook: the user's function that returns the data, if there is one.
    """
    if hook is not None:
        where = f"the data of {name}"
        return _checked(plan, _returned(plan, hook(settings), name, where), where)
    path = settings.get("data")
    if not isinstance(path, str) or not path:
        raise EquipoiseError("the client's settings do not say where its data are: set data = '/path/to/folder'")
    return _checked(plan, _read(plan, Path(path).expanduser(), name, bool(settings.get("unseen"))), path)


def _returned(plan: DeploymentPlan, given: Any, name: str, where: str) -> Federation:
    """Return what the function data() of app.py returned as a federation."""
    if isinstance(given, Federation):
        if len(given) != 1:
            raise EquipoiseError(
                f"{where}: the function data() of app.py returned a federation of {len(given)} clients; it must have "
                "one client"
            )
        return replace(given, names=(name,), unseen=frozenset())
    if given is None or isinstance(given, (str, bytes, int, float)):
        raise EquipoiseError(
            f"{where}: the function data() of app.py returned {type(given).__name__}; it must return (x, y), "
            'a Dataset, or a dictionary of "train", "validation" and "test"'
        )
    return from_clients([given], names=[name], split=plan.split, seed=plan.experiment.schedule.seed)


def _read(plan: DeploymentPlan, path: Path, name: str, unseen: bool) -> Federation:
    """Return the samples of a file or folder, read as the experiment's section [data] says."""
    data, seed = plan.experiment.data, plan.experiment.schedule.seed
    found = None if data is None else data.client(path, name, seed, unseen)
    if found is not None:
        return found
    source = data.source if data else None
    own = source if isinstance(source, Folder) else Folder()
    if own.target is not None and own.features is None and first_table(path) is not None:
        raise EquipoiseError(
            f"{path} is a table, and clients must agree on the order of its columns; list them in data.features of the "
            "experiment"
        )
    samples, series = read_client_and_series(path, own.table_format)
    parts = samples if isinstance(samples, dict) else {"": samples}
    texts = [y for _, y in parts.values() if isinstance(y, np.ndarray) and y.dtype.kind == "U"]
    if texts and not own.classes:
        raise EquipoiseError(
            f"{path}: the labels are text, such as {str(texts[0][0])!r}, and a client does not know all of them; "
            "list them in data.classes of the experiment"
        )
    targets, _ = own.target_rule.read([(y, path) for _, y in parts.values()])
    pairs = {part: (x, y) for (part, (x, _)), y in zip(parts.items(), targets, strict=True)}
    federation = from_clients([pairs.get("", pairs)], names=[name], split=plan.split, seed=seed)
    return replace(federation, series=series_of_arrays(series, len(federation.y), path)) if series else federation


def _checked(plan: DeploymentPlan, federation: Federation, where: str) -> Federation:
    x, y = plan.sample()
    deploy = plan.experiment.deploy
    if federation.x.shape[1:] != x.shape[1:]:
        raise EquipoiseError(
            f"{where}: samples have the shape {list(federation.x.shape[1:])}, but the experiment says "
            f"deploy.shape = {list(x.shape[1:])}"
        )
    if federation.y.shape[1:] != y.shape[1:]:
        raise EquipoiseError(
            f"{where}: targets have the shape {list(federation.y.shape[1:])}, but the experiment says "
            f"deploy.target_shape = {list(y.shape[1:])}"
        )
    for what, array, wanted in (("inputs", federation.x, x), ("targets", federation.y, y)):
        if array.is_floating_point() != wanted.is_floating_point():
            kinds = ("whole numbers", "fractional numbers")
            raise EquipoiseError(
                f"{where}: {what} are {kinds[array.is_floating_point()]}, but the experiment says they are "
                f"{kinds[wanted.is_floating_point()]} (deploy.inputs, deploy.targets)"
            )
        if array.is_floating_point() and not torch.isfinite(array).all():
            raise EquipoiseError(f"{where}: there is NaN or infinity in the {what}; remove those samples")
    if plan.classes is not None:
        low, high = int(federation.y.min()), int(federation.y.max())
        if low < 0 or high >= plan.classes:
            raise EquipoiseError(
                f"{where}: labels go from {low} to {high}, but with deploy.outputs = {deploy.outputs} they must be "
                f"0 to {plan.classes - 1}"
            )
    if federation.series is not None:
        federation = replace(federation, series=_checked_series(plan, federation.series, where))
    chosen = plan.experiment.data
    ordered = chosen is not None and chosen.source.chronological
    # Samples come normalised; how is what a mark in an image needs to know.
    normalize = (chosen.dealing.normalize if chosen is not None else None) or federation.normalize
    return replace(federation, classes=plan.classes, chronological=ordered, normalize=normalize)


def _checked_series(plan: DeploymentPlan, series: SeriesFacts, where: str) -> SeriesFacts:
    """Return the client's series with the experiment's unit, or raise an error if it is not what all forecast."""
    deploy = plan.experiment.deploy
    if not deploy.horizon:
        return series
    for what, own, wanted in (
        ("horizon", series.horizon, deploy.horizon),
        ("step", series.step, deploy.step),
        ("unit", series.unit or deploy.unit, deploy.unit),
    ):
        if own != wanted:
            raise EquipoiseError(
                f"{where}: the {what} of its time series is {own!r}, but the experiment says deploy.{what} = {wanted!r}"
            )
    return replace(series, unit=deploy.unit)


def write_client(path: Path, federation: Federation, who: int) -> None:
    """Write one client's samples of a federation as a data file, with the series that they are windows of."""
    arrays, every = {}, [getattr(federation, split)[who] for split in SPLITS]
    for split, indices in zip(SPLITS, every, strict=True):
        if len(indices):
            arrays[f"{split}.x"], arrays[f"{split}.y"] = federation.gather(torch.from_numpy(indices))
    if federation.series is not None:
        found = series_arrays(federation.series, np.concatenate(every))
        arrays |= {f"series.{name}": torch.from_numpy(array) for name, array in found.items()}
    write_tensors(path, arrays)

"""Loading of the result of a run from its folder."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.own_modules import with_own_modules
from equipoise.data.federation import SPLIT, Federation, from_clients
from equipoise.engine.model_files import build_like, checked_module
from equipoise.errors import EquipoiseError
from equipoise.metrics import MetricLike
from equipoise.models import MODELS
from equipoise.registry import choose
from equipoise.runs.launch import reopen
from equipoise.runs.result import Result
from equipoise.runs.saved_models import SavedModels
from equipoise.runs.saved_run import SavedRun
from equipoise.settings import read
from equipoise.storage.run_folder import RunFolder, made_in_python, read_toml


def load_result(
    folder: str | Path,
    module: nn.Module | None = None,
    *,
    clients: Sequence[Any] | Mapping[Any, Any] | Federation | None = None,
    split: Sequence[float] = SPLIT,
    algorithm: Algorithm | type[Algorithm] | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
    metric: MetricLike | Sequence[MetricLike] | None = None,
    data: str | Path | None = None,
) -> Result:
    """Load the result of a finished run: its models, scores, metrics and summary.

    Args:
        folder: a folder that `Result.save`, `train(out=...)` or `equipoise run` wrote.
        module: for a run with a module of your own, a module like the one that was trained; it is copied, and its own
            weights do not matter.
        clients: the data of the run, as `train` took them. Only what looks at samples needs them: the personal models
            of kNN-Per, and `Result.similarity`.
        split: train, validation and test fractions of the run, for clients that come undivided.
        algorithm: for a run with an algorithm of your own, its class, or the algorithm with its settings; `adapt` needs
            it.
        loss: for a run with a loss of your own, the loss; `adapt` needs it.
        metric: for a run with a metric of your own, its metric or metrics; `adapt` needs them.
        data: for a run of `equipoise run`, the folder of data sets; by default the one that the run used.

    Returns:
        The result.
    """
    if not isinstance(folder, (str, Path)):
        raise EquipoiseError(f"folder is of type {type(folder).__name__}; it must be the path of a run folder")
    opened = RunFolder.open(Path(folder))
    tables = read_toml(opened.config)
    for section in ("model", "algorithm"):
        if not isinstance(tables.get(section), dict):
            raise EquipoiseError(f"{opened.config} has no section [{section}]; it is not the one that the run wrote")
    if not opened.models.exists():
        if made_in_python(tables):
            raise EquipoiseError(
                f"{folder} has no {opened.models.name}: the run is not finished, or is of an older version; continue "
                "it with train(..., out=..., resume=True), which writes the models at the end"
            )
        if module is not None:
            raise EquipoiseError(f"the run in {folder} names its model, so leave module= out")
        return reopen(opened.path, None if data is None else Path(data))[0]
    models = SavedModels(opened.models)
    found = known_algorithm(tables["algorithm"], algorithm)
    if module is not None:
        module = checked_module(module)
    elif made_in_python(tables):
        raise EquipoiseError(
            f"{folder} was trained with a module of your own; give one like it: "
            f"load_result({str(folder)!r}, module=Net())"
        )
    else:
        model = choose(MODELS, tables["model"], "model")[1]
        facts = models.facts
        with_own = partial(with_own_modules, head=facts["head"], algorithm=found)
        module = build_like(model, facts["inputs"][0], facts["outputs"], models.module, str(models.path), with_own)
    if clients is not None and not isinstance(clients, Federation):
        clients = from_clients(clients, names=_names(clients, models), split=split, seed=tables.get("seed", 0))
    return Result(SavedRun(opened, models, module, found, loss, metric, clients))


def _names(clients: Any, models: SavedModels) -> tuple[str, ...] | None:
    """Return the names of clients that come as a list; the split depends on them."""
    listed = not isinstance(clients, Mapping) and hasattr(clients, "__len__") and len(clients) == len(models.names)
    return models.names if listed else None


def known_algorithm(table: Mapping[str, Any], given: Algorithm | type[Algorithm] | None = None) -> Algorithm | None:
    """Return the algorithm of a run; None if it is not registered and not given."""
    if isinstance(given, Algorithm):
        return given
    table = {k: v for k, v in table.items() if k != "schedule"}  # adapting uses the full rates
    if given is not None:
        if not (isinstance(given, type) and issubclass(given, Algorithm)):
            raise EquipoiseError(f"algorithm is of type {type(given).__name__}; it must be an Algorithm, or its class")
        return read(given, {k: v for k, v in table.items() if k != "name"}, "algorithm")
    try:
        return choose(ALGORITHMS, table, "algorithm")[1]
    except EquipoiseError:
        return None  # an algorithm of the user's own

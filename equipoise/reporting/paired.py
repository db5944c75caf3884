"""Paired comparison: how much better each client is served by one method than by another, on the same data."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from equipoise.errors import EquipoiseError
from equipoise.reporting.comparison import SCENE, compare, problem
from equipoise.reporting.fitted_table import FittedTable
from equipoise.storage.client_scores import TRAINED, UNSEEN
from equipoise.storage.run_index import FinishedRun, higher_is_better

_CUT = "data.cut"
"""The setting that moves the origin of forecasts; its values are repetitions of one experiment, as seeds are."""
NOTE = (
    "difference: score minus that of the reference, mean over clients, ± its standard error; each client's score is "
    "that of its personal model, else of the global one, and differences are averaged over the pairs of runs with the "
    "same seed and data before; better: clients that the method serves better than the reference does"
)


@dataclass(frozen=True)
class PairedDifference:
    """The differences of one method from the reference."""

    algorithm: str
    data: str
    settings: str
    metric: str
    difference: float
    "mean over clients"
    standard_error: float | None
    "of that mean; None with a single client"
    clients: int
    pairs: int
    "pairs of runs with the same seed and data"
    better: int
    "number of clients that are served better"


def paired_differences(
    runs: Sequence[FinishedRun], references: Sequence[FinishedRun], which: str = TRAINED
) -> list[PairedDifference]:
    """Return the differences of runs from reference runs with the same seed and data.

    Runs that differ in the seed or in `data.cut` alone are repetitions: each client's difference is the mean over them.

    Args:
        runs: the runs; those that are references themselves, or that have no counterpart, are skipped.
        references: runs of one method.
        which: the clients to compare, those that trained or unseen ones.
    """
    kinds = {_method(run) for run in references}
    if len(kinds) > 1:
        raise EquipoiseError(
            "the runs of --paired are of several methods or settings; name the runs of one, which may differ in the "
            "seed and in data.cut"
        )
    by_data = {_pair_key(run): run for run in references}
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        if _method(run) not in kinds and _pair_key(run) in by_data:
            groups.setdefault(json.dumps([_method(run), _setting(run)]), []).append(run)
    if not groups:
        raise EquipoiseError(
            "no run has the same seed and data as one of --paired and another method or settings; name such runs"
        )
    rows = compare([group[0] for group in groups.values()])
    found = []
    for row, group in zip(rows, groups.values(), strict=True):
        scores = [(each.client_scores(), by_data[_pair_key(each)].client_scores()) for each in group]
        means = [*mean_differences((mine.get(which, {}), other.get(which, {})) for mine, other in scores).values()]
        if not means:
            unseen = " unseen" if which == UNSEEN else ""
            raise EquipoiseError(
                f"{group[0].path} and its counterpart of --paired have scores of no{unseen} client in common"
            )
        sign = 1 if higher_is_better(group[0].summary) else -1
        better = sum(sign * value > 0 for value in means)
        texts = row["algorithm"], row["data"], row["settings"], row["metric"]
        error = standard_error(means)
        found.append(PairedDifference(*texts, float(np.mean(means)), error, len(means), len(group), better))
    return found


def mean_differences(pairs: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, float]:
    """Return each client's score minus that in the reference, as a mean over pairs of runs, sorted by client.

    Args:
        pairs: scores by client, of a run and of its reference; clients that only one of them has do not count.
    """
    differences: dict[str, list[float]] = {}
    for mine, other in pairs:
        for client in mine.keys() & other.keys():
            differences.setdefault(client, []).append(mine[client] - other[client])
    return {client: float(np.mean(differences[client])) for client in sorted(differences)}


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def paired_table(found: Sequence[PairedDifference], reference: str) -> FittedTable:
    """Return the differences as a table for the terminal.

    Args:
        found: the differences.
        reference: name of the reference.
    """
    head, body = paired_cells(found)
    words = ("algorithm", "data", "settings", "metric")
    note = f"reference: {reference}; {NOTE}"
    return FittedTable(head, body, words, ("better", "pairs"), below="settings", title="Paired", note=note)


def paired_cells(found: Sequence[PairedDifference]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table; accuracies are in %."""
    named = [key for key in ("data", "settings") if len({getattr(each, key) for each in found}) > 1]
    body = []
    for each in found:
        scale = 100 if each.metric == "accuracy" else 1
        error = "" if each.standard_error is None else f" ± {scale * each.standard_error:.2g}"
        cells = [each.algorithm, *(getattr(each, key) for key in named), each.metric + " %" * (scale == 100)]
        counts = [str(each.clients), str(each.pairs), f"{each.better} of {each.clients}"]
        body.append([*cells, f"{scale * each.difference:+.4g}{error}", *counts])
    return ["algorithm", *named, "metric", "difference", "clients", "pairs", "better"], body


def paired_rows(found: Sequence[PairedDifference]) -> list[dict[str, Any]]:
    """Return the differences as dictionaries, for CSV and JSON."""
    return [asdict(each) for each in found]


def _method(run: FinishedRun) -> str:
    own = {key: value for key, value in run.config.items() if key != "seed" and not key.startswith(SCENE)}
    return json.dumps(own, sort_keys=True)


def _setting(run: FinishedRun) -> str:
    """Return the data and disturbances of a run, of which only the cut may vary."""
    scene = {key: value for key, value in run.config.items() if key.startswith(SCENE) and key != _CUT}
    return json.dumps([scene, run.summary["metric"]], sort_keys=True)


def _pair_key(run: FinishedRun) -> str:
    return json.dumps([problem(run), run.summary["seed"], run.drawn])

"""Recording of finished runs: from a run folder to the line that is kept of it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.config.defaults import default_settings
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files
from equipoise.storage.client_scores import ClientScores, read_client_scores
from equipoise.storage.model_kinds import KINDS, RIGHT, SUCCESS, UNMARKED
from equipoise.storage.result_records import TRAINING_SECONDS, Record
from equipoise.storage.run_folder import (
    ASIDE,
    CALLBACKS,
    FAILED,
    WRITTEN,
    RunFolder,
    flatten,
    made_in_python,
    read_settings,
    read_toml,
)
from equipoise.storage.run_index import higher_is_better
from equipoise.storage.sweep_choices import rejected_runs

_DIGITS = 6
_MOST_POINTS = 25  # of a curve
_MOST_ITEMS = 200  # of a list in a summary
_NOT_RESULTS = ("seed", f"{WRITTEN}.", *ASIDE)
_NOT_KEPT = ("algorithm", "seed", "samples_per_second", "peak_memory_mb")
"""Figures of a summary that are kept elsewhere in a record, or that say something of the machine only."""
_COUNTS = ("round", "clients", "left_out", "bytes_up", "bytes_down", "gradient_samples")
"""Figures of a round that the summary has for the whole run."""
_OF_SCORES = ("loss", "loss_variance", "worst_decile", "best_decile", SUCCESS, UNMARKED, RIGHT)
_OF_METRICS = ("{}", "{}_std", "{}_pooled", "{}_clients", "validation_{}")


def kept_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the flat settings of a run that affect its results, without the seed, sorted by name."""
    return {key: settings[key] for key in sorted(settings) if not key.startswith(_NOT_RESULTS)}


def settings_digest(experiment: Experiment) -> str:
    """Return a digest of the settings that differ from their defaults; new settings of later versions keep it."""
    usual = default_settings(experiment)
    settings = kept_settings(flatten(experiment.tables()))
    return _digest({key: value for key, value in settings.items() if key not in usual or usual[key] != value})


def _digest(settings: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()


def record_run(path: Path, scale: str = "", trial: bool | None = None) -> Record:
    """Return what is kept of a finished or failed run.

    Args:
        path: the run folder.
        scale: the scale of its sweep, if known.
        trial: whether it only served to choose values; by default what the sweep wrote about it.
    """
    folder = RunFolder.open(path)
    tables = read_toml(folder.config)
    if made_in_python(tables):
        raise EquipoiseError(f"{path} was made from Python, so no file describes it; only runs of files are recorded")
    written = read_settings(folder.config)
    settings = kept_settings(written)
    versions = {name: str(written[key]) for name in _VERSIONS if (key := f"{WRITTEN}.{name}") in written}
    if trial is None:
        trial = path.absolute().name in rejected_runs(path.absolute().parent)
    digest, seed = _digest_of(tables, path, settings), int(written.get("seed", 0))
    record = Record(digest, seed, settings, versions=versions, scale=scale, trial=trial)
    if not folder.summary.exists() and (path / FAILED).exists():
        return replace(record, failed=str(atomic_files.read_json(path / FAILED).get("why", "it failed")))
    summary = folder.read_summary()
    clients = {} if trial else _clients(path)
    return replace(record, summary=_summary(summary), curves=_curves(folder, summary), clients=clients)


def _clients(path: Path) -> ClientScores:
    """Return the scores of single clients, for paired comparisons; a run from which they are missing has none."""
    with suppress(EquipoiseError):
        found: ClientScores = _rounded(read_client_scores(path))
        return found
    return {}


_VERSIONS = ("equipoise", "torch", "python")


def _digest_of(tables: dict[str, Any], path: Path, settings: Mapping[str, Any]) -> str:
    """Return the digest of a configuration; if its own code is gone or it is of another version, of all settings."""
    without = {key: value for key, value in tables.items() if key != CALLBACKS}
    for each in (tables, without):
        try:
            return settings_digest(Experiment.parse(each, needs=("algorithm",), folders=[path]))
        except EquipoiseError:
            continue
    return _digest(settings)


def _rounded(value: Any) -> Any:
    """Return a value with numbers rounded to a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a summary that are kept."""
    metrics = summary.get("metrics", {})
    names = list(metrics) or [summary["metric"]]
    fields = {*_OF_SCORES, *(form.format(name) for name in names for form in _OF_METRICS)}

    def pruned(key: str, value: Any) -> Any:
        if key == "unseen":
            return {inner: pruned(inner, each) for inner, each in value.items()}
        return {field: each for field, each in value.items() if field in fields} if key in KINDS else value

    found = {key: pruned(key, value) for key, value in summary.items() if key not in _NOT_KEPT}
    if len(names) == 1:
        found.pop("metrics", None)
    found = {key: value for key, value in found.items() if not (isinstance(value, list) and len(value) > _MOST_ITEMS)}
    rounded: dict[str, Any] = _rounded(found)
    return rounded


def _curves(folder: RunFolder, summary: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the rounds of evaluations and the figures there: scores of the models, and diagnostics of any name."""
    metric = summary["metric"]
    lines = [line for line in folder.read_metrics() if any(kind in line for kind in KINDS)]
    lines = _thinned(lines, metric, higher_is_better(summary))
    spent = {entry["round"]: entry["train"] for entry in folder.read(folder.timings) if "train" in entry}
    found: dict[str, list[Any]] = {"round": [line["round"] for line in lines]}
    points = []
    for line in lines:
        point = _numbers(line, metric)
        if spent:
            point[TRAINING_SECONDS] = sum(seconds for number, seconds in spent.items() if number <= line["round"])
        points.append(point)
    for name in dict.fromkeys(name for point in points for name in point):
        values = [_rounded(point.get(name)) for point in points]
        if name == "lr" and len(set(values)) == 1:
            continue  # it is a setting
        found[name] = values
    return found if lines else {}


def _numbers(line: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the figures of a round by dotted names."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if key in KINDS:
            wanted = (metric, "loss", f"validation_{metric}")
            found |= {f"{key}.{field}": value[field] for field in wanted if field in value}
        elif key not in _COUNTS:
            each = flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
            found |= {name: x for name, x in each.items() if isinstance(x, (int, float)) and not isinstance(x, bool)}
    return found


def _thinned(lines: Sequence[dict[str, Any]], metric: str, higher: bool) -> list[dict[str, Any]]:
    """Return at most some evaluations, among them the last one and those that were best on validation samples."""
    if len(lines) <= _MOST_POINTS:
        return list(lines)
    last = len(lines) - 1
    wanted = {round(last * k / (_MOST_POINTS - 1)) for k in range(_MOST_POINTS)}
    field = f"validation_{metric}"
    for kind in KINDS:
        scored = [i for i, line in enumerate(lines) if line.get(kind, {}).get(field) is not None]
        if scored:
            wanted.add((max if higher else min)(scored, key=lambda i: lines[i][kind][field]))
    return [lines[i] for i in sorted(wanted)]

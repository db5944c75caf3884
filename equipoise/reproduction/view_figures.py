"""Figures of recorded results: the cells of a view's table, and the curves of its plot."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.reporting.paired import mean_differences, standard_error
from equipoise.reproduction.result_tables import markdown_table, spread
from equipoise.reproduction.result_views import (
    MISSING,
    VIEWS,
    Figure,
    Repetition,
    View,
    check_repetitions,
    lines_of,
    records_of,
    repetition,
    select,
    short_setting,
    text_of,
)
from equipoise.settings import read
from equipoise.storage.client_scores import TRAINED, UNSEEN
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.result_records import Record
from equipoise.storage.run_index import higher_is_better

_SHORT = {
    "": "{metric}",
    "spread": "{metric}_std",
    "pooled": "{metric}_pooled",
    "worst": "worst_decile",
    "best": "best_decile",
    "validation": "validation_{metric}",
}
"""Short names of scores, and the figures of the summary that they stand for."""
_OF_SCALE = frozenset(form.format(metric="accuracy") for form in _SHORT.values())
"""Figures that are shown in % where the metric is the accuracy."""
_MAIN = "score"
"""The personal models' score, or that of the global model of a method that has no personal ones."""
_OF_CLIENTS = (_MAIN, "unseen")
"""Figures that records have for single clients."""
_CONTROL = "control"
"""The cell of the control itself in a column of differences."""
_DIVERGED, _WITHOUT = "diverged", "without"
Curve = tuple[str, list[tuple[float, list[float]]]]
"""A name, and the values of all seeds at each round, or at the megabytes sent by then."""


def read_figure(written: Any, where: str) -> Figure:
    """Return a figure; a plain name stands for the figure of that name."""
    return Figure(figure=written) if isinstance(written, str) else read(Figure, written, where)


def field_of(figure: str, metric: str) -> str:
    """Return the name in summary.json of a score: `personal` and `unseen.personal.worst` are short for others."""
    group, kind = ("unseen.", figure[7:] or "personal") if (figure + ".").startswith("unseen.") else ("", figure)
    head, _, tail = kind.partition(".")
    if head in (*KINDS, _MAIN) and tail in _SHORT:
        kind = f"{head}.{_SHORT[tail].format(metric=metric)}"
    return group + kind


def _field_in(record: Record, figure: str) -> str:
    """Return the name of a figure in the summary of a run, which may have no personal models."""
    field = field_of(figure, record.summary["metric"])
    if figure == "unseen" and "personal" not in record.summary.get("unseen", {}):
        return field.replace("unseen.personal", "unseen.global")
    kind = "personal" if "personal" in record.summary else "global"
    return f"{kind}.{field.removeprefix(f'{_MAIN}.')}" if field.startswith(f"{_MAIN}.") else field


def _look_up(table: Mapping[str, Any], field: str) -> Any:
    """Return a value of nested tables by its dotted name; keys may have dots themselves, such as scores.

    The values of a list are numbered from 1, as the steps of a forecast are.
    """
    if field in table:
        return table[field]
    head, _, number = field.rpartition(".")
    if isinstance(values := table.get(head), list):
        return values[int(number) - 1] if number.isdecimal() and 0 < int(number) <= len(values) else None
    heads = [key for key, value in table.items() if field.startswith(f"{key}.") and isinstance(value, Mapping)]
    return next((found for key in heads if (found := _look_up(table[key], field[len(key) + 1 :])) is not None), None)


def value_of(record: Record, figure: Figure) -> float | None:
    """Return a figure of a run, at the end or at a round; None if it has none, failed or diverged."""
    if record.failed:
        return None
    field = _field_in(record, figure.figure)
    at = _look_up(record.summary, field) if figure.round is None else _at_round(record, field, figure.round)
    if at is None or isinstance(at, (str, list, Mapping)):
        return None
    percent = record.summary["metric"] == "accuracy" and field.rpartition(".")[2] in _OF_SCALE
    return 100 * float(at) if percent else float(at)


def _at_round(record: Record, field: str, number: int) -> Any:
    points = zip(record.curves.get("round", ()), record.curves.get(field, ()), strict=False)
    return next((value for at, value in points if at == number), None)


def _number(values: Sequence[float], figure: Figure, percent: bool, signed: bool = False) -> str:
    values = [figure.factor * value for value in values]
    if figure.digits == 0 and not signed and len(set(values)) == 1:  # a count that is the same in every run
        return f"{values[0]:,.0f}"
    if figure.digits is None and not percent:
        text = f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")
    else:
        text = spread(values, 2 if figure.digits is None else figure.digits)
    return f"+{text}" if signed and mean(values) > 0 else text


def _values(records: Sequence[Record], figure: Figure, repeats: Sequence[str]) -> dict[Repetition, float]:
    """Return a figure of each run that has it, by seed and repetition."""
    found: dict[Repetition, float] = {}
    for record in records:
        if (value := value_of(record, figure)) is not None:
            key = repetition(record, repeats)
            found[key] = _extreme(found.get(key, value), value, figure)
    return found


def _extreme(one: float, other: float, figure: Figure) -> float:
    """Return the figure that counts of two with the same seed: where only one is allowed, they are of one run."""
    if figure.extreme is None:
        return other
    return (max if (figure.extreme == "largest") == (figure.factor >= 0) else min)(one, other)


def _cell(records: Sequence[Record], figure: Figure, controls: Sequence[Record], repeats: Sequence[str]) -> str:
    """Return a cell as text: the mean over seeds, or over the differences from the controls with the same seeds."""
    if not records:
        return MISSING
    if figure.figure == "seeds":
        return str(len({record.seed for record in records if _has_results(record)}))
    if any(figure.figure in record.settings for record in records):
        return ", ".join(dict.fromkeys(text_of(record.settings.get(figure.figure)) for record in records))
    if figure.against and list(controls) == list(records):
        return _CONTROL
    if figure.over != "seeds":
        return _over_clients(records, figure, controls, repeats)
    found = _values(records, figure, repeats)
    notes = _lost(records, figure)
    if not found:
        return next((reason for reason in notes if reason != _WITHOUT), MISSING)
    said = [f"{number} {reason}" for reason, number in notes.items()]
    if figure.against:
        control = _values(controls, figure, repeats)
        pairs = {key: value - control[key] for key, value in found.items() if key in control}
        if not pairs:
            return MISSING
        if len(pairs) < len(found):
            said.append(f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}")
        found = pairs
    text = _number(list(found.values()), figure, _is_percent(records, figure), bool(figure.against))
    return f"{text} ({', '.join(said)})" if said else text


def _over_clients(records: Sequence[Record], figure: Figure, controls: Sequence[Record], repeats: Sequence[str]) -> str:
    """Return the mean difference over clients with its standard error, or the number of clients served better."""
    group = UNSEEN if figure.figure == "unseen" else TRAINED
    others = {repetition(record, repeats): record for record in controls}
    pairs = [(record, others[key]) for record in records if (key := repetition(record, repeats)) in others]
    differences = mean_differences((mine.clients.get(group, {}), other.clients.get(group, {})) for mine, other in pairs)
    if not differences:
        return MISSING
    if figure.over == "better":
        sign = 1 if higher_is_better(records[0].summary) else -1
        return f"{sum(sign * value > 0 for value in differences.values())} of {len(differences)}"
    percent = records[0].summary["metric"] == "accuracy"
    values = [figure.factor * (100 if percent else 1) * value for value in differences.values()]
    form = f"+.{figure.digits}f" if figure.digits is not None else "+.2f" if percent else "+.3g"
    error = standard_error(values)
    text = f"{mean(values):{form}}" + (f" ± {error:{form[1:]}}" if error is not None else "")
    notes = [f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"] if len(pairs) < len(records) else []
    return f"{text} ({', '.join(notes)})" if notes else text


def _lost(records: Sequence[Record], figure: Figure) -> dict[str, int]:
    """Return how many runs have no value of a figure, by the reason."""
    lost = [record for record in records if value_of(record, figure) is None]
    reasons = ["failed" if record.failed else _DIVERGED if _is_empty(record, figure) else _WITHOUT for record in lost]
    return {reason: reasons.count(reason) for reason in ("failed", _DIVERGED, _WITHOUT) if reason in reasons}


def _is_empty(record: Record, figure: Figure) -> bool:
    """Tell whether a run has a figure that is no number, as scores of models that diverged are."""
    if figure.round is not None:
        return False
    group, _, last = _field_in(record, figure.figure).rpartition(".")
    table = _look_up(record.summary, group) if group else record.summary
    return isinstance(table, Mapping) and last in table and table[last] is None


def _has_results(record: Record) -> bool:
    """Tell whether a run has the score of any model."""
    metric = record.summary.get("metric")
    return any(record.summary.get(kind, {}).get(metric) is not None for kind in KINDS)


def _is_percent(records: Sequence[Record], figure: Figure) -> bool:
    first = next((record for record in records if not record.failed), None)
    if first is None or first.summary["metric"] != "accuracy":
        return False
    return field_of(figure.figure, "accuracy").rpartition(".")[2] in _OF_SCALE


def table_of(view: View, folder: Path, name: str) -> str:
    """Return a view as a Markdown table.

    Args:
        view: the view.
        folder: the folder of its records.
        name: its name, for error messages.
    """
    records = records_of(view, folder)
    where = f"{folder / VIEWS}: {name}"
    if not records:
        raise EquipoiseError(f"{where}: no recorded run has these settings: {view.where}")
    figures = [read_figure(each, where) for each in view.figures]
    for figure in figures:
        if figure.over == "clients" and (not figure.against or figure.figure not in _OF_CLIENTS or figure.round):
            raise EquipoiseError(
                f"{where}: over = 'clients' needs against, and a figure of {' or '.join(_OF_CLIENTS)} without round"
            )
    heads, rows = lines_of(view.rows, records, where)
    _, columns = lines_of(view.columns, records, where) if view.columns else ([], [((), {})])
    head = [*heads, *(_heading(column, figure, len(figures)) for column, _ in columns for figure in figures)]
    body = []
    for labels, row in rows:
        cells = []
        for _, column in columns:
            for figure in figures:
                mine = select(records, row, column, figure.where)
                controls = _controls(records, {**row, **column, **figure.where}, figure.against) if mine else []
                if figure.extreme is None:
                    check_repetitions(mine, view.repeats, where)
                check_repetitions(controls, view.repeats, where)
                cells.append(_cell(mine, figure, controls, view.repeats))
        if any(cell != MISSING for cell in cells):
            body.append([*labels, *cells])
    return markdown_table(head, body)


def _controls(records: Sequence[Record], where: Mapping[str, Any], against: Mapping[str, Any]) -> list[Record]:
    """Return the runs of a control; settings that only another method has do not count."""
    if not against:
        return []
    renamed = tuple(key.removesuffix("name") for key in against if key.endswith(".name"))
    return select(records, {k: v for k, v in where.items() if not (renamed and k.startswith(renamed))}, against)


def _heading(column: tuple[str, ...], figure: Figure, count: int) -> str:
    own = figure.label or short_setting(figure.figure)
    group = " ".join(column)
    if not group:
        return own
    return group if count == 1 and not figure.label else f"{group}: {own}"


def _megabytes_a_round(records: Sequence[Record]) -> float:
    """Return what clients and server send each other in a round, as the mean of some runs; 0 without curves."""
    sent = [(r.summary["bytes_up"] + r.summary["bytes_down"]) / r.curves["round"][-1] for r in records if r.curves]
    return mean(sent) / 1e6 if sent else 0.0


def curves_of(view: View, folder: Path, name: str) -> list[Curve]:
    """Return the curves of a view: a name each, and the values of all seeds at every round that all have.

    With `horizontal = "megabytes"`, rounds are multiplied by what is sent in one of them.

    Args:
        view: the view; its figures are those of curves, such as `personal` or `diagnostics.dual_norm`.
        folder: the folder of its records.
        name: its name, for error messages.
    """
    records = [record for record in records_of(view, folder) if not record.failed]
    where = f"{folder / VIEWS}: {name}"
    if not records:
        raise EquipoiseError(f"{where}: no recorded run has these settings: {view.where}")
    found = []
    figures = [read_figure(each, where) for each in view.figures]
    rows = lines_of(view.rows, records, where)[1]
    columns = lines_of(view.columns, records, where)[1] if view.columns else [((), {})]
    for (row_labels, row), (column_labels, column) in product(rows, columns):
        for figure in figures:
            some = select(records, row, column, figure.where)
            check_repetitions(some, view.repeats, where)
            points: dict[int, list[float]] = {}
            for record in some:
                field = _field_in(record, figure.figure)
                factor = figure.factor * (100 if _is_percent([record], figure) else 1)
                for number, value in zip(record.curves.get("round", ()), record.curves.get(field, ()), strict=False):
                    if value is not None:
                        points.setdefault(number, []).append(factor * value)
            unit: float = 1 if view.horizontal == "round" else _megabytes_a_round(some)
            complete = [(unit * at, values) for at, values in sorted(points.items()) if len(values) == len(some)]
            if complete:
                own = figure.label or (figure.figure if len(view.figures) > 1 else "")
                found.append((" ".join(filter(None, (*row_labels, *column_labels, own))), complete))
    if not found:
        raise EquipoiseError(f"{where}: the recorded runs have no curves of {', '.join(map(str, view.figures))}")
    return found

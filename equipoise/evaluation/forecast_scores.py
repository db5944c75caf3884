"""The forecasts of a finished run, scored in the data's own unit beside those that need no model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from equipoise.data.federation import Federation
from equipoise.data.series_facts import Naive, SeriesFacts
from equipoise.evaluation.conformal import LEVEL
from equipoise.evaluation.figures import as_json
from equipoise.evaluation.forecast_errors import FIGURES, ForecastErrors, interval_figures
from equipoise.evaluation.forecaster import Forecaster

NAIVE: tuple[Naive, ...] = get_args(Naive)
_INTERVALS = ("coverage", "width")


def series_of(federation: Federation) -> SeriesFacts:
    """Return the time series of a federation, which must be one of forecasts."""
    assert federation.series is not None
    return federation.series


@dataclass(frozen=True)
class ForecastRow:
    """The scores of one model, or of one naive forecast, on the test samples of one client."""

    client: str
    model: str
    "personal or global, or the kind of naive forecast"
    unseen: bool
    counted: bool
    "whether the client counts in figures over clients"
    errors: ForecastErrors
    intervals: dict[str, float | None] = field(default_factory=dict)


class ClientForecastScores:
    """Scores the forecasts of one client's test samples."""

    def __init__(self, federation: Federation, who: int):
        """Collect what came of the forecasts, and the naive ones.

        Args:
            federation: the clients and their data.
            who: the client.
        """
        self.series, self.samples = series_of(federation), federation.test[who]
        self.owner = self.series.owner[self.samples][:, None]
        self.actual = self.own(federation.y.numpy()[self.samples].reshape(len(self.samples), -1))
        self.naive = {kind: self.own(self.series.naive(kind, self.samples)) for kind in NAIVE}
        errors = {owner: self.series.naive_error(owner) for owner in np.unique(self.owner).tolist()}
        self.naive_error = np.array([errors[owner] for owner in self.owner[:, 0].tolist()])

    def own(self, scaled: np.ndarray) -> np.ndarray:
        """Return values in the data's own unit, in double precision."""
        return np.asarray(self.series.unscaled(scaled.astype(np.float64), self.owner))

    def of_naive(self, kind: Naive) -> ForecastErrors:
        """Return the errors of a naive forecast, where there is one."""
        return ForecastErrors.of(self.naive[kind], self.actual, self.naive["weekly"], self.naive_error)

    def of_model(self, forecaster: Forecaster) -> tuple[ForecastErrors, dict[str, float | None]]:
        """Return the errors of a model, and the figures of its intervals."""
        found = forecaster.of(self.samples)
        point, lower, upper = (self.own(each) for each in (found.point, found.lower, found.upper))
        point = np.where(
            np.isnan(point), np.inf, point
        )  # a model that diverged; naive ones are NaN where there is none
        with np.errstate(invalid="ignore"):
            errors = ForecastErrors.of(point, self.actual, self.naive["weekly"], self.naive_error)
        return errors, interval_figures(lower, upper, self.actual)


@dataclass(frozen=True)
class ForecastScores:
    """The scores of all clients' forecasts, one row per client and model."""

    rows: Sequence[ForecastRow]
    unit: str
    step: int
    horizon: int

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of a table of these scores."""
        steps = (f"mae_{step}" for step in range(1, self.horizon + 1))
        return ["client", "model", "unseen", "values", *FIGURES, "skill_values", *_INTERVALS, *steps]

    def table(self) -> Iterator[list[Any]]:
        """Yield one line of cells per row; a figure that the samples do not define is None."""
        for row in self.rows:
            errors, intervals = row.errors, [row.intervals.get(name) for name in _INTERVALS]
            first = [row.client, row.model, str(row.unseen).lower(), int(errors.values.sum())]
            yield [*first, *errors.figures().values(), errors.compared_values, *intervals, *errors.steps()]

    def summary(self) -> dict[str, Any]:
        """Return figures over clients for each model: means, in which every client counts once, and pooled ones."""
        facts = {"unit": self.unit, "step": self.step, "horizon": self.horizon, "level": LEVEL}
        unseen = self._figures(unseen=True)
        return {**facts, **self._figures(unseen=False), **({"unseen": unseen} if unseen else {})}

    def _figures(self, unseen: bool) -> dict[str, dict[str, Any]]:
        models: dict[str, list[ForecastRow]] = {}
        for row in self.rows:
            if row.counted and row.unseen == unseen:
                models.setdefault(row.model, []).append(row)
        return {model: as_json(_over_clients(rows)) for model, rows in models.items()}


def _over_clients(rows: Sequence[ForecastRow]) -> dict[str, Any]:
    total = rows[0].errors
    for row in rows[1:]:
        total = total + row.errors
    each = [row.errors.figures() for row in rows]
    found: dict[str, Any] = {}
    for name in FIGURES:
        found |= _mean(name, [figures[name] for figures in each])
    found |= {f"{name}_pooled": _number(value) for name, value in total.figures().items()}
    for name in _INTERVALS if rows[0].intervals else ():
        found |= _mean(name, [row.intervals[name] for row in rows])
    steps = [row.errors.steps() for row in rows]
    found["steps"] = [_mean("", [one[step] for one in steps])[""] for step in range(len(steps[0]))]
    return found


def _mean(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean over the clients for which a figure is defined, and their number if it is not all."""
    defined = [value for value in values if value is not None]
    mean = float(np.mean(defined)) if defined else np.nan
    return {name: mean, **({f"{name}_clients": len(defined)} if len(defined) < len(values) else {})}


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def score_client(
    federation: Federation, who: int, forecasters: Mapping[str, Forecaster], malicious: Collection[str]
) -> Iterator[ForecastRow]:
    """Yield the rows of a client's models and of the naive forecasts; none if the client has no test samples.

    Args:
        federation: the clients and their data.
        who: the client.
        forecasters: its models, by kind.
        malicious: names of the clients that do not count in figures.
    """
    if not len(federation.test[who]):
        return
    name, scores = federation.names[who], ClientForecastScores(federation, who)
    marks = name in federation.unseen, name not in malicious
    for kind, forecaster in forecasters.items():
        yield ForecastRow(name, kind, *marks, *scores.of_model(forecaster))
    for naive in NAIVE:
        yield ForecastRow(name, naive, *marks, scores.of_naive(naive))

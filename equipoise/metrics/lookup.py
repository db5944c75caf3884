"""Metrics by name: those of the package, of installed plug-ins, and of the user's own code."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.metrics.base import AnyMetric, Metric, MetricFunction, SetMetric
from equipoise.metrics.classification import CLASSIFICATION
from equipoise.metrics.quantile import NOT_FIRST, QUANTILE
from equipoise.metrics.regression import REGRESSION
from equipoise.registry import load_object
from equipoise.settings import nearest

METRICS: dict[str, AnyMetric] = {metric.name: metric for metric in (*CLASSIFICATION, *REGRESSION, *QUANTILE)}

MetricLike = str | Metric | MetricFunction
"""A metric as users name it: by name, as a `Metric`, or as a function of outputs and targets."""

_PLUGINS = "equipoise.metrics"
_SETTING = "metrics"
_FIGURES = ("loss", "worst_decile", "best_decile", "gini", "spread", "worst", "best", "variance", "pooled", "clients")
_SUFFIXES = ("_std", "_variance", "_pooled", "_clients")
_ERRORS = ("error", "loss", "mae", "mse", "perplexity", "distance")


def find_metric(given: Any) -> AnyMetric:
    """Return a metric.

    Args:
        given: its name, "package.module:name" or "file.py:name" of the user's own code, a `Metric`, or a function.
    """
    if isinstance(given, Metric | SetMetric):
        return given
    if isinstance(given, str):
        return _by_name(given)
    if callable(given):
        return _of_function(given)
    raise EquipoiseError(
        f"a metric is {given!r}, of type {type(given).__name__}; it must be a name, an equipoise.Metric, or a function "
        "of outputs and targets"
    )


def find_metrics(given: MetricLike | Sequence[MetricLike]) -> tuple[AnyMetric, ...]:
    """Return one or several metrics, after checking that their names can stand beside each other.

    Args:
        given: a metric, or a sequence of metrics.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    metrics = tuple(map(find_metric, given if several else (given,)))  # type: ignore[arg-type]
    names = [metric.name for metric in metrics]
    taken = {*_FIGURES, *(name + suffix for name in names for suffix in _SUFFIXES)}
    for number, metric in enumerate(metrics):
        if metric.name in names[:number]:
            raise EquipoiseError(f"two metrics are named {metric.name!r}; every metric needs a different name")
        if metric.name in taken:
            raise EquipoiseError(
                f"a metric cannot be named {metric.name!r}, which is the name of another figure; give it another name"
            )
    if metrics and isinstance(metrics[0], SetMetric) and metrics[0].form != "number":
        raise EquipoiseError(
            f"{names[0]!r} is not one number, so it cannot be the first metric, which decides what is better; put "
            "another before it"
        )
    if metrics and isinstance(metrics[0], Metric) and metrics[0].name in NOT_FIRST:
        raise EquipoiseError(
            f"{names[0]!r} alone does not tell which model is better, so it cannot be the first metric, which decides; "
            "put 'pinball' before it"
        )
    return metrics


def _by_name(name: str) -> AnyMetric:
    if name in METRICS:
        return METRICS[name]
    if ":" in name:
        return _own(name, load_object(name, _SETTING))
    plugins = {point.name: point for point in entry_points(group=_PLUGINS)}
    if name not in plugins:
        raise EquipoiseError(
            f"unknown metric {name!r} (own ones are 'package.module:function' or 'file.py:function')"
            f"{nearest(name, [*METRICS, *plugins])}"
        )
    try:
        found = plugins[name].load()
    except Exception as error:  # whatever the plug-in raises when it is imported
        raise EquipoiseError(
            f"the metric {name!r} is a plug-in that cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return _own(name, found)


def _own(name: str, found: Any) -> AnyMetric:
    if isinstance(found, Metric | SetMetric):
        return found
    if callable(found) and not isinstance(found, type):
        return _of_function(found)
    raise EquipoiseError(
        f"{_SETTING} names {name!r}, of type {type(found).__name__}; it must be a function of outputs and targets, or "
        "an equipoise.Metric"
    )


def _of_function(function: Callable[..., Any]) -> Metric:
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise EquipoiseError(
            "a metric that is a function without a name needs one: equipoise.Metric(name, function, higher_is_better)"
        )
    if any(word in name.lower() for word in _ERRORS):
        raise EquipoiseError(
            f"it is not clear whether higher values of the metric {name!r} are better; say it: "
            f"equipoise.Metric({name!r}, {name}, higher_is_better=False)"
        )
    return Metric(name, function)

"""Metrics: scores of a model on samples."""

from equipoise.metrics.base import AnyMetric, Metric, SetMetric
from equipoise.metrics.collection import MetricCollection
from equipoise.metrics.fitting import fitting_metrics
from equipoise.metrics.lookup import METRICS, MetricLike, find_metrics
from equipoise.metrics.predictions import MOST_OUTPUTS, PredictionRecord, Predictions, keep

__all__ = [
    "METRICS",
    "MOST_OUTPUTS",
    "AnyMetric",
    "Metric",
    "MetricCollection",
    "MetricLike",
    "PredictionRecord",
    "Predictions",
    "SetMetric",
    "find_metrics",
    "fitting_metrics",
    "keep",
]

"""Metrics: scores of a model on samples."""

from equipoise.metrics.base import METRICS, Metric, fitting_metric

__all__ = ["METRICS", "Metric", "fitting_metric"]

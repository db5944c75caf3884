"""The metrics of a task: the first one decides, and the others are reported beside it."""

from dataclasses import dataclass
from functools import cached_property

from equipoise.metrics.base import AnyMetric, Metric, SetMetric
from equipoise.metrics.predictions import Need


@dataclass(frozen=True)
class MetricCollection:
    """Several metrics, of which the first decides selection and is shown first."""

    metrics: tuple[AnyMetric, ...]
    outputs: int
    "number of the model's outputs, which are classes where targets are classes"

    @property
    def first(self) -> AnyMetric:
        """Return the metric that decides."""
        return self.metrics[0]

    @cached_property
    def means(self) -> tuple[Metric, ...]:
        """Return the metrics that are means over samples."""
        return tuple(metric for metric in self.metrics if isinstance(metric, Metric))

    @cached_property
    def others(self) -> tuple[AnyMetric, ...]:
        """Return the metrics after the first that are one number."""
        return tuple(m for m in self.metrics[1:] if isinstance(m, Metric) or m.form == "number")

    @cached_property
    def arrays(self) -> tuple[SetMetric, ...]:
        """Return the metrics that are not one number: one per class, or one per pair of classes."""
        return tuple(m for m in self.metrics if isinstance(m, SetMetric) and m.form != "number")

    @cached_property
    def per_class(self) -> tuple[SetMetric, ...]:
        """Return the metrics that are one number per class."""
        return tuple(metric for metric in self.arrays if metric.form == "class")

    @cached_property
    def needs(self) -> frozenset[Need]:
        """Return what must be kept of predictions."""
        return frozenset(metric.need for metric in self.metrics if isinstance(metric, SetMetric))

    @cached_property
    def more_columns(self) -> tuple[str, ...]:
        """Return the columns of a client's scores that follow loss and first metric."""
        per_class = (f"test_{metric.name}_{c}" for metric in self.per_class for c in range(self.outputs))
        return (*(f"test_{metric.name}" for metric in self.others), *per_class)

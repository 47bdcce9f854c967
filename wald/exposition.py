"""Counters, gauges and histograms, and the text in which Prometheus reads them (text format 0.0.4).

A program counts in plain numbers, and makes :class:`Metric` objects of them when it is asked for the text. The names
follow Prometheus: the prefix ``wald_``, base units (seconds, bytes), ``_total`` for a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import prometheus_client

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How often a value was in each of a few ranges; an observation takes about 0.2 µs.

    Args:
        bounds: the largest value of each range but the last, ascending.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        """The same as it is now, for another thread."""
        copied = Histogram(*self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied

    def to_json(self) -> dict[str, object]:
        """An object for JSON."""
        return {"bounds": self.bounds, "counts": self.counts, "sum": self.sum}


Samples = dict[tuple[str, ...], float | Histogram]
"""The values of a metric by the values of its labels, in their order."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and its values at this moment.

    Attributes:
        name: as it is exported; that of a counter ends in ``_total``.
        labels: the names of its labels.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    samples: Samples = field(default_factory=dict)


def counter(name: str, meaning: str, value: float) -> Metric:
    """A counter without labels."""
    return Metric(name, "counter", meaning, (), {(): value})


def gauge(name: str, meaning: str, value: float) -> Metric:
    """A gauge without labels."""
    return Metric(name, "gauge", meaning, (), {(): value})


def histogram(name: str, meaning: str, value: Histogram) -> Metric:
    """A histogram without labels."""
    return Metric(name, "histogram", meaning, (), {(): value})


def render(metrics: Iterable[Metric]) -> bytes:
    """The text of ``metrics``; one without samples is left out."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collected([_family(each) for each in metrics if each.samples]))
    return prometheus_client.generate_latest(registry)


class _Collected:
    """What the library asks for its families."""

    def __init__(self, families: list[prometheus_client.Metric]) -> None:
        self.collect = families.__iter__


def _family(metric: Metric) -> prometheus_client.Metric:
    import prometheus_client

    family = prometheus_client.Metric(metric.name.removesuffix("_total"), metric.meaning, metric.type)
    for values, value in metric.samples.items():
        # The name of a group may be any bytes that a file name may have.
        texts = (text.encode(errors="backslashreplace").decode() for text in values)
        labels = dict(zip(metric.labels, texts, strict=True))
        if isinstance(value, Histogram):
            _add_ranges(family, metric.name, labels, value)
        else:
            family.add_sample(metric.name, labels, value)
    return family


def _add_ranges(family: prometheus_client.Metric, name: str, labels: dict[str, str], value: Histogram) -> None:
    totals = list(accumulate(value.counts))  # once: another thread may observe meanwhile
    for bound, total in zip((*value.bounds, float("inf")), totals, strict=True):
        family.add_sample(f"{name}_bucket", labels | {"le": _bound(bound)}, total)
    family.add_sample(f"{name}_sum", labels, value.sum)
    family.add_sample(f"{name}_count", labels, totals[-1])


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:g}"

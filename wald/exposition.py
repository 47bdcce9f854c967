"""Counters, gauges and histograms, and the text in which Prometheus reads them (text format 0.0.4).

A program counts in plain numbers, and makes :class:`Metric` objects of them when it is asked for the text. The names
follow Prometheus: the prefix ``wald_``, base units (seconds, bytes), ``_total`` for a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


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
    lines = [line for metric in metrics if metric.samples for line in _lines(metric)]
    # The name of a group may be any bytes that a file name may have.
    return "".join(lines).encode(errors="backslashreplace")


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.type}\n"
    for values, value in metric.samples.items():
        pairs = [f'{name}="{text.translate(_ESCAPES)}"' for name, text in zip(metric.labels, values, strict=True)]
        if isinstance(value, Histogram):
            yield from _histogram_lines(metric.name, pairs, value)
        else:
            yield f"{metric.name}{_braces(pairs)} {_number(value)}\n"


def _histogram_lines(name: str, pairs: list[str], value: Histogram) -> Iterator[str]:
    total = 0
    for bound, total in zip((*value.bounds, float("inf")), accumulate(value.counts), strict=True):
        upto = f'le="{_number(bound)}"'
        yield f"{name}_bucket{_braces([*pairs, upto])} {total}\n"
    yield f"{name}_sum{_braces(pairs)} {_number(value.sum)}\n{name}_count{_braces(pairs)} {total}\n"


def _braces(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    """A number as Prometheus reads it; whole ones without a fraction, however large."""
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)

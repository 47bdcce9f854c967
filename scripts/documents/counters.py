"""What the programs count, as `/metrics` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from documents.tables import table
from wald.daemon.endpoint import of_daemon
from wald.exposition import Metric
from wald.metrics import Metrics

PROGRAMS: dict[str, Callable[[], Iterable[Metric]]] = {"daemon": lambda: of_daemon(Metrics())}


def metrics(program: str) -> str:
    """Every metric of a program with its type, its labels and its meaning."""
    found = sorted(PROGRAMS[program](), key=lambda metric: (metric.type, metric.name))
    rows = [
        [f"`{metric.name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning]
        for metric in found
    ]
    return table(["metric", "type", "labels", "meaning"], rows)

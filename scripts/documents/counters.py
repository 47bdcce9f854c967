"""Metrics of the programs, as in `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from documents.tables import table
from wald.cli.metrics import directory_metrics
from wald.daemon.metrics import Metrics, daemon_metrics
from wald.exposition import Metric
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.log import Log
from wald_drain.worker import Counts as DrainCounts
from wald_drain.worker import of_drain
from wald_gate.info.monitoring import Counts as GateCounts
from wald_gate.info.monitoring import Published, Word, of_gate
from wald_gate.limits import ConnectionPool
from wald_gate.settings import LimitSettings
from wald_reclaim.passes import Counts as ReclaimCounts
from wald_reclaim.passes import reclaim_metrics


def _directory() -> Iterable[Metric]:
    with TemporaryDirectory() as directory:
        root = create_root(Path(directory) / "log", Disk(), now="2026-11-21T10:00:00Z")
        return list(directory_metrics(Log(root.path), needed_bytes=0))


def _gate() -> Iterable[Metric]:
    """Return the gate's metrics, with values for those that are otherwise left out."""
    counts = GateCounts()
    counts.of_verb("head").count(200, 0.0)
    counts.expiries["certificate"] = 0.0
    return of_gate(counts, ConnectionPool(LimitSettings()), Published(), Word.READY, "", groups=0, leases=0)


PROGRAMS: dict[str, Callable[[], Iterable[Metric]]] = {
    "daemon": lambda: daemon_metrics(Metrics(), failures=0),
    "directory": _directory,
    "drain": lambda: of_drain(DrainCounts(), "", "", 0),
    "gate": _gate,
    "reclaim": lambda: reclaim_metrics(ReclaimCounts()),
}


def metrics(program: str) -> str:
    """Every metric of a program with its type, its labels and its meaning."""
    found = sorted(PROGRAMS[program](), key=lambda metric: (metric.type, metric.name))
    rows = [
        [f"`{metric.name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning]
        for metric in found
    ]
    return table(["metric", "type", "labels", "meaning"], rows)

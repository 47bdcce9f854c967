"""What the daemon counts about itself, as `/metrics` has it."""

from __future__ import annotations

from documents.tables import table
from wald.daemon.endpoint import _Collector
from wald.metrics import Metrics


def metrics() -> str:
    """Every metric with its type and its meaning."""
    families = sorted(_Collector(Metrics()).collect(), key=lambda family: (family.type, family.name))
    rows = [
        [f"`{family.name}{'_total' * (family.type == 'counter')}`", family.type, family.documentation]
        for family in families
    ]
    return table(["metric", "type", "meaning"], rows)

"""Routes, and how far each of their groups has processed them."""

from __future__ import annotations

from collections.abc import Iterable

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.retention.cursors import Cursor
from wald.retention.progress import Progress
from wald.writing.run_reports import no_daemon_message


def routes_fields(root: Root, every: Iterable[Progress]) -> dict[str, object]:
    """Routes as ``wald route list --json`` has them."""
    return {"routes": [_route_fields(route) for route in every], "no_daemon": no_daemon_message(root, Disk())}


def _route_fields(route: Progress) -> dict[str, object]:
    return {
        "route": route.route,
        "last": route.last_sequence,
        "fifo": route.fifo,
        "retired": route.retired,
        "consumers": route.consumers,
        "groups": [reader_fields(cursor, lag) for cursor, lag in zip(route.cursors, route.lags, strict=True)],
    }


def reader_fields(cursor: Cursor, lag: int) -> dict[str, object]:
    """A group of a route, which has so many records still to process."""
    return {
        "group": cursor.group,
        "state": cursor.state.value,
        "sequence": cursor.sequence,
        "lag_records": lag,
        "message": cursor.message,
        "path": str(cursor.path),
    }

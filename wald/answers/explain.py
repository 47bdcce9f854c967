"""What pins which bytes: FIFOs in trouble, quotas, segments, groups, and how long the disk lasts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from wald.answers.fields import time_fields
from wald.answers.liveness import over_quota
from wald.files.disk import Disk
from wald.files.routes import fifo_problems
from wald.format.names import is_route
from wald.hints import command_line
from wald.log import Log
from wald.retention.backlog import Backlog, GroupBacklog, Growth, SegmentStatus
from wald.retention.cursors import Cursor, CursorState
from wald.segments.view import State
from wald.writing.run_reports import no_daemon_message

PINS_MAX = 100  # of one segment: each of thousands of groups may pin each of thousands of segments
ASK_SECONDS = 2.0  # how long the daemon may take to name the routes over their quota


def explanation(log: Log, backlog: Backlog, now_ns: int) -> Iterator[dict[str, object]]:
    """One object for each thing that the operator should know of, each segment and each group, then for the log."""
    for path, message in fifo_problems(log.root):
        yield {"kind": "fifo", "path": str(path), "message": message}
    for over in over_quota(log.root, seconds=ASK_SECONDS):
        yield {"kind": "quota", **over}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for status in counted(backlog.segments(), counts, sizes):
        yield _segment_object(status)
    growth = backlog.growth_meter.growth(now_ns=now_ns)
    for group in backlog.groups.values():
        yield _group_object(group, growth, now_ns)
    yield {
        "kind": "log",
        "segments": _by_key(counts),
        "bytes": _by_key(sizes),
        "free_bytes": backlog.free_bytes,
        "bytes_per_second": growth.bytes_per_second if growth else None,
        "seconds_until_full": growth.seconds_until_full(backlog.free_bytes) if growth else None,
        "pinned_alone": dict(backlog.exclusive_bytes),
        "no_daemon": no_daemon_message(log.root, Disk()),
    }


def counted(statuses: Iterable[SegmentStatus], counts: Counter[str], sizes: Counter[str]) -> Iterator[SegmentStatus]:
    """The same, counted on the way by their state, and their bytes."""
    for status in statuses:
        name = state_of(status)
        counts[name] += 1
        sizes[name] += status.stored_bytes
        yield status


def state_of(status: SegmentStatus) -> str:
    """The state that the headline counts; a complete segment that is not sealed yet may be free as well."""
    if not status.readable:
        return "unreadable"
    if status.pins:
        return "pinned"
    if status.state in (State.SEALED, State.CUT):
        return "newest" if status.is_newest else "free"
    return str(status.state.value)


def advice(root: str | os.PathLike[str], cursor: Cursor) -> Iterator[tuple[str, str]]:
    """What the operator should know of a cursor that counts, each with the command that helps; "" if there is none."""
    wald_ = command_line(root)
    if cursor.of_work_group:
        yield (
            (
                f"Group {cursor.group} of {cursor.route} is a work group: of what it lags, some may be done. What its "
                "oldest record waits for"
            ),
            f"{wald_} group show {cursor.route} {cursor.group}",
        )
    if not is_route(cursor.group):
        yield f"{cursor.message}. Until then everything {cursor.route} ever received is kept", ""
    elif cursor.state not in (CursorState.VALID, CursorState.ABSENT):
        yield (
            (
                f"{cursor.message}.\n"
                f"It counts as nothing processed, so everything {cursor.route} ever received is kept. To set how far "
                f"{cursor.group} has got"
            ),
            f"{wald_} cursor set {cursor.route} SEQUENCE --group {cursor.group} --rewind",
        )


def _by_key(counts: Counter[str]) -> dict[str, int]:
    return {state.replace(" ", "_"): count for state, count in counts.items()}


def _segment_object(status: SegmentStatus) -> dict[str, object]:
    return {
        "kind": "segment",
        "segment": status.segment.base_sequence,
        "file": status.segment.path.name,
        "state": status.state.value,
        "first": status.segment.base_sequence,
        "last": status.last_sequence,
        "bytes": status.stored_bytes,
        "free": state_of(status) == "free",
        "message": status.problem,
        "pins": [
            {"route": pin.route, "group": pin.group, "sequence": pin.at, "needs": pin.needs, "message": pin.message}
            for pin in islice(status.pins, PINS_MAX)
        ],
        "pins_left_out": max(0, len(status.pins) - PINS_MAX),
    }


def _group_object(group: GroupBacklog, growth: Growth | None, now_ns: int) -> dict[str, object]:
    return {
        "kind": "group",
        "route": group.cursor.route,
        "group": group.cursor.group,
        "retired": group.retired,
        "state": group.cursor.state.value,
        "message": group.cursor.message,
        "path": str(group.cursor.path),
        "sequence": group.cursor.sequence,
        "lag_records": group.lag.records,
        "lag_seconds": round(group.lag.seconds(now_ns), 3),
        **time_fields("oldest", group.lag.oldest_ns),
        "pinned_segments": group.pinned_segments,
        "pinned_bytes": group.pinned_bytes,
        "frees_bytes": group.exclusive_bytes,
        "bytes_per_second": growth.routes.get(group.cursor.route, 0.0) if growth else None,
    }

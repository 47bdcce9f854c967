"""``wald explain``: which route and group holds back which bytes, how fast that grows, and when the disk is full."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

import wald
from wald.cli.options import json_option, root_option
from wald.cli.output import aligned
from wald.cli.positions import moment, warn_without_daemon
from wald.errors import command_line
from wald.format.names import is_route
from wald.log import Log
from wald.setting_types import format_bytes, format_seconds
from wald.store.files.fifos import troubles
from wald.store.retention.backlog import LEAST_SECONDS, Backlog, GroupBacklog, Growth, SegmentStatus
from wald.store.retention.cursors import CursorState
from wald.store.retention.pins import DIRECTORY_GONE, Pin
from wald.store.segments.view import State

_NAMED = 3  # groups told of one segment; --json tells all
_HEADINGS = ("ROUTE", "GROUP", "CURSOR", "LAG", "OLDEST", "HOLDS BACK", "FREES", "GROWS A DAY")
_NUMERIC = (2, 3, 4, 5, 6, 7)
_DAY = 86400


@click.command()
@root_option
@json_option
def explain(root: Path, as_json: bool) -> None:
    """Say what keeps each segment from being reclaimed, sealed or not, and what each route costs.

    LAG is in records of the route; OLDEST is how long the first of them has been waiting. FREES is what would go if
    this one cursor reached the head. The limits that wald-reclaim may have been given are not known here: try its
    own `--dry-run`. With --json, one object a line: every FIFO in trouble, every segment, every group, then the whole.
    """
    log = wald.open(root)
    warn_without_daemon(log.root)
    backlog = Backlog(log.view())
    now_ns = time.time_ns()
    if as_json:
        for path, words in troubles(log.root):
            click.echo(json.dumps({"kind": "fifo", "path": str(path), "message": words}))
        for told in _objects(backlog, now_ns):
            click.echo(json.dumps(told))
        return
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    statuses = _counted(backlog.segments(), counts, sizes)
    lines = [_segments_line(run) for run in _runs(statuses)]
    growth = backlog.growth(now_ns=now_ns)
    click.echo(_headline(counts, sizes))
    for line in lines:
        click.echo(f"  {line}")
    groups = [
        group for group in backlog.groups.values() if group.pinned_segments or group.lag.records or group.cursor.message
    ]
    if groups:
        click.echo("\n" + "\n".join(aligned([_HEADINGS, *(_row(group, growth, now_ns) for group in groups)], _NUMERIC)))
    if idle := len(backlog.groups) - len(groups):
        who = (
            "1 more group has read everything and holds" if idle == 1 else f"{idle} more have read everything and hold"
        )
        click.echo(f"{who} back nothing.")
    for words in _advice(log, groups):
        click.echo(f"\n{words}")
    click.echo(f"\n{_outlook(growth, backlog.free_bytes)}")


def _counted(statuses: Iterable[SegmentStatus], counts: Counter[str], sizes: Counter[str]) -> Iterator[SegmentStatus]:
    for status in statuses:
        state = _state(status)
        counts[state] += 1
        sizes[state] += status.stored_bytes
        yield status


def _state(status: SegmentStatus) -> str:
    """As the headline counts it; what is complete and not sealed yet may be free as well."""
    if not status.readable:
        return "unreadable"
    if status.pins:
        return "held back"
    if status.state in (State.SEALED, State.CUT):
        return "newest" if status.newest else "free"
    return str(status.state.value)


@dataclass(slots=True)
class _Run:
    """Consecutive segments that are alike, and are told of in one line."""

    first: SegmentStatus
    last: SegmentStatus
    count: int = 0
    stored_bytes: int = 0


def _runs(statuses: Iterable[SegmentStatus]) -> Iterator[_Run]:
    """Only the ends of a run are kept: there may be thousands of segments, and in each thousands of pins."""
    run: _Run | None = None
    for status in statuses:
        if run is None or not _alike(run.last, status):
            if run is not None:
                yield run
            run = _Run(status, status)
        run.last = status
        run.count += 1
        run.stored_bytes += status.stored_bytes
    if run is not None:
        yield run


def _alike(one: SegmentStatus, other: SegmentStatus) -> bool:
    return _kind(one) == _kind(other) and {(pin.route, pin.group) for pin in one.pins} == {
        (pin.route, pin.group) for pin in other.pins
    }


def _kind(status: SegmentStatus) -> tuple[str, State, str, int]:
    return _state(status), status.state, status.problem, len(status.pins)


def _headline(counts: Counter[str], sizes: Counter[str]) -> str:
    if not counts:
        return "no segments: nothing has been written yet"
    parts = ", ".join(f"{count} {state} ({format_bytes(sizes[state])})" for state, count in counts.items())
    return f"{counts.total()} segment{'' if counts.total() == 1 else 's'}, {format_bytes(sizes.total())}: {parts}"


def _segments_line(run: _Run) -> str:
    first, last = run.first, run.last
    size = format_bytes(run.stored_bytes)
    count = f"{run.count} segments, " if run.count > 1 else ""
    begin, end = first.segment.base_sequence, last.last_sequence
    records = f"from record {begin} on" if end is None or end < begin else f"records {begin} to {end}"
    unsealed = ", not sealed yet" if first.state is State.CUT else ""
    place = f"{records} ({count}{size}{unsealed})"
    if not first.readable:
        return f"{place}: {first.problem}; wald-reclaim leaves it alone: {first.hint}"
    damaged = f"; its index is damaged, and what it held is known without it: {first.problem}" if first.problem else ""
    match first.state:
        case State.RELEASED:
            return f"{place}: reclaimed, and deleted after the grace period"
        case State.ACTIVE:
            return f"{place}: being written; CUT completes it"
    if last.newest and not last.pins:
        return f"{place}: everybody has read it; it stays, because it is the newest{damaged}"
    if not last.pins:
        return f"{place}: everybody has read it; wald-reclaim may delete it{damaged}"
    return f"{place}: held back by {_pinned_by(last.pins)}{damaged}"


def _pinned_by(pins: tuple[Pin, ...]) -> str:
    told = [
        f"{pin.route} ({pin.message}; adding the route brings it back)"
        if pin.message == DIRECTORY_GONE
        else f"{pin.route}/{pin.group} (at {pin.at}, needs {pin.needs})"
        for pin in pins[:_NAMED]
    ]
    more = [f"{len(pins) - _NAMED} more"] if len(pins) > _NAMED else []
    return " and ".join([", ".join(told), *more])


def _row(group: GroupBacklog, growth: Growth | None, now_ns: int) -> tuple[str, ...]:
    cursor = group.cursor
    rate = format_bytes(growth.routes.get(cursor.route, 0.0) * _DAY) if growth else "-"
    return (
        cursor.route,
        cursor.group,
        "-" if cursor.state is CursorState.ABSENT else str(cursor.sequence),
        str(group.lag.records),
        format_seconds(group.lag.seconds(now_ns)) if group.lag.records else "-",
        "-" if group.retired else format_bytes(group.pinned_bytes),
        "-" if group.retired else format_bytes(group.exclusive_bytes),
        rate,
    )


def _advice(log: Log, groups: list[GroupBacklog]) -> Iterator[str]:
    """A paragraph for what needs words."""
    wald_ = command_line(log.root.path)
    yield from (words for _, words in troubles(log.root))
    retired = sorted({group.cursor.route for group in groups if group.retired})
    if retired:
        yield f"Retired: {_names(retired)}. Nothing is held back for them, and what was not read may go."
    gating = [group.cursor for group in groups if not group.retired]
    absent = [cursor.route for cursor in gating if cursor.state is CursorState.ABSENT]
    if absent:
        yield (
            f"Without a cursor: {_names(absent)}. Nobody has said to have read them, so everything they ever received\n"
            "is kept. That is how a route waits for a reader who comes late. When one has read it, or if nobody will:\n"
            f"  {wald_} cursor set {absent[0]} SEQUENCE\n"
            f"  {wald_} route retire {absent[0]}"
        )
    for cursor in gating:
        if not is_route(cursor.group):
            yield f"{cursor.message}. Until then everything {cursor.route} ever received is kept."
        elif cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            yield (
                f"{cursor.message}.\n"
                f"It counts as nothing processed, so everything {cursor.route} ever received is kept. To say how far "
                f"{cursor.group} has got:\n"
                f"  {wald_} cursor set {cursor.route} SEQUENCE --group {cursor.group} --rewind"
            )


def _names(routes: list[str]) -> str:
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    return ", ".join(routes[:_NAMED]) + more


def _outlook(growth: Growth | None, free: int) -> str:
    left = f"{format_bytes(free)} are free"
    seconds = growth.seconds_until(free) if growth else None
    if growth is None or seconds is None:
        return f"{left}; how fast the log grows cannot be told yet, from less than {format_seconds(LEAST_SECONDS)}."
    rate = format_bytes(growth.bytes_per_second * _DAY)
    return f"{left}; the log grows by {rate} a day: full in {format_seconds(seconds)} if nothing is reclaimed."


def _objects(backlog: Backlog, now_ns: int) -> Iterator[dict[str, object]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for status in _counted(backlog.segments(), counts, sizes):
        yield {
            "kind": "segment",
            "segment": status.segment.path.name,
            "form": status.state.value,
            "first": status.segment.base_sequence,
            "last": status.last_sequence,
            "bytes": status.stored_bytes,
            "free": _state(status) == "free",
            "problem": status.problem,
            "pins": [
                {"route": pin.route, "group": pin.group, "at": pin.at, "needs": pin.needs, "message": pin.message}
                for pin in status.pins
            ],
        }
    growth = backlog.growth(now_ns=now_ns)
    for group in backlog.groups.values():
        yield {
            "kind": "group",
            "route": group.cursor.route,
            "group": group.cursor.group,
            "retired": group.retired,
            "state": group.cursor.state.value,
            "message": group.cursor.message,
            "sequence": group.cursor.sequence,
            "lag_records": group.lag.records,
            "lag_seconds": round(group.lag.seconds(now_ns), 3),
            "oldest": None if group.lag.oldest_ns is None else moment(group.lag.oldest_ns),
            "pinned_segments": group.pinned_segments,
            "pinned_bytes": group.pinned_bytes,
            "frees_bytes": group.exclusive_bytes,
            "bytes_per_second": growth.routes.get(group.cursor.route, 0.0) if growth else None,
        }
    yield {
        "kind": "log",
        "segments": dict(counts),
        "bytes": dict(sizes),
        "free_bytes": backlog.free_bytes,
        "bytes_per_second": growth.bytes_per_second if growth else None,
        "seconds_until_full": growth.seconds_until(backlog.free_bytes) if growth else None,
    }

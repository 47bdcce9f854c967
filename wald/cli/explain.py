"""``wald explain`` and ``wald history``: pinned segments, free disk space, and deletions."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples
from wald.cli.options import check_span, json_option, root_option, time_option
from wald.cli.output import aligned, counted, json_line, print_result
from wald.cli.positions import warn_without_daemon
from wald.errors import Damaged
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.format.times import nanoseconds, utc
from wald.hints import command_line
from wald.retention.cursors import CursorState
from wald.setting_types import format_bytes, format_seconds

if TYPE_CHECKING:
    from wald.log import Log
    from wald.retention.backlog import Backlog, GroupBacklog, Growth, SegmentStatus
    from wald.retention.blockers import Blockers
    from wald.segments.view import State

_OVER = {"block": "wait", "reject": "are refused"}
_NAMED = 3  # groups shown per segment; --json shows all
_HEADINGS = ("ROUTE", "GROUP", "CURSOR", "LAG", "OLDEST", "PINS", "FREES", "GROWS A DAY")
_NUMERIC = (2, 3, 4, 5, 6, 7)
_DAY = 86400


@click.command(epilog=examples("wald explain", "wald explain --json"))
@root_option
@json_option
def explain(root: Path, as_json: bool) -> None:
    """Show what keeps each segment, sealed or not, from being reclaimed, and what each route costs.

    LAG is counted in records of the route; OLDEST is how long the first of them has been waiting. FREES is the amount
    that could be deleted if only this cursor reached the head. The limits of wald-reclaim are not applied; use its
    `--dry-run`. A running daemon is asked which routes are over their quota. With --json, one object per line: every
    FIFO with a problem, every route over its quota, every segment, every group, then the log.
    """
    from wald.retention.backlog import Backlog
    from wald.status.retention import explanation

    log = wald.open(root)
    backlog = Backlog(log.view())
    now_ns = time.time_ns()
    if as_json:
        for fields in explanation(log, backlog, now_ns):
            click.echo(json_line("explain", fields))
    else:
        warn_without_daemon(log.root)
        for text in _text(log, backlog, now_ns):
            click.echo(text)


def _text(log: Log, backlog: Backlog, now_ns: int) -> Iterator[str]:
    from wald.files.disk import Disk
    from wald.status.retention import counted as counting
    from wald.writing.run_reports import no_daemon_message

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    active = f"being written; {command_line(log.root.path, 'cut')} completes it"
    if no_daemon_message(log.root, Disk()):
        active = "the active segment, which no daemon writes to now"
    stretches = _stretches(counting(backlog.segments(), counts, sizes))
    lines = [f"  {_segments_line(stretch, active)}" for stretch in stretches]
    growth = backlog.growth_meter.growth(now_ns=now_ns)
    parts = ", ".join(f"{count} {state} ({format_bytes(sizes[state])})" for state, count in counts.items())
    headline = f"{counted(counts.total(), 'segment')}, {format_bytes(sizes.total())}: {parts}"
    yield "\n".join([headline if counts else "no segments: nothing has been written yet", *lines])
    groups = [
        group for group in backlog.groups.values() if group.pinned_segments or group.lag.records or group.cursor.message
    ]
    if groups:
        yield "\n" + "\n".join(aligned([_HEADINGS, *(_row(group, growth, now_ns) for group in groups)], _NUMERIC))
    if idle := len(backlog.groups) - len(groups):
        others = f"{counted(idle, 'more group' if groups else 'group')} {'has' if idle == 1 else 'have'}"
        yield f"{others} read everything and pin{'s' * (idle == 1)} nothing."
    if alone := backlog.exclusive_bytes:
        named = ", ".join(f"{route} {format_bytes(size)}" for route, size in alone.most_common(_NAMED))
        more = f" and {len(alone) - _NAMED} more routes" if len(alone) > _NAMED else ""
        yield f"\nWhat one route alone pins: {named}{more}."
    if sizes["pinned"]:
        shrinking = command_line(log.root.path, "--shrink-pinned", program="wald-reclaim")
        yield f"\nA sealed segment with few unread records can be rewritten to just those:\n  {shrinking}"
    for paragraph in _advice(log, groups):
        yield f"\n{paragraph}"
    for pin in backlog.handovers:
        pinned = "" if pin.problem else f"Pinned by {pin.path}: {_names([*pin.positions])}. "
        yield f"\n{pinned}{pin.message}."
    yield f"\n{_outlook(growth, backlog.free_bytes)}"


@dataclass(slots=True)
class _Stretch:
    """Consecutive segments that share one line."""

    first: SegmentStatus
    last: SegmentStatus
    count: int
    stored_bytes: int


def _stretches(statuses: Iterable[SegmentStatus]) -> Iterator[_Stretch]:
    """Yield stretches. Only their ends are kept: there may be thousands of segments, each with thousands of pins."""
    stretch: _Stretch | None = None
    for status in statuses:
        if stretch and _kind(stretch.last) == _kind(status) and stretch.last.pins.has_same_groups(status.pins):
            stretch.last = status
            stretch.count += 1
            stretch.stored_bytes += status.stored_bytes
            continue
        if stretch is not None:
            yield stretch
        stretch = _Stretch(status, status, 1, status.stored_bytes)
    if stretch is not None:
        yield stretch


def _kind(status: SegmentStatus) -> tuple[str, State, str, tuple[str, ...]]:
    from wald.status.retention import state_of

    return state_of(status), status.state, status.problem, status.waived_routes


def _segments_line(stretch: _Stretch, active: str) -> str:
    from wald.segments.view import State

    first, last = stretch.first, stretch.last
    size = format_bytes(stretch.stored_bytes)
    count = f"{stretch.count} segments, " if stretch.count > 1 else ""
    begin, end = first.segment.base_sequence, last.last_sequence
    records = f"record {begin} and later" if end is None or end < begin else f"records {begin} to {end}"
    unsealed = ", not sealed yet" if first.state is State.CUT else ""
    place = f"{records} ({count}{size}{unsealed})"
    if not first.readable:
        return f"{place}: {first.problem}; wald-reclaim leaves it alone: {first.hint}"
    damaged = f"; its index is damaged, but its contents are known: {first.problem}" if first.problem else ""
    match first.state:
        case State.RELEASED:
            return f"{place}: reclaimed, and deleted after the grace period"
        case State.ACTIVE:
            return f"{place}: {active}"
    if not last.pins:
        follows = "it stays, because it is the newest" if last.is_newest else "wald-reclaim may delete it"
        waived = last.waived_routes
        reason = f"its unread records are of {_names(waived)}, which {'is' if len(waived) == 1 else 'are'} retired"
        return f"{place}: {reason if waived else 'every group has read it'}; {follows}{damaged}"
    return f"{place}: pinned by {_pinned_by(last.pins)}{damaged}"


def _pinned_by(pins: Blockers) -> str:
    from wald.retention.blockers import DIRECTORY_GONE

    named = [
        f"{pin.route} ({pin.message}; adding the route brings it back)"
        if pin.message == DIRECTORY_GONE
        else f"{pin.route}/{pin.group} (at {pin.at}, needs {pin.needs})"
        for pin in islice(pins, _NAMED)
    ]
    more = [f"{len(pins) - _NAMED} more"] if len(pins) > _NAMED else []
    return " and ".join([", ".join(named), *more])


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
    from wald.files.routes import fifo_problems
    from wald.status.findings import over_quota
    from wald.status.retention import QUOTA_SECONDS, advice

    wald_ = command_line(log.root.path)
    yield from (message for _, message in fifo_problems(log.root))
    for over in over_quota(log.root, seconds=QUOTA_SECONDS):
        requests = f"its requests {_OVER[over['policy']]}, until the group catches up or the quota is raised"
        yield f"{over['message']}. Its FIFO is not read, and {requests}."
    retired = sorted({group.cursor.route for group in groups if group.retired})
    if retired:
        yield f"Retired: {_names(retired)}. Nothing is pinned for them, and their unread records may be deleted."
    gating = [group.cursor for group in groups if not group.retired]
    absent = [cursor.route for cursor in gating if cursor.state is CursorState.ABSENT]
    if absent:
        yield (
            f"Without a cursor: {_names(absent)}. No group has processed their records, so everything they ever\n"
            "received is kept. A route waits for its first reader this way. Once it has read, or if none will:\n"
            f"  {wald_} cursor set {absent[0]} SEQUENCE\n  {wald_} route retire {absent[0]}"
        )
    for cursor in gating:
        for said, command in advice(log.root.path, cursor):
            yield f"{said}:\n  {command}" if command else f"{said}."


def _names(routes: Sequence[str]) -> str:
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    return ", ".join(routes[:_NAMED]) + more


def _outlook(growth: Growth | None, free: int) -> str:
    from wald.retention.backlog import MIN_SECONDS

    left = f"{format_bytes(free)} are free"
    seconds = growth.seconds_until_full(free) if growth else None
    if growth is None or seconds is None:
        return f"{left}; the growth rate of the log is not known before {format_seconds(MIN_SECONDS)} have passed."
    rate = format_bytes(growth.bytes_per_second * _DAY)
    return f"{left}; the log grows by {rate} a day: full in {format_seconds(seconds)} if nothing is reclaimed."


_LINES = 500  # written at once


@click.command(epilog=examples("wald history --since 1d", "wald history --route access --json"))
@root_option
@time_option("--since", "Begin at this time.  [default: the first event]")
@time_option("--until", "End before this time.")
@click.option("--route", help="Only events about records of this route.")
@json_option
def history(root: Path, since: datetime | None, until: datetime | None, route: str | None, as_json: bool) -> int:
    """Show what happened to a log: cuts, seals, deletions, losses, archives, crashes, clock steps.

    Each deletion is checked against its line in ledger/reclaim.jsonl: for each route the cursors had reached its last
    record, or the route was retired, or a limit let unread records expire, which are counted. The line must agree with
    the one that was written when the segment was sealed. The chain of the ledgers is checked for all lines read.

    Exit code 4: a deletion was not allowed or cannot be verified, or a ledger is damaged. Segments that are missing
    without a line are not detected; `wald verify` reports them. Exit code 3: the route does not exist, and no line of
    the requested time names it.
    """
    from wald.checking.audit_report import END_OF_TIME_NS, DeletionAudit
    from wald.status.history import clock_events, crash_events, event_fields, sentence

    check_span(since, until)
    here = Root(root)
    read_identity(here)
    from_ns = nanoseconds(since) if since else 0
    until_ns = nanoseconds(until) if until else END_OF_TIME_NS
    story = DeletionAudit(here, from_ns=from_ns, until_ns=until_ns)
    others = sorted([*crash_events(here), *clock_events(here)], key=lambda event: event.at_ns)
    others = [event for event in others if from_ns <= event.at_ns < until_ns]
    events = heapq.merge(story.events(), others, key=lambda event: event.at_ns)
    wanted = (event for event in events if route is None or route in event.routes)
    known = False
    lines = (
        json_line("history", event_fields(each))
        if as_json
        else f"{utc(each.at_ns)}  {each.entry.get('event'):10} {sentence(each)}"
        for each in wanted
    )
    while printed := list(islice(lines, _LINES)):
        known = True
        click.echo("\n".join(printed))
    if route is not None and not known and not story.broken:
        here.require_route(route)
    fields = {"kind": "summary", "lines": story.lines, "not_allowed": story.not_allowed, "broken": story.broken}
    chain = "the chain is broken" if story.broken else "the chain is intact"
    refused = f"{story.not_allowed} deletions not allowed" if story.not_allowed else ""
    summary = f"{story.lines} lines read: {chain}; {refused or 'every deletion on record was allowed'}"
    print_result("history", as_json, fields, [*(f"damaged: {message}" for message in story.broken), summary])
    return Damaged.exit_code if story.not_allowed or story.broken else 0

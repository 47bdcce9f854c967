"""Events of a log as sentences and as JSON, newest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wald.checking.audit_report import DeletionAudit, Event
from wald.files.layout import Root
from wald.files.uptime import read_steps
from wald.format.times import utc
from wald.setting_types import format_bytes
from wald.status.schema import ledger_fields, time_fields
from wald.writing.run_reports import crash_reports, run_reports

CRASH = "crash"
STARTED = "started"
ENDED = "ended"
LIVES = "lives"  # in place of a ledger: the reports of daemon starts
CLOCK = "clock.jsonl"
CLOCK_STEP = "clock-step"

_WAYS = {
    "skipping-record": ("is about to move from", "is about to skip"),
    "skipped-record": ("moved from", "skipped"),
    "skip-failed": ("failed to move from", "failed to skip"),
}


@dataclass(frozen=True)
class Figures:
    """Format of numbers in sentences; other ledger values are written unchanged."""

    number: Callable[[object], str]
    size: Callable[[object], str]


EXACT = Figures(str, lambda count: f"{count} bytes")
READABLE = Figures(
    lambda count: f"{count:,}" if isinstance(count, int) else str(count),
    lambda count: format_bytes(count) if isinstance(count, int) else f"{count} bytes",
)


@dataclass(frozen=True)
class Excerpt:
    """Some events, newest first."""

    events: list[Event]
    before: Mapping[str, int] | None  # where the next one begins: a line number by ledger; None at the end
    looked_at: int  # number of events that were read to find these
    broken: list[str]  # problems of the ledgers


def excerpt(
    audit: DeletionAudit, before: Mapping[str, int], *, wanted: Callable[[Event], bool], count: int, at_most: int
) -> Excerpt:
    """Return the newest events, or those that precede another excerpt; read at most ``at_most``."""
    reached, events, looked_at = dict(before), list[Event](), 0
    bound = before.get(CLOCK, 1 << 64)
    steps = [event for event in reversed(clock_events(audit.root)) if event.number < bound]
    others = steps, _starts_and_ends(audit.root, before)
    merged = heapq.merge(audit.newest_first(before), *others, key=lambda event: -event.at_ns)
    for event in merged:
        if len(events) == count or looked_at == at_most:
            return Excerpt(events, reached, looked_at, audit.broken)
        looked_at += 1
        reached[event.ledger] = event.number
        if event.is_event and wanted(audited := audit.with_ruling(event)):
            events.append(audited)
    return Excerpt(events, None, looked_at, audit.broken)


def crash_events(root: Root) -> Iterator[Event]:
    """Yield the crashes found by later starts, oldest first."""
    for crash in sorted(crash_reports(root), key=lambda crash: crash.found_ns or 0):
        if crash.found_ns is not None:
            entry = {"event": CRASH, "epoch": crash.epoch, "why": crash.how, "lost": list(crash.lost)}
            yield Event(crash.found_ns, "", 0, entry | {"cut_bytes": crash.cut_bytes})


def clock_events(root: Root) -> list[Event]:
    """Return the clock steps in record order."""
    events = []
    for number, step in enumerate(read_steps(root), start=1):
        entry = {"event": CLOCK_STEP, "sequence": step.base, **time_fields("before", step.before_ns)}
        events.append(Event(step.at_ns, CLOCK, number, entry))
    return events


def event_fields(event: Event) -> dict[str, object]:
    """Return an event as ``wald history --json`` prints it."""
    ruling = event.ruling
    return {
        "kind": "event",
        **time_fields("at", event.at_ns),
        "event": event.entry.get("event"),
        "ledger": event.ledger,
        "line": event.number,
        "allowed": None if ruling is None else not ruling.errors,
        "reasons": [] if ruling is None else list(ruling.errors),
        "lost_records": 0 if ruling is None else ruling.unread_records,
        "entry": ledger_fields({key: value for key, value in event.entry.items() if key not in ("at", "event")}),
    }


def _starts_and_ends(root: Root, before: Mapping[str, int]) -> Iterator[Event]:
    """Yield starts and ends of the daemon, newest first, with distinct numbers."""
    bound = before.get(LIVES, 1 << 64)
    for report in run_reports(root):
        epoch = report.get("epoch")
        if not isinstance(epoch, int):
            continue
        for number, name, event in ((2 * epoch + 1, "ended_at_ns", ENDED), (2 * epoch, "at_ns", STARTED)):
            if number < bound and isinstance(at_ns := report.get(name), int):
                yield Event(at_ns, LIVES, number, {"event": event} | report)


def sentence(event: Event) -> str:
    judged = event.entry.get("event") in ("reclaimed", "shrunk")
    return f"{deed(event)}; {_judgement(event)}" if judged else deed(event)


def deed(event: Event, figures: Figures = EXACT) -> str:
    entry, number, size = event.entry, figures.number, figures.size
    base, records = entry.get("base"), f"records {number(entry.get('base'))} to {number(entry.get('last'))}"
    routes, why = _of_routes(entry.get("routes"), number), f"; {entry['why']}" if entry.get("why") else ""
    match entry:
        case {"event": "reclaimed"}:
            return f"segment {base}: {records}{routes}"
        case {"event": "shrunk"}:
            sizes = _shrunk(entry.get("was_bytes"), entry.get("bytes"), figures)
            return f"segment {base}: {records}, without{_of_routes(entry.get('dropped'), number)}: {sizes}"
        case {"event": "sealed"}:
            sizes = _shrunk(entry.get("raw_bytes"), entry.get("bytes"), figures)
            return f"segment {base}: {records}{routes}; {sizes}"
        case {"event": "kept"}:
            return f"segment {base} stays ({entry.get('why')})"
        case {"event": "cut", "base": int(base), "next": int(following)}:
            return f"segment {base}: records {number(base)} to {number(following - 1)}, {size(entry.get('bytes'))}"
        case {"event": "repaired", "base": int(base), "last": int(last)}:  # nothing may have been intact
            done = "set aside" if entry.get("action") == "set aside" else "rebuilt from its intact part"
            span = f"records {number(base)} to {number(last)} were intact"
            kept = "" if entry.get("lossless") else f"; the old file is {entry.get('kept')}"
            whole = span if last >= base else "no record in it was intact"
            return f"segment {base}: {done}; {whole}; {entry.get('why')}{kept}"
        case {"event": "identified"}:
            kept = f"; the old file is {entry['kept']}" if "kept" in entry else ""
            return f"log.json was rebuilt: {entry.get('why')}{kept}"
        case {"event": "verified"}:
            return f"{number(entry.get('ok'))} ok, {number(entry.get('errors'))} errors"
        case {"event": "archived"}:
            span = f"{number(entry.get('first'))} to {number(entry.get('last'))}"
            place = f"{entry.get('dest')}/{entry.get('path')}"
            return f"{number(entry.get('count'))} records of {entry.get('route')}, {span}: {place}"
        case {"event": "begun" | "finished" | "abandoned"}:
            return f"a run of wald-archive: {entry.get('bag')} to {entry.get('dest')}"
        case {"event": "crash"}:
            lost = "; ".join(entry["lost"]) or "nothing acknowledged was lost"
            return f"epoch {entry['epoch']} {entry['why']}; found by the next start: {lost}"
        case {"event": "clock-step", "before": before} if event.ledger == CLOCK:
            now = f"the clock at {utc(event.at_ns)}"
            base = number(entry["sequence"])
            return f"append times follow the clock again from record {base}: they were at {before}, {now}"
        case {"event": "ended", "epoch": epoch, "ended": end} if event.ledger == LIVES:
            return f"epoch {epoch} {'was' if end == 'stopped' else 'failed:'} {end}"
        case {"event": "started"} if event.ledger == LIVES:
            return "; ".join(filter(None, _start(entry, size)))
        case {"event": "skipping-record" | "skipped-record" | "skip-failed"}:
            return _skip(entry, number)
        case {"base": int(), "last": int()}:
            return f"{records}{routes}{why}"
    return " ".join(f"{key}={value}" for key, value in entry.items() if key not in ("event", "at"))


def _shrunk(before: object, after: object, figures: Figures) -> str:
    """Format two sizes; exact sizes share the unit."""
    return f"{figures.size(before)} became {figures.number(after) if figures is EXACT else figures.size(after)}"


def _start(report: dict[str, Any], size: Callable[[object], str]) -> Iterator[str]:
    yield f"epoch {report['epoch']}: {report.get('software', 'wald')} started"
    yield str(report.get("before") or "")
    if trimmed := report.get("trimmed_bytes"):
        yield f"{size(trimmed)} of an unfinished write were cut off"
    for name in ("errors", "warnings"):
        found = report.get(name)
        yield from map(str, found if isinstance(found, list) else ())


def _skip(entry: dict[str, Any], number: Callable[[object], str]) -> str:
    moving, skipping = _WAYS[entry["event"]]
    way = moving if "after" in entry else skipping  # of a work group, records above its cursor
    begin = entry.get("after", entry.get("first"))
    moved = f"{entry.get('route')}/{entry.get('group')} {way} {number(begin)} to {number(entry.get('sequence'))}"
    records = f"{number(entry.get('records'))} record{'s' * (entry.get('records') != 1)}"
    missing = f" and up to {number(entry['missing'])} that no longer existed" if entry.get("missing") else ""
    why = f"; {entry['why']}" if entry.get("why") else ""
    return f"{moved} by {entry['by']}, past {records}{missing}{why}"


def _judgement(event: Event) -> str:
    entry, ruling = event.entry, event.ruling
    if ruling is None:
        return "undone later"
    if ruling.errors:
        return f"NOT ALLOWED: {'; '.join(ruling.errors)}"
    lost = f", {ruling.unread_records} records expired unread" if ruling.unread_records else ""
    held = entry["dropped"] if "dropped" in entry else entry["routes"]
    routes = [each for each in held if isinstance(each, dict)]
    at = [f"{route['route']} retired" for route in routes if route.get("retired")]
    at += [f"{route['route']}/{group} at {to}" for route in routes for group, to in route.get("cursors", {}).items()]
    return f"allowed by the rule {entry.get('rule')}{lost}{_few(at)}"


def _of_routes(held: object, number: Callable[[object], str]) -> str:
    """List the record counts of the first few routes."""
    counts = []
    for each in held if isinstance(held, list) else []:
        match each:
            case [name, count, *_] | {"route": name, "count": count} if count:
                counts.append(f"{name} {number(count)}")
    return _few(counts)


def _few(parts: list[str]) -> str:
    """List the first few in parentheses."""
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    return f" ({', '.join(parts[:4])}{more})" if parts else ""

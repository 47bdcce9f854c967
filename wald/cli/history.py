"""``wald history``: what happened to a log, and whether every deletion was legal."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click

from wald.answers.fields import ledger_fields, time_fields
from wald.cli.options import json_option, root_option
from wald.cli.output import json_line
from wald.cli.times import check_span, time_option
from wald.errors import Damaged
from wald.format.times import nanoseconds, utc
from wald.store.checking.story import END_OF_TIME_NS, Event, Story
from wald.store.files.directory import Root
from wald.store.files.identity import read_identity
from wald.store.writing.lives import crashes

_CRASH = "crash"
_LINES = 500  # that are written at once


@click.command()
@root_option
@time_option("--since", "Begin with this time; without it, with the first line there is.")
@time_option("--until", "End before this time.")
@click.option("--route", help="Only what is about records of this route.")
@json_option
def history(root: Path, since: datetime | None, until: datetime | None, route: str | None, as_json: bool) -> int:
    """Show what happened to a log: cuts, seals, deletions and why each was legal, losses, archives, crashes.

    A deletion is judged by its line in ledger/reclaim.jsonl: for each route the cursors had reached its last record, or
    the route was retired, or a limit let unread records expire, which are counted. The line must agree with the one
    that was written when the segment was sealed. The chain of the ledgers is checked over all that is read.

    Exit code 4: a deletion was not legal or that cannot be proven, or a ledger is damaged. A segment that is gone
    without a line is not looked for; `wald verify` reports it. Exit code 3: there is no such route, and no line of
    the time asked for names it.
    """
    check_span(since, until)
    here = Root(root)
    read_identity(here)
    from_ns = nanoseconds(since) if since else 0
    until_ns = nanoseconds(until) if until else END_OF_TIME_NS
    story = Story(here, from_ns=from_ns, until_ns=until_ns)
    fallen = [event for event in _crashes(here) if from_ns <= event.at_ns < until_ns]
    events = heapq.merge(story.events(), fallen, key=lambda event: event.at_ns)
    wanted = (event for event in events if route is None or route in event.routes)
    known = False
    while lines := [json_line("history", _fields(each)) if as_json else _text(each) for each in islice(wanted, _LINES)]:
        known = True
        click.echo("\n".join(lines))
    if route is not None and not known and not story.broken:
        here.require_route(route)
    _report(story, as_json=as_json)
    return Damaged.exit_code if story.illegal or story.broken else 0


def _crashes(root: Root) -> Iterator[Event]:
    """What starts have found, oldest first."""
    for crash in sorted(crashes(root), key=lambda crash: crash.found_ns or 0):
        if crash.found_ns is not None:
            entry = {"event": _CRASH, "epoch": crash.epoch, "why": crash.how, "lost": list(crash.lost)}
            yield Event(crash.found_ns, "", 0, entry | {"cut_bytes": crash.cut_bytes})


def _report(story: Story, *, as_json: bool) -> None:
    if as_json:
        fields = {"kind": "summary", "lines": story.lines, "illegal": story.illegal, "broken": story.broken}
        click.echo(json_line("history", fields))
        return
    for message in story.broken:
        click.echo(f"damaged: {message}")
    chain = "the chain is broken" if story.broken else "the chain is whole"
    judged = f"{story.illegal} deletions not legal" if story.illegal else "every deletion on record was legal"
    click.echo(f"{story.lines} lines read: {chain}; {judged}")


def _fields(event: Event) -> dict[str, object]:
    ruling = event.ruling
    return {
        "kind": "event",
        **time_fields("at", event.at_ns),
        "event": event.entry.get("event"),
        "ledger": event.ledger,
        "line": event.number,
        "legal": None if ruling is None else not ruling.errors,
        "reasons": [] if ruling is None else list(ruling.errors),
        "lost_records": 0 if ruling is None else ruling.lost,
        "entry": ledger_fields({key: value for key, value in event.entry.items() if key not in ("at", "event")}),
    }


def _text(event: Event) -> str:
    return f"{utc(event.at_ns)}  {event.entry.get('event'):10} {_sentence(event)}"


def _sentence(event: Event) -> str:
    entry = event.entry
    match entry:
        case {"event": "reclaimed"}:
            return f"{_segment(entry)}{_of_routes(entry)}; {_legality(event)}"
        case {"event": "relieved"}:
            dropped = entry | {"routes": entry.get("dropped")}
            sizes = f"{entry.get('was_bytes')} bytes became {entry.get('bytes')}"
            return f"{_segment(entry)}, without{_of_routes(dropped)}: {sizes}; {_legality(event)}"
        case {"event": "sealed"}:
            return f"{_segment(entry)}{_of_routes(entry)}; {entry.get('raw_bytes')} bytes became {entry.get('bytes')}"
        case {"event": "kept"}:
            return f"segment {entry.get('base')} stays ({entry.get('why')})"
        case {"event": "cut", "base": int(base), "next": int(following)}:
            return f"segment {base}: records {base} to {following - 1}, {entry.get('bytes')} bytes"
        case {"event": "repaired", "base": int(), "last": int()}:
            return _repair(entry)
        case {"event": "identified"}:
            kept = f"; the old file is {entry['kept']}" if "kept" in entry else ""
            return f"log.json was made again: {entry.get('why')}{kept}"
        case {"event": "verified"}:
            return f"{entry.get('ok')} ok, {entry.get('errors')} errors"
        case {"event": "archived"}:
            span = f"{entry.get('first')} to {entry.get('last')}"
            place = f"{entry.get('dest')}/{entry.get('path')}"
            return f"{entry.get('count')} records of {entry.get('route')}, {span}: {place}"
        case {"event": "begun" | "finished" | "abandoned"}:
            return f"a run of wald-archive: {entry.get('bag')} to {entry.get('dest')}"
        case {"event": "crash"}:
            lost = "; ".join(entry["lost"]) or "nothing durable was lost"
            return f"epoch {entry['epoch']} {entry['why']}; found by the next start: {lost}"
        case {"event": "skipped-record"}:
            return _skip(entry)
        case {"event": "skip-failed"}:
            group = f"{entry.get('route')}/{entry.get('group')}"
            return f"{group} did not skip {entry.get('first')} to {entry.get('sequence')}: {entry.get('why')}"
        case {"base": int(), "last": int()}:
            why = entry.get("why")
            return f"{_records(entry)}{_of_routes(entry)}{f'; {why}' if why else ''}"
    return " ".join(f"{key}={value}" for key, value in entry.items() if key not in ("event", "at"))


def _repair(entry: dict[str, Any]) -> str:
    """What was done to a segment; nothing of it may have been whole."""
    base, last = entry["base"], entry["last"]
    done = "set aside" if entry.get("deed") == "set aside" else "made again from what was whole of it"
    whole = f"whole were records from {base} up to {last}" if last >= base else "no record in it was whole"
    kept = "" if entry.get("lossless") else f"; the old file is {entry.get('kept')}"
    return f"segment {base}: {done}; {whole}; {entry.get('why')}{kept}"


def _skip(entry: dict[str, Any]) -> str:
    way = "moved from" if "after" in entry else "skipped"  # of a work group, records above its cursor
    begin = entry.get("after", entry.get("first"))
    moved = f"{entry.get('route')}/{entry.get('group')} {way} {begin} to {entry.get('sequence')}"
    records = f"{entry.get('records')} record{'s' * (entry.get('records') != 1)}"
    missing = f" and up to {entry['missing']} that were removed" if entry.get("missing") else ""
    why = f"; {entry['why']}" if entry.get("why") else ""
    return f"{moved} by {entry.get('by')}, past {records}{missing}{why}"


def _legality(event: Event) -> str:
    ruling = event.ruling
    if ruling is None:
        return "taken back later"
    if ruling.errors:
        return f"NOT LEGAL: {'; '.join(ruling.errors)}"
    lost = f", {ruling.lost} records expired unread" if ruling.lost else ""
    return f"legal by the rule {event.entry.get('rule')}{lost}{_cursors(event.entry)}"


def _cursors(entry: dict[str, Any]) -> str:
    """Where the cursors were, of the first few routes."""
    routes = [each for each in entry.get("dropped", entry["routes"]) if isinstance(each, dict)]
    named = [f"{route['route']} retired" for route in routes if route.get("retired")]
    named += [f"{route['route']}/{group} at {at}" for route in routes for group, at in route.get("cursors", {}).items()]
    return f" ({_few(named)})" if named else ""


def _segment(entry: dict[str, Any]) -> str:
    return f"segment {entry.get('base')}: {_records(entry)}"


def _records(entry: dict[str, Any]) -> str:
    return f"records {entry.get('base')} to {entry.get('last')}"


def _of_routes(entry: dict[str, Any]) -> str:
    """How many records of each of the first few routes."""
    held = entry.get("routes")
    counts = []
    for each in held if isinstance(held, list) else []:
        match each:
            case [name, count, *_] | {"route": name, "count": count} if count:
                counts.append(f"{name} {count}")
    return f" ({_few(counts)})" if counts else ""


def _few(parts: list[str]) -> str:
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")

"""``wald history``: what happened to a log, and whether every deletion was allowed."""

from __future__ import annotations

import heapq
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.command import examples
from wald.cli.options import json_option, root_option
from wald.cli.output import json_line
from wald.cli.times import check_span, time_option
from wald.errors import Damaged
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.format.times import nanoseconds, utc

if TYPE_CHECKING:
    from wald.checking.audit_report import DeletionAudit, Event

_LINES = 500  # that are written at once


@click.command(epilog=examples("wald history --since 1d", "wald history --route access --json"))
@root_option
@time_option("--since", "Begin with this time; without it, with the first line.")
@time_option("--until", "End before this time.")
@click.option("--route", help="Only events about records of this route.")
@json_option
def history(root: Path, since: datetime | None, until: datetime | None, route: str | None, as_json: bool) -> int:
    """Show what happened to a log: cuts, seals, deletions, losses, archives, crashes, clock steps.

    Each deletion is checked by its line in ledger/reclaim.jsonl: for each route the cursors had reached its last
    record, or the route was retired, or a limit let unread records expire, which are counted. The line must agree with
    the one that was written when the segment was sealed. The chain of the ledgers is checked for all lines read.

    Exit code 4: a deletion was not allowed or cannot be verified, or a ledger is damaged. Segments that are missing
    without a line are not detected; `wald verify` reports them. Exit code 3: the route does not exist, and no line of
    the requested time names it.
    """
    from wald.checking.audit_report import END_OF_TIME_NS, DeletionAudit
    from wald.status.history import clock_events, crash_events, event_fields

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
    while lines := [
        json_line("history", event_fields(each)) if as_json else _text(each) for each in islice(wanted, _LINES)
    ]:
        known = True
        click.echo("\n".join(lines))
    if route is not None and not known and not story.broken:
        here.require_route(route)
    _report(story, as_json=as_json)
    return Damaged.exit_code if story.not_allowed or story.broken else 0


def _report(story: DeletionAudit, *, as_json: bool) -> None:
    if as_json:
        fields = {"kind": "summary", "lines": story.lines, "not_allowed": story.not_allowed, "broken": story.broken}
        click.echo(json_line("history", fields))
        return
    for message in story.broken:
        click.echo(f"damaged: {message}")
    chain = "the chain is broken" if story.broken else "the chain is whole"
    judged = (
        f"{story.not_allowed} deletions not allowed" if story.not_allowed else "every deletion on record was allowed"
    )
    click.echo(f"{story.lines} lines read: {chain}; {judged}")


def _text(event: Event) -> str:
    from wald.status.history import sentence

    return f"{utc(event.at_ns)}  {event.entry.get('event'):10} {sentence(event)}"

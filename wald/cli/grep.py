"""``wald grep``: the records in which a pattern is found, with their sequence and route."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.options import count_option, json_option, root_option
from wald.cli.output import json_line
from wald.cli.patterns import matcher_of, operand
from wald.cli.read_output import with_times
from wald.cli.streams import write_stdout
from wald.cli.times import now, warn_of_wrong_times
from wald.errors import Damaged, InvalidInput, NotFound, Partial
from wald.format.names import DEFAULT_GROUP, check_route
from wald.format.times import parse_position_option, parse_time_option, utc

if TYPE_CHECKING:
    from wald.format.records import Record
    from wald.reading.assembler import Batch
    from wald.reading.pattern import Matcher
    from wald.reading.search import Match
    from wald.reading.selection import Start, Stop
    from wald.retention.missing import Missing

NOTHING_FOUND = 1
_JOBS_MAX = 64


@click.command()
@click.argument("pattern")
@click.argument("route", required=False)
@root_option
@click.option("--from", "start", metavar="POSITION", help="The first record: a sequence, or a time.")
@click.option("--to", "stop", metavar="POSITION", help="The last sequence, or a time, which ends before it.")
@click.option("--since", metavar="TIME", help="Records appended then or later: 5m, 14:00, yesterday, 2026-11-21.")
@click.option("--until", metavar="TIME", help="Records appended before then.")
@click.option("-i", "--ignore-case", is_flag=True, help="Ignore the case of ASCII letters.")
@click.option("-F", "--fixed-strings", "fixed", is_flag=True, help="PATTERN is a string, not a regular expression.")
@click.option("-v", "--invert-match", "invert", is_flag=True, help="Find the records that do not match.")
@click.option("-c", "--count", "only_count", is_flag=True, help="Print only the number of records.")
@click.option("--times", is_flag=True, help="Also print the append time of each record.")
@count_option(
    "--jobs",
    count_max=_JOBS_MAX,
    help_text="The number of processes; without it: one per processor.",
)
@json_option
def grep(
    root: Path,
    pattern: str,
    route: str | None,
    start: str | None,
    stop: str | None,
    since: str | None,
    until: str | None,
    ignore_case: bool,
    fixed: bool,
    invert: bool,
    only_count: bool,
    times: bool,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Print the records of ROUTE, or of every route, in which PATTERN is found: sequence, route, and the record.

    PATTERN is a Python regular expression for bytes. Only the value of each record is searched, not its key, and ^ and
    $ match its ends. Records are printed in the order of the log, byte for byte.

    The exit code is 0 if a record was found and 1 if none was. Damaged records are reported, the search continues, and
    the exit code is 4. If records of the range were reclaimed, the exit code is 12; if --from or --since names a
    position before them, it is 3, which takes precedence.
    """
    from wald.reading.search import Match, search
    from wald.reading.selection import select
    from wald.retention.missing import Missing

    log = wald.open(root)
    matcher = matcher_of(root, pattern, fixed=fixed, ignore_case=ignore_case, invert=invert)
    view = log.view()
    begin, end = _range(start, stop, since, until)
    warn_of_wrong_times(root, begin, end)
    selection = select(view, route if route is None else check_route(route), begin, end, DEFAULT_GROUP)
    show = _counter(matcher) if only_count else _objects(matcher) if as_json else _texts(matcher, times=times)
    chosen = {"-i": ignore_case, "-F": fixed, "-v": invert, "-c": only_count, "--times": times, "--json": as_json}
    options = "".join(f" {option}" for option, given in chosen.items() if given)
    operands = f"{operand(pattern)} {route or ''}".rstrip()

    command = f"grep{options}", f" {operands}"
    records, code = 0, 0
    jobs = jobs or len(os.sched_getaffinity(0))
    for event in search(view, selection, show, cannot_match=matcher.cannot_match, jobs=jobs):
        match event:
            case Match():
                records += event.records
                write_stdout(event.output)
            case Damaged():
                click.echo(f"wald: {event.message}\n  hint: {event.hint}", err=True)
                code = Damaged.exit_code
            case Missing():
                _report(event, event.error(stop=until or stop, command=command))
                code = code or Partial.exit_code
    if only_count:
        click.echo(json_line("grep", {"kind": "count", "records": records}) if as_json else str(records))
    return code or (0 if records else NOTHING_FOUND)


def _range(start: str | None, stop: str | None, since: str | None, until: str | None) -> tuple[Start, Stop | None]:
    """The positions that were asked for.

    Raises:
        InvalidInput: two of them are for the same end.
    """
    for one, other, names in ((start, since, "--from and --since"), (stop, until, "--to and --until")):
        if one is not None and other is not None:
            raise InvalidInput(f"{names} are mutually exclusive", hint="wald grep --help")
    begin: Start = "earliest"
    if start is not None or since is not None:
        if start is not None:
            begin = parse_position_option("--from", start, now())
        else:
            begin = parse_time_option("--since", since or "", now())
    if stop is not None:
        return begin, parse_position_option("--to", stop, now())
    return begin, None if until is None else parse_time_option("--until", until, now())


def _report(missing: Missing, error: NotFound) -> None:
    """Report records that were reclaimed.

    Raises:
        NotFound: a place was named at which they would begin.
    """
    if missing.asked:
        raise error
    click.echo(f"wald: {error.message}\n  hint: {error.hint}", err=True)


def _counter(matcher: Matcher) -> Callable[[Batch], Match]:
    from wald.reading.search import Match

    return lambda batch: Match(len(matcher.find_matches(batch)), b"")


def _texts(matcher: Matcher, *, times: bool) -> Callable[[Batch], Match]:
    """Sequence and route before the bytes of each record, and its time."""
    from wald.reading.search import Match

    def show(batch: Batch) -> Match:
        time = f"{utc(batch.append_time_ns, 9)} " if times else ""
        found = matcher.find_matches(batch)
        line = b"%%d %b%%b\n" % f"{batch.route} {time}".encode()
        return Match(len(found), line * len(found) % tuple(chain.from_iterable(found)))  # all at once: a step for each

    return show


def _objects(matcher: Matcher) -> Callable[[Batch], Match]:
    from wald.reading.search import Match

    def show(batch: Batch) -> Match:
        lines = [_object(record) for record in matcher.matching_records(batch)]
        return Match(len(lines), "".join(lines).encode())

    return show


def _object(record: Record) -> str:
    return f'{{"schema": "wald.grep/1", "kind": "record", {with_times(record)[1:]}\n'

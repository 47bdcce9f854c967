"""``wald read``: write records to stdout, search them, and move a cursor after stdout has accepted them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.options import GROUP_HELP, count_option, now, root_option, warn_of_wrong_times
from wald.cli.output import write_stdout
from wald.errors import Damaged, InvalidInput, Partial, WaldError
from wald.format.names import DEFAULT_GROUP, check_group, check_route
from wald.format.times import nanoseconds, parse_position_option, parse_time_option, utc
from wald.hints import command_line, quote
from wald.retention.cursors import CursorState, new_group_warning

if TYPE_CHECKING:
    from wald.format.records import Record
    from wald.log import Log
    from wald.reading.assembler import Batch, Senders
    from wald.reading.pattern import Matcher
    from wald.reading.search import Match
    from wald.reading.selection import NamedStart, Start, Stop
    from wald.retention.missing import Missing

COMMIT_SECONDS = 0.2  # between two moves of the cursor, because each is two syncs
NOTHING_FOUND = 1
_JOBS_MAX = 64
_OBJECTS = 1000  # JSON objects in one write


@click.command(
    cls=Command,
    epilog=examples(
        "wald read access --since 1h --grep ERROR --prefix",
        "wald read access --follow --commit --group billing | ./consumer",
    ),
)
@click.argument("route", required=False)
@root_option
@click.option("--from", "start", metavar="POSITION", help="earliest, end, cursor, a sequence, or a time.")
@click.option("--to", "stop", metavar="POSITION", help="The last sequence, or the time to stop before.")
@click.option(
    "--since", metavar="TIME", help="Only records appended since this time: 5m, 14:00, yesterday, 2026-11-21."
)
@click.option("--until", metavar="TIME", help="Only records appended before this time.")
@count_option("-n", "--last", "count", count_min=0, help_text="Only the last N records.")
@count_option("--limit", count_min=0, help_text="Only the first N records.")
@click.option("--grep", metavar="PATTERN", help="Only records whose value matches this regular expression.")
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: ignore the case of ASCII letters.")
@click.option("-F", "--fixed-strings", "fixed", is_flag=True, help="With --grep: PATTERN is a plain string.")
@click.option("-v", "--invert-match", "invert", is_flag=True, help="With --grep: only records that do not match.")
@click.option("-c", "--count", "only_count", is_flag=True, help="With --grep: print only the number of records.")
@count_option(
    "--jobs", count_max=_JOBS_MAX, hidden=True, help_text="With --grep: the number of processes.  [default: processors]"
)
@click.option("-f", "--follow", is_flag=True, help="At the end, wait for more records.")
@click.option("--group", help=GROUP_HELP)
@click.option("--commit", is_flag=True, help="Move the group's cursor once the records have been written to stdout.")
@click.option(
    "--on-missing",
    hidden=True,
    type=click.Choice(["error", "skip"]),
    help="What to do about reclaimed records.  [default: error if --from names a sequence or a time]",
)
@click.option("--prefix", is_flag=True, help="Print the sequence and the route before each record.")
@click.option("--times", is_flag=True, help="Print the append time before each record.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="json: one object per line.",
)
def read(root: Path, route: str | None, on_missing: str | None, **options: Any) -> int:  # Any: those of Asked
    """Write the records of ROUTE, or of every route, to stdout: each value unchanged, followed by a newline.

    Without --from, reading starts at the earliest record; with --group or --commit, after the group's cursor. A time
    (2026-11-21T10:00:00Z, 14:00, yesterday, 5m) is compared with the append time of records. `wald read R -n 20 -f`
    shows the last 20 records and then new ones.

    With --grep, the exit code is 1 if no record matches. PATTERN is a Python regular expression for bytes; ^ and $
    match the ends of a value, and keys are not searched. Several processes search, but not with -n, --limit, --follow
    or --commit.

    Damaged records are reported and skipped, and the exit code is 4; with --commit, reading ends there, with the cursor
    before them. If records were reclaimed, reading ends with exit code 3 if --from names a sequence or a time or the
    cursor is before them; otherwise it continues, and the exit code is 12. With --on-missing error it always ends; with
    --on-missing skip it skips missing records with exit code 0.
    """
    asked = Asked(root, route if route is None else check_route(route), **options)
    asked.check()
    log = wald.open(root)
    wanted = asked.range()
    warn_of_wrong_times(root, wanted.start, wanted.stop)
    matcher = asked.matcher()
    gaps = _Gaps(on_missing, asked)
    found = _read(log, asked, wanted, matcher, gaps)
    if asked.only_count:
        click.echo(found)
    if gaps.damaged:
        return Damaged.exit_code
    if gaps.partial:
        return Partial.exit_code
    return NOTHING_FOUND if matcher and not found else 0


def _read(log: Log, asked: Asked, wanted: Range, matcher: Matcher | None, gaps: _Gaps) -> int:
    """Write the wanted records; return the number of those that ``matcher`` has found."""
    from wald.reading.assembler import Senders

    route, group = asked.route, check_group(asked.group or DEFAULT_GROUP)
    if asked.count is not None:
        latest = of_latest(log, wanted, route, asked.count, matcher=matcher)
        if latest is None:
            return 0
        wanted = latest
    reads_on = asked.group and wanted.start == "cursor" and not asked.commit
    if reads_on and route is not None and log.cursor(route, group).state is CursorState.ABSENT:
        message = f"wald: group {group} has no cursor on route {route}: reading begins at the oldest record"
        click.echo(message, err=True)
    with closing(Senders(log.view)) as senders:
        output = _Output(asked, matcher, senders if asked.form == "json" else None)
        if matcher and asked.count is None and asked.limit is None and not (asked.follow or asked.commit):
            _search(log, asked, wanted, matcher, output, gaps)
            return output.found
        committing = _committing(log, route, group) if asked.commit and route is not None else nullcontext()
        batches = log.batches(
            route,
            wanted.start,
            wanted.stop,
            group=group,
            limit=None if matcher else asked.limit,
            follow=asked.follow,
            on_damage=None if asked.commit else gaps.report_damage,  # a cursor after damage lets RECLAIM delete it
            on_missing=gaps.report_missing,
        )
        with committing as commits:
            while not output.full and (batch := next(batches, None)):
                done = output.write(batch)
                if commits is not None:
                    commits.processed = done
        return output.found


def _search(log: Log, asked: Asked, wanted: Range, matcher: Matcher, output: _Output, gaps: _Gaps) -> None:
    from wald.reading.search import Match, search
    from wald.reading.selection import select

    view = log.view()
    selection = select(view, asked.route, wanted.start, wanted.stop, asked.group or DEFAULT_GROUP)
    jobs = asked.jobs or len(os.sched_getaffinity(0))
    for event in search(view, selection, output.search, cannot_match=matcher.cannot_match, jobs=jobs):
        match event:
            case Match():
                output.found += event.records
                write_stdout(event.output)
            case Damaged():
                gaps.report_damage(event)
            case _:
                gaps.report_missing(event)


def _committing(log: Log, route: str, group: str) -> _Commits:
    """Take over a group from its workers, unless that would repeat records they have processed."""
    if log.cursor(route, group).of_work_group:
        from wald.work.ownership import succeed_workers

        succeed_workers(log, route, group)
    if news := new_group_warning(log.root, route, group):
        click.echo(f"wald: {news}", err=True)
    return _Commits(log, route, group)


class _Output:
    """Formatter of records. ``senders`` is None for the raw format; ``found`` counts matching records."""

    def __init__(self, asked: Asked, matcher: Matcher | None, senders: Senders | None) -> None:
        self._senders, self._matcher = senders, matcher
        self._times, self._prefix, self._only_count = asked.times, asked.prefix, asked.only_count
        self._left = asked.limit if matcher else None
        self.found = 0

    @property
    def full(self) -> bool:
        return self._left == 0

    def search(self, batch: Batch) -> Match:
        from wald.reading.search import Match

        assert self._matcher is not None
        if self._only_count:
            return Match(len(self._matcher.find_matches(batch)), b"")
        if self._senders is None:
            found = self._matcher.find_matches(batch)
            return Match(len(found), self._lines(batch, found))
        objects = list(self._objects(batch, self._matcher.matching_records(batch), self._senders))
        return Match(len(objects), b"".join(objects))

    def write(self, batch: Batch) -> int:
        """Write a batch, or its matching records; return the last sequence processed."""
        if self._matcher is None:
            self._write_all(batch)
            return batch.last_sequence
        records = list(islice(self._matcher.matching_records(batch), self._left))
        if not self._only_count:
            self._write_records(batch, records)
        self.found += len(records)
        if self._left is not None:
            self._left -= len(records)
        return records[-1].sequence if self.full else batch.last_sequence

    def _write_all(self, batch: Batch) -> None:
        if self._senders is None and not self._times and not self._prefix:
            write_stdout(batch.raw())
        elif self._senders is None and not batch.is_columns and not self._prefix:
            before = _time(batch)
            write_stdout(before + bytes(batch.raw())[:-1].replace(b"\n", b"\n" + before) + b"\n")
        else:
            self._write_records(batch, batch.records())

    def _write_records(self, batch: Batch, records: Iterable[Record]) -> None:
        if self._senders is None:
            write_stdout(self._lines(batch, [(record.sequence, record.value) for record in records]))
            return
        objects = self._objects(batch, records, self._senders)
        while part := b"".join(islice(objects, _OBJECTS)):
            write_stdout(part)

    def _lines(self, batch: Batch, records: list[tuple[int, bytes]]) -> bytes:
        """Format all records at once, which is much faster than one by one."""
        time = _time(batch) if self._times else b""
        if self._prefix:
            line = b"%%d %b %b%%b\n" % (batch.route.encode(), time)
            return line * len(records) % tuple(chain.from_iterable(records))
        return (time + b"%b\n") * len(records) % tuple(value for _, value in records)

    def _objects(self, batch: Batch, records: Iterable[Record], senders: Senders) -> Iterator[bytes]:
        sender = {"sender": senders.of(batch.segment, batch.header).to_json()}
        for record in records:
            text = record.to_json(sender)
            if self._times:  # as the first keys
                event = "" if record.event_time_ns is None else f'"event_time": "{utc(record.event_time_ns, 9)}", '
                text = f'{{"append_time": "{utc(record.append_time_ns, 9)}", {event}{text[1:]}'
            yield text.encode() + b"\n"


def _time(batch: Batch) -> bytes:
    return f"{utc(batch.append_time_ns, 9)} ".encode()


@dataclass(slots=True)
class _Gaps:
    """Reporter of damaged and reclaimed records; reclaimed records may be an error."""

    on_missing: str | None
    asked: Asked
    damaged: bool = False
    partial: bool = False  # records were skipped without --on-missing

    def report_damage(self, error: Damaged) -> None:
        self.damaged = True
        click.echo(f"wald: {error.message}\n  hint: {error.hint}", err=True)

    def report_missing(self, missing: Missing) -> None:
        asked = self.asked
        form = "" if asked.form == "raw" else f" --format {asked.form}"
        command = f"read {missing.route or ''}".rstrip(), asked.again()
        error = missing.error(stop=asked.until or asked.stop, form=form, command=command)
        named = missing.asked and asked.count is None  # with -n, no start was named
        if self.on_missing == "error" or (self.on_missing is None and named):
            raise error
        self.partial = self.partial or self.on_missing is None
        click.echo(f"wald: {error.message}\n  hint: {error.hint}", err=True)


class _Commits:
    """Moves a cursor to :attr:`processed` periodically and at the end; while following, even if no records arrive.

    The cursor never moves backwards: records that are read again stay processed.
    """

    def __init__(self, log: Log, route: str, group: str) -> None:
        self._log, self._route, self._group = log, route, group
        self._committed = self.processed = log.cursor(route, group).effective
        self._stopped = threading.Event()
        self._failure: WaldError | OSError | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure
        self._commit()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(COMMIT_SECONDS):
                self._commit()
        except (WaldError, OSError) as error:
            self._failure = error

    def _commit(self) -> None:
        processed = self.processed
        if processed > self._committed:
            self._log.set_cursor(self._route, processed, self._group)
            self._committed = processed


_REPEATED = {"limit": "--limit", "group": "--group", "grep": "--grep", "form": "--format", "ignore_case": "-i"}
_REPEATED |= {"fixed": "-F", "invert": "-v", "only_count": "-c", "follow": "--follow", "commit": "--commit"}
_REPEATED |= {"prefix": "--prefix", "times": "--times"}
_NAMED: dict[str, NamedStart] = {"earliest": "earliest", "end": "end", "cursor": "cursor"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The unparsed options of ``wald read``; ``count`` is the value of -n."""

    root: Path
    route: str | None
    start: str | None
    stop: str | None
    since: str | None
    until: str | None
    count: int | None
    limit: int | None
    follow: bool
    group: str | None
    commit: bool
    grep: str | None
    ignore_case: bool
    fixed: bool
    invert: bool
    only_count: bool
    jobs: int | None
    prefix: bool
    times: bool
    form: str

    def check(self) -> None:
        for wrong, message, hint in self._conflicts():
            if wrong:
                raise InvalidInput(message, hint=hint)

    def _conflicts(self) -> Iterator[tuple[bool, str, str]]:
        read, last = command_line(self.root, f"read {self.route or ''}".strip()), f"-n {self.count}"
        lists = f"{command_line(self.root, 'route list')} lists them"
        yield self.commit and self.route is None, "--commit needs a ROUTE: a cursor belongs to one", lists
        both, where = self.start is not None and self.since is not None, "both say where reading begins"
        yield both, f"--since and --from are mutually exclusive: {where}", f"{read} --from {self.start}"
        both, where = self.stop is not None and self.until is not None, "both say where reading ends"
        yield both, f"--until and --to are mutually exclusive: {where}", f"{read} --to {self.stop}"
        matching = self.ignore_case or self.fixed or self.invert or self.only_count or self.jobs is not None
        searching = f"{read} --grep PATTERN"
        yield matching and self.grep is None, "-i, -F, -v, -c and --jobs need --grep", searching
        both = self.only_count and (self.follow or self.commit)
        yield both, "-c and --follow or --commit are mutually exclusive", f"{searching} -c"
        both = self.prefix and self.form == "json"
        yield both, "--prefix needs the raw format: JSON always has the sequence and route", f"{read} --format json"
        if self.count is None:
            return
        message = "-n and --limit are mutually exclusive: one takes the last records, the other the first"
        yield self.limit is not None, message, f"{read} {last}"
        skipping = "-n would skip records that the group has not read"
        yield self.commit or self.group is not None, skipping, f"{read} {last}, or --limit {self.count} instead"
        message = f"-n and --from {self.start} are mutually exclusive"
        yield self.start in ("cursor", "end"), message, f"{read} {last} --follow continues after the last"

    def range(self) -> Range:
        if self.since is not None:
            begin: Start = parse_time_option("--since", self.since, now())
        else:
            first = "cursor" if self.group or self.commit else "earliest"
            start = first if self.start is None else self.start
            begin = _NAMED[start] if start in _NAMED else parse_position_option("--from", start, now(), _NAMED)
        if self.until is not None:
            end: Stop | None = parse_time_option("--until", self.until, now())
        else:
            end = None if self.stop is None else parse_position_option("--to", self.stop, now())
        numbers = isinstance(begin, int) and isinstance(end, int) and begin > end
        times = isinstance(begin, datetime) and isinstance(end, datetime) and nanoseconds(begin) > nanoseconds(end)
        if numbers or times:
            began = f"--since {self.since}" if self.since else f"--from {self.start}"
            ended = f"--until {self.until}" if self.until else f"--to {self.stop}"
            swapped = f"--from {self.until or self.stop} --to {self.since or self.start}"
            raise InvalidInput(f"{began} {ended}: the end is before the start", hint=swapped)
        return Range(begin, end)

    def again(self) -> str:
        """Return the options to repeat when reading restarts at another record."""
        given = [(option, getattr(self, name)) for name, option in _REPEATED.items()]
        given = [each for each in given if each != ("--format", "raw")]
        values = [f" {option} {quote(str(value))}" for option, value in given if not isinstance(value, bool | None)]
        return "".join(values + [f" {option}" for option, value in given if value is True])

    def matcher(self) -> Matcher | None:
        if self.grep is None:
            return None
        from wald.reading.pattern import BadPattern, Matcher

        pattern = os.fsencode(self.grep)
        try:
            return Matcher(pattern, fixed=self.fixed, ignore_case=self.ignore_case, invert=self.invert)
        except BadPattern as error:
            shown = pattern.decode(errors="backslashreplace")
            finding = " ".join(filter(None, ["read", self.route, "-F --grep", quote(self.grep)]))
            message = f"{shown!r} is not a regular expression: {error}"
            raise InvalidInput(message, hint=f"{command_line(self.root, finding)} finds it literally") from error


@dataclass(frozen=True, slots=True)
class Range:
    """The start and the end of reading."""

    start: Start
    stop: Stop | None


def of_latest(log: Log, asked: Range, route: str | None, count: int, *, matcher: Matcher | None) -> Range | None:
    """Return the range of the last ``count`` records of ``route`` that match; None if no record matches."""
    from wald.files.uptime import read_steps
    from wald.format.names import SEQUENCE_MAX
    from wald.reading.latest import start_of_latest
    from wald.segments.seek import end_of, sequence_at, sequence_since

    view = log.view()
    if (isinstance(asked.start, datetime) or isinstance(asked.stop, datetime)) and read_steps(view.root):
        return _of_latest_counted(log, asked, route, count, matcher)
    end, last = end_of(view), SEQUENCE_MAX
    if isinstance(asked.stop, datetime):
        following = sequence_at(view, nanoseconds(asked.stop))
        if following < end:  # otherwise more records of the range may follow
            last = following - 1
            asked = replace(asked, stop=last)
    elif asked.stop is not None:
        last = asked.stop
    begins = sequence_since(view, nanoseconds(asked.start)) if isinstance(asked.start, datetime) else asked.start
    first = begins if isinstance(begins, int) else 1
    if first > last:
        return None
    latest = start_of_latest(view, route, count, last=last, find_records=matcher.matching_records if matcher else None)
    return asked if first >= latest and first > 1 else replace(asked, start=latest)


def _of_latest_counted(log: Log, asked: Range, route: str | None, count: int, matcher: Matcher | None) -> Range | None:
    """Find the last ``count`` records across clock steps by reading all matching records."""
    latest: deque[int] = deque(maxlen=count)
    for batch in log.batches(route, asked.start, asked.stop, on_damage=lambda _: None, on_missing="skip"):
        records = matcher.matching_records(batch) if matcher else batch.records()
        latest.extend(record.sequence for record in records)
    return replace(asked, start=latest[0]) if latest else None

"""The options of ``wald read``: their conflicts, the range that they select, and the pattern."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from wald.cli.times import now
from wald.errors import InvalidInput
from wald.format.times import nanoseconds, parse_position_option, parse_time_option
from wald.hints import command_line, quote

if TYPE_CHECKING:
    from wald.log import Log
    from wald.reading.pattern import Matcher
    from wald.reading.selection import NamedStart, Start, Stop

_NAMED: dict[str, NamedStart] = {"earliest": "earliest", "end": "end", "cursor": "cursor"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``wald read`` as they were typed; ``count`` is that of -n."""

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
        """Raise InvalidInput if options exclude each other."""
        for wrong, message, hint in self._conflicts():
            if wrong:
                raise InvalidInput(message, hint=hint)

    def _conflicts(self) -> Iterator[tuple[bool, str, str]]:
        read, last = command_line(self.root, f"read {self.route or ''}".strip()), f"-n {self.count}"
        routes = command_line(self.root, "route list")
        yield (
            self.commit and self.route is None,
            "--commit needs a ROUTE: a cursor belongs to one",
            f"{routes} lists them",
        )
        both = self.start is not None and self.since is not None
        yield (
            both,
            "--since and --from are mutually exclusive: both say where reading begins",
            f"{read} --from {self.start}",
        )
        both = self.stop is not None and self.until is not None
        yield both, "--until and --to are mutually exclusive: both say where reading ends", f"{read} --to {self.stop}"
        matching = self.ignore_case or self.fixed or self.invert or self.only_count or self.jobs is not None
        searching = f"{read} --grep PATTERN"
        yield matching and self.grep is None, "-i, -F, -v, -c and --jobs are for --grep", searching
        both = self.only_count and (self.follow or self.commit)
        yield both, "-c and --follow or --commit are mutually exclusive", f"{searching} -c"
        both = self.prefix and self.form == "json"
        yield both, "--prefix is for the raw format: JSON has the sequence and the route", f"{read} --format json"
        if self.count is None:
            return
        both = self.limit is not None
        yield (
            both,
            "-n and --limit are mutually exclusive: one takes the last records, the other the first",
            f"{read} {last}",
        )
        skipping = "-n would pass over records that the group has not read"
        yield self.commit or self.group is not None, skipping, f"{read} {last}, or --limit {self.count} in its place"
        named = self.start in ("cursor", "end")
        message = f"-n and --from {self.start} are mutually exclusive"
        yield named, message, f"{read} {last} --follow continues after the last"

    def range(self) -> Range:
        """
        Raises:
            InvalidInput: a position is invalid, or the end is before the start.
        """
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
        if _is_empty(begin, end):
            began = f"--since {self.since}" if self.since else f"--from {self.start}"
            ended = f"--until {self.until}" if self.until else f"--to {self.stop}"
            swapped = f"--from {self.until or self.stop} --to {self.since or self.start}"
            raise InvalidInput(f"{began} {ended}: the end is before the start", hint=swapped)
        return Range(begin, end)

    def again(self) -> str:
        """Return the options to repeat when reading starts again from another record."""
        values = {
            "--limit": self.limit,
            "--group": quote(self.group) if self.group else None,
            "--grep": None if self.grep is None else quote(self.grep),
            "--format": None if self.form == "raw" else self.form,
        }
        flags = {
            "-i": self.ignore_case,
            "-F": self.fixed,
            "-v": self.invert,
            "-c": self.only_count,
            "--follow": self.follow,
            "--commit": self.commit,
            "--prefix": self.prefix,
            "--times": self.times,
        }
        given = [f" {name} {value}" for name, value in values.items() if value is not None]
        return "".join(given + [f" {name}" for name, is_given in flags.items() if is_given])

    def matcher(self) -> Matcher | None:
        """
        Raises:
            InvalidInput: the pattern of --grep is not a regular expression.
        """
        if self.grep is None:
            return None
        from wald.reading.pattern import BadPattern, Matcher

        pattern = os.fsencode(self.grep)
        try:
            return Matcher(pattern, fixed=self.fixed, ignore_case=self.ignore_case, invert=self.invert)
        except BadPattern as error:
            shown = pattern.decode(errors="backslashreplace")
            finding = " ".join(filter(None, ["read", self.route, "-F --grep", quote(self.grep)]))
            raise InvalidInput(
                f"{shown!r} is not a regular expression: {error}",
                hint=f"{command_line(self.root, finding)} finds it literally",
            ) from error


def _is_empty(begin: Start, end: Stop | None) -> bool:
    match begin, end:
        case (int(), int()):
            return begin > end
        case (datetime(), datetime()):
            return nanoseconds(begin) > nanoseconds(end)
    return False


@dataclass(frozen=True, slots=True)
class Range:
    """The start and the end of reading."""

    start: Start
    stop: Stop | None


def of_latest(log: Log, asked: Range, route: str | None, count: int, *, matcher: Matcher | None) -> Range | None:
    """Return the range of the last ``count`` records of ``route`` that match; None if there are none."""
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
    """Find the last ``count`` records across clock steps, by reading all wanted records."""
    latest: deque[int] = deque(maxlen=count)
    for batch in log.batches(route, asked.start, asked.stop, on_damage=lambda _: None, on_missing="skip"):
        records = matcher.matching_records(batch) if matcher else batch.records()
        latest.extend(record.sequence for record in records)
    return replace(asked, start=latest[0]) if latest else None

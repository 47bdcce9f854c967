"""Which records ``wald read`` writes: the meaning of its options, and of those that do not go together."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from wald.cli.times import now
from wald.errors import InvalidInput
from wald.format.times import nanoseconds, parse_position_option, parse_time_option
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.log import Log
    from wald.reading.pattern import Matcher
    from wald.reading.selection import NamedStart, Start, Stop

_NAMED: dict[str, NamedStart] = {"earliest": "earliest", "end": "end", "cursor": "cursor"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The options as they were typed, of which some say which records and the others what is done with them.

    Attributes:
        start, stop: of --from and --to. since, until: the same for times only.
        count: of -n; limit: of --limit.
    """

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
    times: bool
    form: str

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            InvalidInput: with what to type instead.
        """
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

    def range(self) -> tuple[Start, Stop | None]:
        """The positions that were asked for.

        Raises:
            InvalidInput: one of them is none, or no record can lie between them.
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
        return begin, end

    def again(self) -> str:
        """The options that go on to hold when the command is typed again from another record on."""
        values = [
            f" --limit {self.limit}" if self.limit is not None else "",
            f" --group {shlex.quote(self.group)}" if self.group else "",
            f" --grep {shlex.quote(self.grep)}" if self.grep is not None else "",
        ]
        return "".join([*values, " --follow" * self.follow, " --commit" * self.commit, " --times" * self.times])


def _is_empty(begin: Start, end: Stop | None) -> bool:
    match begin, end:
        case (int(), int()):
            return begin > end
        case (datetime(), datetime()):
            return nanoseconds(begin) > nanoseconds(end)
    return False


@dataclass(frozen=True, slots=True)
class Range:
    """From where to where records are read."""

    start: Start
    stop: Stop | None


def of_latest(log: Log, asked: Range, route: str | None, count: int, *, matcher: Matcher | None) -> Range | None:
    """The last ``count`` records of a range: those of ``route``, and of these those that match; None: it holds none."""
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
        if following < end:  # else records may follow that are wanted, too
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

"""Pins of segments, and work groups with the states of their records; takes no locks and disturbs no owner."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.routes import fifo_problems
from wald.format.names import is_route
from wald.hints import command_line
from wald.log import Log
from wald.retention.backlog import Backlog, Condition, SegmentStatus, condition_of
from wald.retention.cursors import Cursor, CursorState
from wald.retention.progress import Lag, measure_lags
from wald.status import schema
from wald.status.findings import over_quota
from wald.work.ownership import RunningCommand, commands_of
from wald.work.snapshot import GroupStatus, Out, Waiting, WorkFile, read_status, work_files

PINS_MAX = 100  # of one segment: thousands of groups may each pin thousands of segments
QUOTA_SECONDS = 2.0  # how long the daemon may take to name the routes over their quota
_FIRST = 30  # runs of records in the same state


def explanation(log: Log, backlog: Backlog, now_ns: int) -> Iterator[schema.Explained]:
    """Yield the FIFOs with problems, the routes over their quota, each segment, each group, and the log."""
    for path, message in fifo_problems(log.root):
        yield schema.FifoProblem(str(path), message)
    for over in over_quota(log.root, seconds=QUOTA_SECONDS):
        yield schema.OverQuota.of(over)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for status in counted(backlog.segments(), counts, sizes):
        base = status.segment.base_sequence
        yield schema.PinnedSegment(
            base,
            status.segment.path.name,
            status.state.value,
            base,
            status.last_sequence,
            status.stored_bytes,
            state_of(status) == "free",
            status.problem,
            [schema.Pin(pin.route, pin.group, pin.at, pin.needs, pin.message) for pin in islice(status.pins, PINS_MAX)],
            max(0, len(status.pins) - PINS_MAX),
        )
    growth = backlog.growth_meter.growth(now_ns=now_ns)
    for group in backlog.groups.values():
        yield schema.PinningGroup.of(group, growth, now_ns)
    yield schema.WholeLog(
        _by_key(counts),
        _by_key(sizes),
        backlog.free_bytes,
        growth.bytes_per_second if growth else None,
        growth.seconds_until_full(backlog.free_bytes) if growth else None,
        dict(backlog.exclusive_bytes),
        schema.no_daemon_message(log.root),
    )


def counted(statuses: Iterable[SegmentStatus], counts: Counter[str], sizes: Counter[str]) -> Iterator[SegmentStatus]:
    """Yield the segments, and count them and their bytes by state."""
    for status in statuses:
        name = state_of(status)
        counts[name] += 1
        sizes[name] += status.stored_bytes
        yield status


def state_of(status: SegmentStatus) -> str:
    """Return the state for the headline; a complete segment may be free before it is sealed."""
    condition = condition_of(status)
    if condition in (Condition.FREE, Condition.WAITING):
        return "newest" if status.is_newest else "free"
    return str(condition.value)


def advice(root: str | os.PathLike[str], cursor: Cursor) -> Iterator[tuple[str, str]]:
    """Yield problems of a cursor that pins records, each with a command that helps, or ""."""
    wald_ = command_line(root)
    kept = f"everything {cursor.route} ever received is kept"
    if cursor.of_work_group:
        said = f"Group {cursor.group} of {cursor.route} is a work group: some records of its lag may be done."
        yield f"{said} To see what its oldest record waits for", f"{wald_} group show {cursor.route} {cursor.group}"
    if not is_route(cursor.group):
        yield f"{cursor.message}. Until then {kept}", ""
    elif cursor.state not in (CursorState.VALID, CursorState.ABSENT):
        said = f"{cursor.message}.\nIt counts as nothing processed, so {kept}. To set the position of {cursor.group}"
        yield said, f"{wald_} cursor set {cursor.route} SEQUENCE --group {cursor.group} --rewind"


def _by_key(counts: Counter[str]) -> dict[str, int]:
    return {state.replace(" ", "_"): count for state, count in counts.items()}


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A work group and its backlog."""

    seen: GroupStatus
    unfinished: Lag  # records starting at the first one that is not done
    behind: Lag  # records that the owner has not read yet
    commands: list[RunningCommand]  # running commands of wald-drain

    @property
    def left(self) -> list[RunningCommand]:
        """The commands that an earlier wald-drain has left running."""
        return [each for each in self.commands if each.left]

    def work(self) -> schema.WorkOfGroup:
        seen, picture = self.seen, self.seen.snapshot
        return schema.WorkOfGroup(
            schema.Owner(seen.owner.pid, seen.owner.command) if seen.owner else None,
            seen.damage,
            picture.floor,
            picture.end - 1,
            picture.open,
            count_of(picture.out()),
            count_of(picture.waiting()),
            len(picture.dead),
            self.behind.records,
            **schema.time_fields("oldest_append_time", self.unfinished.oldest_ns),  # type: ignore[arg-type]
            tries_max=picture.tries_max,
            commands=[schema.RunningCommand.made_of(each, command=each.words) for each in self.commands],
        )

    def fields(self) -> dict[str, object]:
        """Return the group as ``wald group list --json`` prints it."""
        work = schema.fields_of(self.work())
        named = {"route": self.seen.file.route, "group": self.seen.file.group, "path": str(self.seen.file.path)}
        head = {"owner": work.pop("owner"), "damage": work.pop("damage"), "cursor": self.seen.cursor.sequence}
        return named | head | work


def found_groups(log: Log, routes: Iterable[str], now_ns: int) -> list[FoundGroup]:
    seen = []
    for route in routes:
        for file in work_files(log.root, route):
            with suppress(FileNotFoundError):  # removed in the meantime
                seen.append(read_status(log, file, now_ns))
    return with_lags(log, seen)


def with_lags(log: Log, seen: list[GroupStatus]) -> list[FoundGroup]:
    begins = []
    for number, each in enumerate(seen):
        at, picture = each.cursor, each.snapshot
        for name, sequence in (("unfinished", picture.floor), ("behind", picture.end - 1)):
            begins.append(Cursor(at.route, f"{number} {name}", at.path, CursorState.VALID, sequence))
    lags = measure_lags(log.view(), begins)
    commands = commands_of(seen)
    return [
        FoundGroup(
            each,
            lags[each.cursor.route, f"{number} unfinished"],
            lags[each.cursor.route, f"{number} behind"],
            commands.get(each.file.path, []),
        )
        for number, each in enumerate(seen)
    ]


class WorkCounts(NamedTuple):
    """Numbers of records of a work group by state."""

    leased: int = 0
    waiting: int = 0
    giving_up_to: tuple[str, ...] = ()  # the route of the dead letter of each record that is being given up
    unusable: bool = False  # True if its journal is damaged
    first: tuple[Out | Waiting, ...] = ()  # the first leased runs, and the first delayed ones


def work_counts(log: Log, groups: list[tuple[str, str]]) -> dict[tuple[str, str], WorkCounts]:
    """Count the records of the work groups among these groups; the cost is proportional to their journals."""
    found = {}
    files: dict[tuple[str, str], WorkFile] = {}
    for route in {route for route, _ in groups}:
        with suppress(NotFound, InvalidInput, OSError):  # removed in the meantime
            files |= {(route, each.group): each for each in work_files(log.root, route)}
    for key in groups:
        if key in files:
            with suppress(NotFound, InvalidInput, OSError, Damaged):  # removed in the meantime
                seen = read_status(log, files[key], time.time_ns())
                out, waiting = list(seen.snapshot.out()), list(seen.snapshot.waiting())
                goals = tuple(each.route for each in seen.snapshot.dead)
                first: tuple[Out | Waiting, ...] = (*out[:_FIRST], *waiting[:_FIRST])
                found[key] = WorkCounts(count_of(out), count_of(waiting), goals, bool(seen.damage), first)
    return found


def count_of(runs: Iterable[Out | Waiting]) -> int:
    return sum(each.last - each.first + 1 for each in runs)

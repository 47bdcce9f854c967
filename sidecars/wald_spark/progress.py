"""Runs of a job: the records that are new since the last run, the output directory, and the tasks.

An unfinished record delays its route; the job continues with the other routes.

A task calls a function with each piece. A result is sent as an update of an accumulator. Spark passes it to the driver
when a task ends, once for each task even if it was tried several times. So the first result arrives while the last
piece still waits, unlike with ``collect``, and all executors work, unlike with ``toLocalIterator``. No rows are sent: a
piece describes the work (a path and a range, for example), the executor reads and writes, and the result is a summary.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from pyspark.accumulators import Accumulator, AccumulatorParam

from wald.errors import Damaged, InvalidInput, Locked, NotFound, Refused, Unavailable, UnsupportedFormat, WaldError
from wald.files.disk import Disk
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, LogState, decode_state
from wald.format.times import utc
from wald.hints import command_line
from wald.segments.continuity import Continuity, LastSeen, last_seen_at
from wald.segments.durable_end import Bound
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
from wald.segments.reader import OpenSegment, RawSegment, SegmentItem, SkippedBatches
from wald.segments.view import SegmentGone, View
from wald.setting_types import format_bytes
from wald_spark.locations import LogLocation, Shipped, find_locations
from wald_spark.options import PARTIAL_HINT, PARTIAL_OPTION, Tolerance
from wald_spark.plan import LogPiece, Range, first_record, packed, pieces_of
from wald_spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_BYTES = 32 << 20  # of a piece; chunks are made of pieces


@dataclass(slots=True)
class Run:
    """One run of a job at time ``at``; ``spark`` is called only if there is something to do."""

    tolerance: Tolerance
    at: str
    spark: Callable[[], AbstractContextManager[SparkSession]]
    held_back: list[dict[str, str | int]] = field(default_factory=list)  # JSON, for routes with an unfinished record
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def plan(
        self, locations: Sequence[LogLocation], before: Mapping[str, Progress], routes: Sequence[str] | None
    ) -> list[NewRecords]:
        found = [new_records(each, before.get(each.log), routes, self.tolerance) for each in locations]
        self.held_back += [
            {"root": str(new.location.root.path), "route": route, "sequence": last + 1}
            for new in found
            for route, last in sorted(new.after.held_back.items())
        ]
        return [new for new in found if new.due]

    def passed_over(self, new: NewRecords) -> list[str]:
        """Return messages about records of ``new`` that could not be read."""
        reports = sorted(Path(self.tolerance.report).glob(f"{new.location.log}-*.jsonl"))
        lines = [line for path in reports for line in path.read_text(encoding="utf-8").splitlines()]
        return list(dict.fromkeys(json.loads(line)["message"] for line in lines))  # two ranges may report the same

    def lines(self, result: Sequence[str], passed_over: Sequence[str], raw_bytes: int, to: str = "") -> Iterator[str]:
        """Yield the lines of a report: delayed routes, the result, and the amount read."""
        for each in self.held_back:
            yield (
                f"{each['root']}: route {each['route']} waits: record {each['sequence']} has begun but not ended; "
                "other routes continue"
            )
        yield from result
        if passed_over:
            yield f"skipped damage {len(passed_over)} times, listed in {self.tolerance.report}: {passed_over[0]}"
        if raw_bytes:
            yield f"{format_bytes(raw_bytes)} of records in {self.seconds:.1f} s with Spark's start{to}"


@contextmanager
def running(program: str, out: Path, failed: str, *, permissive: bool, is_partial: bool, master: str) -> Iterator[Run]:
    at = utc(time.time_ns())
    tolerance = Tolerance(permissive, permissive, str(out / "_wald" / "passed-over" / at), is_partial)
    with locked_by(program, out / "_wald", Disk()), permissive_hint(failed):
        yield Run(tolerance, at, partial(session, program, master=master))


@contextmanager
def locked_by(program: str, directory: Path, disk: Disk) -> Iterator[None]:
    """Lock ``directory/lock``, which names the owning program; create the directory if it is missing."""
    disk.make_directory(directory)
    path = directory / "lock"
    descriptor = disk.open_lock(path)
    try:
        locked = disk.lock(descriptor)
        owner = path.read_text().strip()
        if owner not in ("", program):
            message = f"{directory.parent}: created by {owner}; {program} needs a separate directory"
            raise Refused(message, hint="another --out")
        if not locked:
            hint = "wait until it has ended, or choose another --out"
            raise Locked(f"{directory.parent}: another {program} writes there", hint=hint)
        if not owner:
            disk.write(descriptor, [f"{program}\n".encode()], 0)
        yield
    finally:
        disk.close(descriptor)


@contextmanager
def permissive_hint(outcome: str) -> Iterator[None]:
    """Replace a hint about a data source option with one about ``--permissive``, and name the ``outcome``."""
    try:
        yield
    except (Damaged, NotFound) as error:
        if ".option(" not in error.hint:
            raise
        hint = "--permissive skips unreadable records"
        if error.hint.startswith(PARTIAL_HINT):
            hint = f"{PARTIAL_HINT.replace(PARTIAL_OPTION, '--partial')}; {hint}"
        raise type(error)(f"{error.message}; {outcome}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class Progress:
    """Position up to which a log has been processed, and the daemon's start at that time, as in :class:`LastSeen`."""

    last: int  # of all routes except those in ``held_back``
    held_back: Mapping[str, int] = field(default_factory=dict)  # the last record of each route that waits
    epoch: int = field(default=0, compare=False)
    life: str = field(default="", compare=False)

    def to(self, end: LogEnd) -> Progress:
        """Return the position at ``end``; unchanged if the routes of unfinished records are unknown."""
        unknown = end.routes is None and (end.begun or self.held_back)
        if unknown or end.last < self.last:
            return self
        return Progress(end.last, {route: begun - 1 for route, begun in end.begun.items()})

    def ranges(self, after: Progress, end: LogEnd, wanted: frozenset[str] | None) -> list[Range]:
        """Return ranges that contain each record of ``wanted`` (None: all routes) from here to ``after`` once."""
        apart = {*self.held_back, *after.held_back}
        apart = apart if wanted is None else apart & wanted
        others = (end.routes or frozenset()) - apart if apart else wanted
        ranges = [Range(others, self.last + 1, after.last)]
        ranges += [
            Range(frozenset({route}), self.held_back.get(route, self.last) + 1, after.held_back.get(route, after.last))
            for route in sorted(apart)
        ]
        return [each for each in ranges if each.first <= each.last and (each.routes is None or each.routes)]


Chunk = tuple[LogPiece, ...]
"""Neighbouring pieces of one log that one task reads."""


def raw_bytes_of(pieces: Iterable[LogPiece]) -> int:
    return sum(piece.raw_bytes for piece in pieces)


@dataclass(frozen=True, slots=True)
class NewRecords:
    """New records of one log: ``pieces`` has all wanted ones after ``before``."""

    location: LogLocation
    before: Progress
    after: Progress
    pieces: list[LogPiece]

    @property
    def due(self) -> bool:
        return self.before != self.after

    @property
    def raw_bytes(self) -> int:
        return raw_bytes_of(self.pieces)

    def chunks(self, limit_bytes: int) -> list[Chunk]:
        return packed(self.pieces, limit_bytes=limit_bytes)


def find_logs(paths: Sequence[str], routes: Sequence[str] | None) -> list[LogLocation]:
    locations = []
    for location in find_locations(paths):
        if not isinstance(location, LogLocation):
            raise InvalidInput(
                f"{location.address}: an archive; jobs read logs", hint='spark.read.format("wald") reads an archive'
            )
        locations.append(location)
    known = {route for location in locations for route in location.root.route_names()}
    unknown = [route for route in routes or () if route not in known]
    if unknown and not any(isinstance(location.root, Shipped) for location in locations):
        raise NotFound(f"no log has route {unknown[0]!r}", hint=f"routes: {', '.join(sorted(known))}")
    return locations


def new_records(
    location: LogLocation, before: Progress | None, routes: Sequence[str] | None, tolerance: Tolerance
) -> NewRecords:
    view = location.view()
    wanted = None if routes is None else frozenset(routes)
    if before is not None and view.head is not None:
        hint = f"another --out begins with the oldest record; {command_line(view.root.path, 'verify')} checks the log"
        seen = LastSeen(before.last, before.epoch, before.life)
        Continuity(view.root, view.log_id, seen, hint=hint).check(view.head)
    end = LogEndTracker(wanted).end(view)
    begun = before or Progress(first_record(view, partial=tolerance.partial) - 1)
    after = begun.to(end)
    pieces = [
        piece
        for each in begun.ranges(after, end, wanted)
        for piece in pieces_of(view, each, limit_bytes=PIECE_BYTES, tolerance=tolerance, gaps=before is None)
    ]
    if view.head is not None:
        now = last_seen_at(view.root, view.head)
        after = replace(after, epoch=now.epoch, life=now.life)
    return NewRecords(location, begun, after, pieces)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """End of a log, and its unfinished records."""

    last: int = 0  # of complete and unfinished records
    begun: Mapping[str, int] = field(default_factory=dict)  # the unfinished record of each route that has one
    routes: frozenset[str] | None = frozenset()  # the requested ones that have had records; None if unknown

    @property
    def complete(self) -> int:
        """The last sequence before the first incomplete record; 0 if no record is complete."""
        return min((sequence - 1 for sequence in self.begun.values()), default=self.last)


class LogEndTracker:
    """Tracker of the end of ``routes`` (None: all), which reads only new records each time.

    A record whose end is lost to damage does not delay its route: its reader reports the damage.
    """

    def __init__(self, routes: frozenset[str] | None) -> None:
        self._routes = routes
        self._seen: Bound | None = None
        self._base = 0
        self._position = FIRST_BATCH  # in the segment of this base; everything before it has been read
        self._state = LogState()  # at that position
        self._all_routes = True  # whether the state has all routes

    def end(self, view: View) -> LogEnd:
        """Return the end of the log; read no file if the bound has not moved."""
        bound = view.bound
        if bound.sequence is None or bound != self._seen:  # a bound without a sequence does not show changes
            self._read_newest(view)
            self._seen = bound
        begun = self._state.open_records
        last = self._state.next_sequence - 1 if bound.sequence is None else bound.sequence
        if self._routes is None:
            return LogEnd(last, dict(begun), frozenset(self._state.routes) if self._all_routes else None)
        return LogEnd(last, {route: at for route, at in begun.items() if route in self._routes}, self._routes)

    def _read_newest(self, view: View) -> None:
        while (newest := _newest(view)) is not None:
            try:
                opened = view.open(newest)
            except SegmentGone as gone:
                view = view.without(gone, newest)
                continue
            except Damaged:
                self._base, self._state, self._all_routes = 0, LogState(newest.base_sequence), False
                return
            with closing(opened) as segment:
                self._read(segment, view.limit(newest))
            return
        self._base, self._state, self._all_routes = 0, LogState(), False

    def _read(self, segment: OpenSegment, limit: int | None) -> None:
        known = segment.base_sequence == self._base and (limit is None or self._position <= limit)
        # A segment without records may have been replaced, and its first batch may have another length.
        if not known or self._position == FIRST_BATCH:
            self._begin(segment)
        for found in segment.batches(self._position, limit, self._routes):
            self._apply(found)
        tail = segment.tail if isinstance(segment, RawSegment) else None
        if tail is not None and (tail.garbage_bytes or (limit is not None and tail.offset < limit)):
            self._state.open_records.clear()  # it ends in damage or too early
            self._position = tail.offset if limit is None else limit

    def _begin(self, segment: OpenSegment) -> None:
        self._base, self._position = segment.base_sequence, FIRST_BATCH
        self._state, self._all_routes = LogState(segment.base_sequence), False
        first = next(segment.batches(FIRST_BATCH, None), None)  # durable before the segment had its name
        if not isinstance(first, StoredBatch) or not first.header.is_control:
            return
        try:
            state = decode_state(first.payload)
        except BadControl as error:
            raise UnsupportedFormat(
                f"{segment.path}: offset {segment.file_offset(first.position)}: {error}",
                hint="install a newer wald: docs/install.md",
            ) from error
        # A record followed by another one of its route has lost its end.
        begun = {route: at for route, at in state.open_records.items() if state.routes.get(route) == at}
        self._state = LogState(segment.base_sequence, routes=state.routes, open_records=begun)
        self._all_routes = True

    def _apply(self, found: SegmentItem) -> None:
        state = self._state
        if isinstance(found, DamagedBytes):
            state.open_records.clear()  # a piece of any of them may be missing
            self._position = found.offset + found.length
        elif isinstance(found, SkippedBatches):
            state.next_sequence = max(state.next_sequence, found.next_sequence)
            self._position = found.position
        elif not found.header.is_control:
            self._position = found.end
            continued = found.header.continues_sequence
            lost = continued != 0 and state.open_records.get(found.route) != continued
            state.apply(found.header, found.route)
            if lost and not found.header.count:
                state.open_records.pop(found.route, None)  # its beginning is missing


def _newest(view: View) -> Segment | None:
    """Return the segment in which the readable bytes end; None if it is missing."""
    bound = view.bound
    readable = (segment for segment in reversed(view.segments) if segment.base_sequence <= bound.segment)
    newest = next(readable, None)
    missing = newest is not None and bound.sequence is not None and newest.base_sequence < bound.segment
    return None if missing else newest


P = TypeVar("P")
_Outcome = tuple[int, bytes | WaldError | OSError]

_TASKS_PER_CORE = 64  # a task costs some 30 ms, so more pieces share tasks
_PR_SET_PDEATHSIG = 1
_TRACEBACK = "Traceback (most recent call last):"


def run_tasks(
    spark: SparkSession, pieces: Sequence[P], work: Callable[[P], bytes], *, on_done: Callable[[int], None]
) -> Generator[tuple[int, bytes], None, None]:
    """Call ``work`` with each piece on an executor; yield the number of each piece and its result, as they finish.

    The first ``next`` starts the job. Pieces are started in their order, so put the largest first. A piece is tried
    again after a failure, and after an executor was lost, so ``work`` must be repeatable. Closing the generator cancels
    the rest.

    Args:
        work: can be pickled, as the pieces: a function of a module that executors can import, or a frozen dataclass
            with ``__call__``. The results must be small, in total less than ``spark.driver.maxResultSize``.
        on_done: called in this thread with the number of each finished piece, before its result is yielded.
    """
    context, group, inbox = spark.sparkContext, f"wald {uuid.uuid4()}", _Inbox()
    task = _Task(work, context.accumulator(inbox, _Updates()))
    numbered = list(enumerate(pieces))
    count = min(len(numbered), _TASKS_PER_CORE * context.defaultParallelism)
    shares = [numbered[first::count] for first in range(count)]

    def wait_for_spark() -> None:
        end: Exception | None = None
        try:
            if shares:
                context.setJobGroup(group, "wald", interruptOnCancel=True)
                context.parallelize(shares, len(shares)).foreach(task)
        except Exception as error:  # noqa: BLE001 - raised below
            end = error
        inbox.queue.put(end)  # Spark passes on the update of a task before it counts the task as done

    thread = threading.Thread(target=wait_for_spark, daemon=True)
    thread.start()
    try:
        while (arrived := inbox.queue.get()) is not None:
            if isinstance(arrived, Exception):
                hint = "see the executors' logs; an executor that runs out of memory needs fewer cores"
                raise Unavailable(f"Spark has given up: {_reason(arrived)}", hint=hint) from arrived
            number, outcome = arrived
            if isinstance(outcome, Exception):
                raise outcome
            on_done(number)
            yield number, outcome
    finally:
        while thread.is_alive():
            with suppress(Exception):  # the JVM may have been killed; then the thread ends with an error
                context.cancelJobGroup(group)  # has no effect before the job has been submitted
            thread.join(0.2)


class _Inbox(list[_Outcome]):
    """The driver's accumulator value: additions go into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[_Outcome | Exception | None] = SimpleQueue()

    def extend(self, outcomes: Iterable[_Outcome]) -> None:
        for outcome in outcomes:
            self.queue.put(outcome)


class _Updates(AccumulatorParam[list[_Outcome]]):
    """Accumulator of outcomes: a list on an executor, the inbox on the driver."""

    def zero(self, value: list[_Outcome]) -> list[_Outcome]:  # noqa: ARG002
        return []

    def addInPlace(self, value1: list[_Outcome], value2: list[_Outcome]) -> list[_Outcome]:  # noqa: N802 - PySpark's
        value1.extend(value2)
        return value1


@dataclass(frozen=True, slots=True)
class _Task(Generic[P]):
    """Work of an executor on the pieces of one task."""

    work: Callable[[P], bytes]
    outcomes: Accumulator[list[_Outcome]]

    def __call__(self, share: list[tuple[int, P]]) -> None:
        end_with_parent()
        for number, piece in share:
            try:
                self.outcomes.add([(number, self.work(piece))])
            except (WaldError, OSError) as error:
                self.outcomes.add([(number, error)])


def end_with_parent(program: bytes = b"pyspark.daemon") -> None:
    """Make this process end when its parent ends, if ``program`` is on the parent's command line.

    PySpark forks workers from a separate process. If that process is killed with the driver, a worker would not notice
    until it has finished its piece, and would still write during the next run.
    """
    parent = os.getppid()
    try:
        forks_workers = program in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return
    if forks_workers:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)


def _reason(error: Exception) -> str:
    """Return the line of Spark's message that states the reason: the exception of Python, if there is one."""
    lines = str(error).splitlines()
    reason = lines[:1]
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            reason = list(takewhile(lambda each: not each.startswith("\tat "), lines[number + 1 :]))
            break
    return next((line.strip() for line in reversed(reason) if line.strip()), type(error).__name__)

"""Streams: where a stream begins in each log, where the next trigger ends, and the pieces to read for it.

A trigger covers the records of each log from the end of the last trigger up to the first incomplete record, or fewer
if limits apply. So triggers neither overlap nor leave gaps. Each log gets an equal share of the limits, and other logs
get the part of a share that a log does not need, so no log starves. Every trigger reads something: if the next record
of every log is too long, the log whose turn it is gets one record.

The first trigger that meets a log decides where the stream begins in it, and the offsets record that. So the trigger is
the same when Spark plans it again after a crash, even if records were appended or deleted in between.

A poll of an unchanged log only reads its head; for shipped segments it lists their directory. The paths are searched
again every few seconds, because a pattern may match more logs by then; matches that are not logs are ignored. Counting
reads no records: the index of a sealed segment has a table of batches; in a raw segment, the headers are read.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wald.errors import Damaged, InvalidInput, NotFound, Refused, Replaced, RolledBack
from wald.files.identity import read_identity
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.head import Head
from wald.format.sealed_index import BadSealed, SealedIndex
from wald.segments.continuity import Continuity, LastSeen
from wald.segments.durable_end import lost_head, read_head
from wald.segments.reader import OpenSegment, SealedSegment
from wald.segments.view import SegmentGone, View
from wald_spark.checkpoint import Offsets, Position
from wald_spark.locations import LogLocation, Shipped, find_locations, is_pattern, is_remote, local_path
from wald_spark.options import Limits, Options, StreamOptions
from wald_spark.plan import LogPiece, Range, first_record, pieces_of
from wald_spark.progress import LogEndTracker
from wald_spark.query import require_routes

SEARCH_SECONDS = 5.0
_HINT = "a stream of this copy needs another checkpointLocation"
_ENDLESS = 1 << 62
_LAST = 1 << 63


class Triggers:
    """Planner of the triggers of one stream."""

    def __init__(self, options: Options, stream: StreamOptions) -> None:
        self._options = options
        self._stream = stream
        self._logs = StreamLogs(options.paths, options.routes)
        self._last: dict[str, int] | None = None
        self._turn = 0
        self.latest: Offsets | None = None  # where the last trigger would have ended without a limit

    def start(self) -> Offsets:
        """Return the offsets of a new stream, which knows no log yet."""
        return Offsets(routes=self._options.routes)

    def close(self) -> None:
        """Let the stream end with the records that exist now."""
        self._last = {log: found.end for log, found in self._poll().items()}

    def end(self, start: Offsets, limits: Limits) -> Offsets:
        """Return the end of the trigger that begins at ``start``; ``start`` itself if there are no new records."""
        self._require_same_routes(start)
        logs = self._poll()
        for log, position in start.logs.items():
            if log not in logs:
                self._require_loss_tolerated(log, position)
        if logs and not start.logs:
            if unknown := sorted(self._stream.first.keys() - logs.keys()):
                message = f"startingOffsets names log {unknown[0]}, which is missing"
                raise InvalidInput(message, hint=f"there are {', '.join(logs)}")
            require_routes([found.location for found in logs.values()], self._options.routes or frozenset())
        positions = dict(start.logs)
        backlogs = dict(self._backlogs(logs, positions, new=not start.logs))

        def moved(ends: Iterable[int]) -> Offsets:
            """Return the positions at ``ends``; a position that does not move stays equal, even after a restart."""
            there = {log: end for log, end in zip(backlogs, ends, strict=True) if end != positions[log].last}
            return Offsets(
                {**positions, **{log: logs[log].at(positions[log], there[log]) for log in there}}, start.routes
            )

        self.latest = moved(backlog.end for backlog in backlogs.values())
        ends = admit(list(backlogs.values()), limits, turn=self._turn)
        self._turn += 1
        return moved(ends)

    def _backlogs(
        self, logs: Mapping[str, StreamLog], positions: dict[str, Position], *, new: bool
    ) -> Iterator[tuple[str, Backlog]]:
        """Yield the logs with new records, and assign a position to each log seen for the first time."""
        for log, found in logs.items():
            end = found.end if self._last is None else self._last.get(log)
            if end is None:
                continue
            position = positions[log] = positions.get(log) or self._begin(log, found, end, new=new)
            found.require_past(position)
            if position.last < end:
                assert found.view is not None
                yield log, Backlog(position.last, end, found.extents.between(found.view, position.last, end))

    def pieces(self, start: Offsets, end: Offsets) -> list[LogPiece]:
        self._require_same_routes(end)
        logs = self._poll()
        pieces: list[LogPiece] = []
        for log, position in end.logs.items():
            after = start.logs[log].last if log in start.logs else position.began
            if after < position.last:
                if log in logs:
                    logs[log].require_past(position)
                    pieces += self._log_pieces(logs[log], after + 1, position.last)
                else:
                    self._require_loss_tolerated(log, position)
        return pieces

    def _poll(self) -> Mapping[str, StreamLog]:
        return self._logs.poll(may_vanish=self._options.tolerance.loss)

    def _log_pieces(self, found: StreamLog, first: int, last: int) -> list[LogPiece]:
        assert found.view is not None
        known = found.view.bound.sequence
        if last > (found.end if known is None else known):
            root = found.location.root
            if known is not None:
                raise lost_head(root, found.view.bound)
            raise Damaged(
                f"{root.path}: log {found.location.log} ends with record {found.end}, but the stream has seen record "
                f"{last}: its newest segments are missing",
                hint=f"ls {root.segments}; copy the segments again",
            )
        return pieces_of(
            found.view,
            Range(self._options.routes, first, last),
            limit_bytes=self._options.partition_bytes,
            tolerance=self._options.tolerance,
        )

    def _begin(self, log: str, found: StreamLog, end: int, *, new: bool) -> Position:
        """Return the position at which the stream begins in a log; in a log that appeared later, the oldest record."""
        assert found.view is not None
        if new and self._stream.starting == "latest":
            began = end
        elif new and log in self._stream.first:
            began = self._stream.first[log] - 1
            if began > max(end, found.head.sequence if found.head else 0):
                raise NotFound(
                    f"{found.location.root.path}: record {began + 1}, which startingOffsets names, was never issued",
                    hint='.option("startingOffsets", "latest") begins with the next one',
                )
        else:
            began = first_record(found.view, partial=self._options.tolerance.partial) - 1
            if began + 1 < found.oldest:  # reported before Spark keeps an offset
                self._log_pieces(found, began + 1, found.oldest - 1)
        return found.at(Position(began, began), began)

    def _require_same_routes(self, offsets: Offsets) -> None:
        """Refuse a change of routes: the stream has skipped earlier records of others."""
        if offsets.routes != self._options.routes:
            before, now = _named(offsets.routes), _named(self._options.routes)
            raise Refused(
                f"the checkpoint belongs to a stream of {before}, but this stream reads {now}",
                hint="use a separate checkpointLocation, with startingOffsets at the other one's position",
            )

    def _require_loss_tolerated(self, log: str, position: Position) -> None:
        if not self._options.tolerance.loss:
            raise NotFound(
                f"{', '.join(self._options.paths)}: log {log}, read up to record {position.last}, is missing",
                hint='restore it; .option("failOnDataLoss", "false") continues without it',
            )


def _named(routes: frozenset[str] | None) -> str:
    return "all routes" if routes is None else f"routes {', '.join(sorted(routes))}"


class StreamLog:
    """One log, as of its last poll."""

    def __init__(self, location: LogLocation, routes: frozenset[str] | None) -> None:
        self.location = location
        self.extents = Extents(routes)
        self.head: Head | None = None  # None if it is lost, or the segments were shipped
        self.view: View | None = None  # None before the first poll
        self.end = 0  # the last sequence up to which every record of the routes is complete
        self._end_tracker = LogEndTracker(routes)
        self._continuity = Continuity(location.root, location.log_id, hint=_HINT)
        self._verified: Position | None = None

    @property
    def oldest(self) -> int:
        """The oldest record; the next one if there are no records."""
        segments = self.view.segments if self.view else ()
        return segments[0].base_sequence if segments else self.end + 1

    def poll(self) -> None:
        """Read how far the log extends now."""
        head = None
        with suppress(Damaged):  # derived, and written again at the next commit
            head = None if isinstance(self.location.root, Shipped) else read_head(self.location.root)
        if head is not None:
            try:
                self._continuity.check(head)
            except RolledBack:
                raise
            except Replaced:
                self._require_same_log()
            if head == self.head:
                return
        self._require_same_log()
        view = self.location.view()
        if self.view is None or (view.bound, view.listing) != (self.view.bound, self.view.listing):
            self.end = self._end_tracker.end(view).complete
        self.head, self.view = head, view

    def require_past(self, position: Position) -> None:
        if self.head is not None and position != self._verified:
            seen = LastSeen(position.last, position.epoch, position.life)
            Continuity(self.location.root, self.location.log_id, seen, hint=_HINT).check(self.head)
            self._verified = position

    def at(self, position: Position, last: int) -> Position:
        """Return ``position`` moved to ``last``, with the daemon start seen by the last poll."""
        seen = self._continuity.last_seen
        return Position(position.began, last, seen.epoch, seen.life) if seen else Position(position.began, last)

    def _require_same_log(self) -> None:
        root = self.location.root
        if isinstance(root, Shipped):
            if not root.path.is_dir():
                raise NotFound(f"{root.path}: log {self.location.log} is no longer there", hint=f"ls {root.path}")
        elif read_identity(root).log_id != self.location.log_id:
            raise NotFound(f"{root.path}: log {self.location.log} is no longer there", hint=f"cat {root.identity}")


class StreamLogs:
    """Logs at ``paths``, by id; the paths are searched every ``search_seconds``."""

    def __init__(
        self, paths: Sequence[str], routes: frozenset[str] | None, *, search_seconds: float = SEARCH_SECONDS
    ) -> None:
        self._paths = [path if is_remote(path) else local_path(path, hint="") for path in paths]
        self._patterns = {path for path in self._paths if is_pattern(path)}
        self._routes = routes
        self._search_seconds = search_seconds
        self._logs: dict[str, StreamLog] = {}
        self._next_search: float | None = None

    def poll(self, *, may_vanish: bool) -> Mapping[str, StreamLog]:
        """Return the current logs, by id; a log that is gone is an error unless it ``may_vanish``."""
        if self._next_search is None or time.monotonic() >= self._next_search:
            self._search()
        for log_id, log in list(self._logs.items()):
            try:
                log.poll()
            except NotFound:
                if not may_vanish:
                    raise
                del self._logs[log_id]
                self._next_search = 0.0
        return self._logs

    def _search(self) -> None:
        """Find the current logs; in the first search, each path that is not a pattern must be a log."""
        first, names = self._next_search is None, list[str]()
        if remote := next(filter(is_remote, self._paths), None):
            raise _not_streamable(remote)
        for path in self._paths:
            if path in self._patterns:
                names += filter(_holds_log, sorted(glob.glob(os.path.abspath(path))))
            elif first or _holds_log(path):
                names.append(path)
        if first and not names:
            raise NotFound(f"{', '.join(self._paths)}: no log there", hint=f"ls -d {' '.join(self._paths)}")
        found = {}
        for location in find_locations(names, patterns=False) if names else []:
            if not isinstance(location, LogLocation):
                raise _not_streamable(location.address)
            known = self._logs.get(location.log)
            found[location.log] = known if known and known.location == location else StreamLog(location, self._routes)
        self._logs = found
        self._next_search = time.monotonic() + self._search_seconds


def _not_streamable(address: str) -> InvalidInput:
    return InvalidInput(f"{address}: an archive cannot be streamed", hint='spark.read.format("wald") reads it')


def _holds_log(name: str) -> bool:
    """Return True if a path can be streamed; a log that is being created has no identity yet."""
    try:
        return any(isinstance(location, LogLocation) for location in find_locations([name], patterns=False))
    except NotFound:
        return False


@dataclass(frozen=True, slots=True)
class Extent:
    """``count`` consecutive wanted records from ``first``; a count of 0 means more bytes of an earlier record."""

    first: int
    count: int
    raw_bytes: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def between(self, first: int, last: int) -> Extent:
        """Return the records from ``first`` to ``last``, at least one, with an equal share of the bytes for each."""
        first, last = max(first, self.first), min(last, self.last)
        count = last - first + 1
        return self if count == self.count else Extent(first, count, self.raw_bytes * count // self.count)

    def fitting(self, records: int, raw_bytes: int) -> Extent | None:
        if self.count <= records and self.raw_bytes <= raw_bytes:
            return self
        count = min(self.count, records, self.count * raw_bytes // max(1, self.raw_bytes))
        return self.between(self.first, self.first + count - 1) if count else None


@dataclass(frozen=True, slots=True)
class Backlog:
    """New records of one log."""

    start: int  # last record read
    end: int
    extents: Iterable[Extent]  # the wanted records, in order; consumed only as far as needed


def admit(backlogs: Sequence[Backlog], limits: Limits, *, turn: int) -> list[int]:
    """Return, for each backlog, the last sequence that trigger number ``turn`` reads."""
    if limits == Limits() or not backlogs:
        return [backlog.end for backlog in backlogs]
    lanes = [_Lane(backlog) for backlog in backlogs]
    shift = turn % len(lanes)
    in_turn = [*lanes[shift:], *lanes[:shift]]
    records, raw_bytes = limits.records or _ENDLESS, limits.raw_bytes or _ENDLESS
    waiting = list(in_turn)
    while waiting and records:  # in rounds; if nothing fits any log, the last in turn waits for the next trigger
        share, share_bytes, is_stuck = max(1, records // len(waiting)), raw_bytes // len(waiting), True
        for lane in waiting:
            for part in lane.take(min(share, records), min(share_bytes, raw_bytes)):
                records, raw_bytes, is_stuck = records - part.count, raw_bytes - part.raw_bytes, False
        waiting = [lane for lane in waiting if not lane.done]
        if is_stuck and waiting:
            waiting.pop()
    if all(lane.end == lane.backlog.start for lane in lanes):
        in_turn[0].take_one()
    return [lane.end for lane in lanes]


class _Lane:
    """One log in one trigger, read up to ``end``."""

    def __init__(self, backlog: Backlog) -> None:
        self.backlog, self.end, self.done = backlog, backlog.start, False
        self._extents = iter(backlog.extents)
        self._next: Extent | None = None

    def take(self, records: int, raw_bytes: int) -> Iterator[Extent]:
        while records and (extent := self._peek()) and (part := extent.fitting(records, raw_bytes)):
            self._next = extent.between(part.last + 1, extent.last) if part.count < extent.count else None
            if part.count:
                self.end = part.last
            records, raw_bytes = records - part.count, raw_bytes - part.raw_bytes
            yield part

    def take_one(self) -> None:
        while (extent := self._peek()) and not extent.count:
            self._next = None
        if extent:
            self.end = extent.first

    def _peek(self) -> Extent | None:
        if self._next is None:
            self._next = next(self._extents, None)
        if self._next is None:
            self.done, self.end = True, self.backlog.end
        return self._next


@dataclass(frozen=True, slots=True)
class _Table:
    """Batches of the wanted routes in one sealed segment, as columns."""

    base_sequence: int
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, index: SealedIndex, routes: frozenset[str] | None) -> _Table:
        table = index.batch_table()
        wanted = [number for number, entry in enumerate(index.routes) if routes is None or entry.route in routes]
        kept = np.isin(np.asarray(table.routes), wanted)
        positions = np.append(np.asarray(table.positions, np.int64), index.raw_bytes)
        columns = (np.asarray(table.bases), np.asarray(table.counts), np.diff(positions))
        return cls(index.base_sequence, *(column.astype(np.int64)[kept] for column in columns))

    def extents(self, start: int) -> Iterator[Extent]:
        lasts = self.firsts + self.counts - 1
        for row in range(int(np.searchsorted(lasts, start, side="right")), len(lasts)):
            yield Extent(int(self.firsts[row]), int(self.counts[row]), int(self.raw_bytes[row]))


class Extents:
    """Records of ``routes`` (None: all) in one log; caches the table of the last sealed segment."""

    def __init__(self, routes: frozenset[str] | None) -> None:
        self._routes = routes
        self._table: _Table | None = None

    def between(self, view: View, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents of records start < s ≤ end, in order; an unreadable segment is one extent.

        The bytes of a long record count where the record begins, or in the last extent before its remaining pieces.
        """
        held: Extent | None = None
        for extent in self._behind(view, start, end):
            if extent.count:
                if extent.first > end:
                    break
                if held is not None:
                    yield held
                held = extent.between(start + 1, end)
            elif held is not None:
                held = replace(held, raw_bytes=held.raw_bytes + extent.raw_bytes)
        if held is not None:
            yield held

    def _behind(self, view: View, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents after ``start`` in segments that may have records up to ``end``, or the last one's rest."""
        number = view.listing.index_covering(start + 1)
        since = start
        while number < len(view.segments):
            segment = view.segments[number]
            if segment.base_sequence > min(end + 1, view.bound.segment):
                return
            try:
                for extent in self._in_segment(segment, view, since):
                    if extent.last > start or not extent.count:
                        yield extent
                        start = max(start, extent.last)
                number, since = number + 1, 0  # the next one may begin with the rest of a record
            except SegmentGone as gone:
                view = view.without(gone, segment)
                number, since = view.listing.index_covering(start + 1), start

    def _in_segment(self, segment: Segment, view: View, start: int) -> Iterator[Extent]:
        if self._table is None or self._table.base_sequence != segment.base_sequence:
            try:
                with closing(view.open(segment)) as opened:
                    if not isinstance(opened, SealedSegment):
                        yield from self._raw(opened, view.limit(segment), start)
                        return
                    self._table = _Table.of(opened.index, self._routes)
            except SegmentGone:
                raise
            except (Damaged, BadSealed):  # a reader of the segment reports it
                following = view.listing.next_after(segment.base_sequence)
                end = _LAST if following is None else following.base_sequence
                yield Extent(segment.base_sequence, end - segment.base_sequence, 0)
                return
        yield from self._table.extents(start)

    def _raw(self, segment: OpenSegment, limit: int | None, start: int) -> Iterator[Extent]:
        for found in segment.batches(segment.position_of_sequence(start + 1, limit), limit):
            if not isinstance(found, StoredBatch) or found.header.is_control:
                continue
            if self._routes is None or found.route in self._routes:
                yield Extent(found.header.base_sequence, found.header.count, found.header.total_bytes)

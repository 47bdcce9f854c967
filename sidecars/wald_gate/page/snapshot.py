"""Snapshots of the log that all pages share, and the task that takes them while there are viewers.

Quick facts are read every second: the head, the daemon, the names of the segments. A walk through all segments finds
the pins of each group. It runs alongside, less often the longer it takes; a snapshot has the newest walk and its age.
"""

from __future__ import annotations

import asyncio
import logging
import time
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

from wald.errors import Damaged, WaldError
from wald.files.layout import Root
from wald.format.spans import Spans
from wald.log import Log
from wald.retention.backlog import Condition, GroupBacklog, SegmentStatus
from wald.retention.history import History
from wald.retention.missing import ReclaimedSegment
from wald.segments.view import State, View
from wald.setting_types import size as size_type
from wald.status import findings, rates
from wald.status.findings import Contents, Facts, Finding, Life, Liveness
from wald.status.retention import WorkCounts, work_counts
from wald_gate.page.strip import Look, Piece

_AT_MOST = 1000  # deletions checked in one walk


@dataclass(frozen=True, slots=True)
class Archived:
    """Archived records."""

    whole: frozenset[int] = frozenset()  # first sequences of the segments of which all records, or some, are in bundles
    partly: frozenset[int] = frozenset()
    gone: Spans = field(default_factory=Spans)  # sequences of deleted segments, as ``whole`` and ``partly``
    gone_partly: Spans = field(default_factory=Spans)
    problem: str = ""  # why it is unknown

    def marked(self, piece: Piece) -> Piece:
        """Return a segment with the number of its archived records."""
        if piece.first in self.whole and piece.look is not Look.ACTIVE:
            return replace(piece, archived=piece.records)
        return replace(piece, partly=piece.records) if piece.first in self.partly else piece

    def of_gone(self, first: int, last: int) -> tuple[int, int]:
        """Return how many of these deleted sequences were in fully and in partly archived segments."""
        return self.gone.count(first, last), self.gone_partly.count(first, last)


class Bundled:
    """Finder of archived segments in walks: :meth:`begin`, :meth:`visit` each segment, :meth:`end`.

    Results are cached: only new ledger lines are read, and an archived segment stays archived. If the history of
    deletions is long, each walk judges only the newest ones that were not judged before.
    """

    def __init__(self, root: Root) -> None:
        self.newest = Archived()
        self._history = History(root)
        self._runs: Mapping[str, Spans] = {}
        self._whole: set[int] = set()
        self._met: set[int] = set()
        self._partly: set[int] = set()
        self._problem = ""
        self._forget()

    def _forget(self) -> None:
        """Forget the cached results, so that all deletions are checked again."""
        self._judged, self._gone, self._gone_partly = Spans(), Spans(), Spans()

    def begin(self) -> None:
        self._met, self._partly, self._problem = set(), set(), ""
        self._try(self._read_on)

    def visit(self, status: SegmentStatus) -> None:
        base = status.segment.base_sequence
        self._met.add(base)
        if self._problem or base in self._whole:
            return
        if base in self._judged:  # it was taken back
            self._forget()
        if status.state is State.ACTIVE:  # there may be more in it by now
            if any(runs.overlaps(base, max(base, status.last_sequence or 0)) for runs in self._runs.values()):
                self._partly.add(base)
            return
        is_whole, is_partly = self._share((each.route, each.first, each.last) for each in status.routes)
        if is_partly:
            (self._whole if is_whole else self._partly).add(base)

    def end(self, segments: Sequence[rates.SegmentSeen]) -> None:
        """Check the deletions around the existing segments."""
        self._whole &= self._met
        self._try(lambda: self._judge(segments))
        if self._problem:
            self.newest = Archived(problem=self._problem)
        else:
            gone, gone_partly = Spans(self._gone), Spans(self._gone_partly)
            self.newest = Archived(frozenset(self._whole), frozenset(self._partly), gone, gone_partly)

    def _try(self, step: Callable[[], None]) -> None:
        if not self._problem:
            try:
                step()
            except (Damaged, OSError) as error:
                self._problem = str(error)

    def _read_on(self) -> None:
        runs = self._history.archived_spans()
        if runs is not self._runs:  # the ledger has other lines
            self._runs = runs
            self._whole.clear()
            self._forget()

    def _judge(self, segments: Sequence[rates.SegmentSeen]) -> None:
        """Check the newest deletions before and between the segments."""
        known = Spans(self._judged)
        for each, following in pairwise((*sorted(segments, key=lambda seen: seen.base), None)):
            assert each is not None
            last = each.last if each.last is not None or following is None else following.base - 1
            known.add(each.base, last or each.base)
        newest = max((each.base for each in segments), default=1)
        found: list[ReclaimedSegment] = []
        read: list[tuple[int, int]] = []
        for run in reversed(list(known.gaps(1, newest - 1))):
            left = _AT_MOST - len(found)
            some = list(islice(self._history.reclaimed_segments(*run), left))
            found += some
            if len(some) < left:
                read.append(run)
        if found:
            self._read_on()  # after the deletions: the line of an archive precedes that of a later deletion
        for segment in found:
            is_whole, is_partly = self._share((held.route, held.first, held.last) for held in segment.routes or ())
            if is_partly:
                (self._gone if is_whole else self._gone_partly).add(segment.first, segment.last)
            self._judged.add(segment.first, segment.last)
        for run in read:
            self._judged.add(*run)

    def _share(self, routes: Iterable[tuple[str, int, int]]) -> tuple[bool, bool]:
        """Return two flags: all records of a segment are in bundles, and some are, by its routes and their spans."""
        held = [(self._runs.get(name, Spans()), first, last) for name, first, last in routes]
        is_partly = any(found.overlaps(first, last) for found, first, last in held)
        return is_partly and all(found.covers(first, last) for found, first, last in held), is_partly


_ASK_SECONDS = 1.0  # how long the daemon may take to answer STAT
_SPREAD_SECONDS = 10.0  # over which the time of syncs is shown
_RATES = 120
_SIZE = size_type(1, 1 << 62)
_FILL_MIN = 0.02  # so that the active segment is visible
_LOOKS = {
    State.ACTIVE: Look.ACTIVE,
    State.CUT: Look.CUT,
    State.SEALED: Look.SEALED,
    State.RELEASED: Look.DOOMED,
}


@dataclass(frozen=True, slots=True)
class Walk:
    """Results of a walk through all segments; ``by_name`` and ``work`` have route and group as keys."""

    samples: tuple[rates.LogSample, ...] = ()
    contents: Contents | None = None
    by_name: Mapping[tuple[str, str], GroupBacklog] = field(default_factory=dict)
    work: Mapping[tuple[str, str], WorkCounts] = field(default_factory=dict)
    archived: Archived = field(default_factory=Archived)
    inventory: rates.Inventory | None = None

    @property
    def rows(self) -> tuple[rates.Row, ...]:
        return self.inventory.rows if self.inventory is not None else ()


@dataclass(frozen=True, slots=True)
class PageSnapshot:
    """State of the log at one moment."""

    number: int
    daemon: Liveness
    activity: rates.Activity | None  # None if the head is unreadable; ``problem`` has the reason
    pieces: tuple[Piece, ...]  # the segments, oldest first
    records_per_second: tuple[float | None, ...]  # of earlier snapshots and of this one
    syncs: Mapping[str, Any] | None  # count, mean and quantiles of the durations of syncs
    in_seconds: float | None  # time since the previous snapshot, which the newest rates cover
    sync_seconds: float | None  # time that the syncs cover; None: since the start of the daemon
    walk: Walk
    facts: Facts | None  # quick facts of this moment, the others from the walk
    findings: Sequence[Finding]  # problems, the worst first
    problem: str = ""

    @property
    def is_running(self) -> bool:
        return self.daemon.life is Life.RUNS

    @property
    def is_counted(self) -> bool:
        return self.walk.contents is not None


class PageSnapshotReader:
    """Reader of snapshots: :meth:`look` in one thread, :meth:`walk` in another."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._number = 0
        self._head: rates.Sampler[rates.HeadSample] = rates.Sampler(rates.HeadSource(log).sample)
        self._bundled = Bundled(log.root)
        self._all: rates.Sampler[rates.LogSample] = rates.Sampler(rates.LogSource(log, self._bundled.visit).sample)
        self._answers: deque[tuple[float, Mapping[str, Any]]] = deque()
        self._rates: deque[float | None] = deque(maxlen=_RATES)
        self._walked = Walk()
        self._walk_problem = ""

    def look(self) -> PageSnapshot:
        """Read a snapshot; errors are part of it."""
        log, walked = self._log, self._walked
        daemon = self._asked()
        self._head.update()
        now, now_ns = time.monotonic(), time.time_ns()
        seen = rates.activity(self._head.samples, now_ns=now_ns)
        self._rates.append(seen.records_per_second if seen else None)
        walk = replace(walked, inventory=rates.inventory(walked.samples, now=now, now_ns=now_ns))
        problem, pieces, facts = self._head.problem, tuple[Piece, ...](), None
        try:
            facts = findings.facts_of(log.root, daemon, walk.contents or Contents())
            pieces = tuple(_pieces(log.view(), facts, seen.sequence if seen else 0, walk))
        except (WaldError, OSError) as error:
            problem = problem or rates.message_of(error)
        syncs = self._syncs(now, daemon.answer)
        self._number += 1
        taken = [sample.taken for sample in self._head.samples]
        return PageSnapshot(
            self._number,
            daemon,
            seen,
            pieces,
            tuple(self._rates),
            syncs,
            taken[-1] - taken[0] if len(taken) > 1 else None,
            now - self._answers[0][0] if len(self._answers) > 1 else None,
            walk,
            facts,
            findings.findings(facts, now_ns=now_ns, lag_max=None) if facts is not None else (),
            problem or self._walk_problem,
        )

    def walk(self) -> None:
        """Walk through all segments; after an error, the previous walk stays."""
        log = self._log
        try:
            self._bundled.begin()
            self._all.update()
            contents = Contents(unreadable=((self._all.problem, ""),) if self._all.problem else ())
            for newest in self._all.samples[-1:]:
                self._bundled.end(newest.segments)
                full = newest.growth.seconds_until_full(newest.free_bytes) if newest.growth else None
                contents = Contents(tuple(newest.groups), newest.problems, newest.lost_routes, full)
            contents = findings.with_directories(log, contents)
            by_name = {(each.cursor.route, each.cursor.group): each for each in contents.groups}
            work = work_counts(log, [name for name, each in by_name.items() if each.cursor.of_work_group])
            self._walked = Walk(self._all.samples, contents, by_name, work, self._bundled.newest)
            self._walk_problem = ""
        except (WaldError, OSError) as error:  # such as a file that disappeared between two looks
            self._walk_problem = rates.message_of(error)

    def _asked(self) -> Liveness:
        log = self._log
        try:
            return findings.liveness(log.root, log.identity, findings.socket_of(log.root), seconds=_ASK_SECONDS)
        except (WaldError, OSError) as error:
            message = f"it is unknown whether a daemon runs: {rates.message_of(error)}"
            return Liveness(Life.UNKNOWN, message, f"ls -l {log.root.lock}")

    def _syncs(self, now: float, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the durations of recent syncs; a new daemon starts at 0."""
        if self._answers and self._answers[-1][1].get("epoch") != answer.get("epoch"):
            self._answers.clear()
        if "histograms" not in answer:
            return None
        self._answers.append((now, answer))
        while len(self._answers) > 1 and self._answers[1][0] <= now - _SPREAD_SECONDS:
            self._answers.popleft()
        before = self._answers[0][1] if len(self._answers) > 1 else {}
        found: Mapping[str, Any] = rates.measured(before, answer, self._log.root.path)["sync_seconds"]
        return found


def _pieces(view: View, facts: Facts, head: int, walk: Walk) -> Iterator[Piece]:
    """Yield the segments by their names, with facts of the newest walk."""
    known = {each.base: each for sample in walk.samples[-1:] for each in sample.segments}
    for segment, following in pairwise((*view.including_released().segments, None)):
        assert segment is not None
        base, walked = segment.base_sequence, known.get(segment.base_sequence)
        last = following.base_sequence - 1 if following is not None else max(head, base - 1)
        if walked is not None and walked.last is not None and following is not None:
            last = min(last, max(walked.last, base))  # the records between them were deleted
        look = Look.DAMAGED if walked is not None and walked.is_damaged else _LOOKS[view.state(segment)]
        held = int(walked is not None and walked.condition is Condition.PINNED)
        fill = _fill(facts, base) if look is Look.ACTIVE else 1.0
        stored_bytes = walked.stored_bytes if walked is not None else 0
        yield walk.archived.marked(Piece(base, last, look, held, stored_bytes=stored_bytes, fill=fill))


def _fill(facts: Facts, base: int) -> float:
    """Return the fill level of the active segment by the daemon's limit or settings; 1 if unknown."""
    head, size = facts.head, facts.daemon.answer.get("segment_max_bytes")
    if not isinstance(size, int):
        size = 0
        with suppress(LookupError, ValueError, TypeError):  # it has written no report, or one of another version
            size = _SIZE.parse(tomllib.loads(f"size = {facts.settings['segment_max_bytes']['value']}")["size"])
    position = head.position if head is not None and head.segment == base else 0
    return min(1.0, max(_FILL_MIN, position / size)) if size else 1.0


_INTERVAL_SECONDS = 1.0
_FRESH_SECONDS = 2.0  # a younger snapshot is shown to a new viewer
_PATIENCE_SECONDS = 0.4  # how long a new viewer waits for a walk through all segments
_log = logging.getLogger("wald_gate")


class SnapshotPublisher:
    """Publisher of the newest snapshot, which is taken again every second while there are viewers."""

    def __init__(self, log: Log) -> None:
        self._camera = PageSnapshotReader(log)
        self._newest: PageSnapshot | None = None
        self._taken = self._walk_due = 0.0
        self._viewers = 0
        self._is_over = False
        self._moved = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._walk: asyncio.Task[None] | None = None

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Take snapshots while this is entered."""
        self._viewers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_pictures(), name="wald-gate-pictures")
        try:
            yield
        finally:
            self._viewers -= 1

    async def picture(self) -> PageSnapshot:
        """Return a snapshot at most a few seconds old; parts of a large log may be older, or missing."""
        while self._newest is None or time.monotonic() - self._taken > _FRESH_SECONDS:
            walk = self._begin_walk()
            if walk is not None:
                await asyncio.wait((walk,), timeout=_PATIENCE_SECONDS)
            await self._take()
        return self._newest

    async def newer(self, number: int) -> PageSnapshot | None:
        """Return the newest snapshot once its number is larger; None if the gate is ending."""
        while not self._is_over:
            if self._newest is not None and self._newest.number > number:
                return self._newest
            await self._moved.wait()
        return None

    def end(self) -> None:
        self._is_over = True
        self._moved.set()

    async def _take_pictures(self) -> None:
        while self._viewers and not self._is_over:
            began = time.monotonic()
            self._begin_walk()
            await _reported(self._take())
            await asyncio.sleep(max(0.0, began + _INTERVAL_SECONDS - time.monotonic()))

    async def _take(self) -> None:
        async with self._busy:
            self._newest = await asyncio.to_thread(self._camera.look)
            self._taken = time.monotonic()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _begin_walk(self) -> asyncio.Task[None] | None:
        """Start a walk, unless one is running or was recent compared with its cost."""
        if (self._walk is None or self._walk.done()) and time.monotonic() >= self._walk_due:
            self._walk = asyncio.create_task(self._walk_through(), name="wald-gate-walk")
        return self._walk

    async def _walk_through(self) -> None:
        began = time.monotonic()
        await _reported(asyncio.to_thread(self._camera.walk))
        now = time.monotonic()
        self._walk_due = now + rates.rest_seconds(now - began, _INTERVAL_SECONDS)


async def _reported(step: Awaitable[None]) -> None:
    try:
        await step
    except Exception:  # noqa: BLE001 - a bug; pages then show their age
        _log.exception("no picture of the log")

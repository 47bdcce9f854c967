"""The log at one moment, as all pages show it, and the camera that takes such pictures.

A picture has two parts. What moves every second is quick to read: the head, the daemon, the names of the segments. What
takes a walk through all segments, such as what each group pins, is read beside it and less often the longer it
takes; a picture has the newest there is, and says how old that is.
"""

from __future__ import annotations

import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wald.errors import WaldError
from wald.log import Log
from wald.retention.backlog import Condition, GroupBacklog
from wald.segments.view import State, View
from wald.setting_types import size as size_type
from wald.status.findings import (
    Contents,
    Facts,
    Finding,
    Life,
    Liveness,
    facts_of,
    facts_of_daemon,
    findings,
    liveness,
    socket_of,
)
from wald.status.rates import (
    Activity,
    HeadSample,
    HeadSource,
    Inventory,
    LogSample,
    LogSource,
    Sampler,
    activity,
    inventory,
    measured,
)
from wald.status.retention import WorkCounts, work_counts
from wald_gate.page.archived import Archived, Bundled
from wald_gate.page.strip import Look, Piece

_ASK_SECONDS = 1.0  # how long the daemon may take to answer STAT
_SPREAD_SECONDS = 10.0  # over which the time of syncs is shown
_RATES = 120
_SIZE_MAX = 1 << 62
_FILL_MIN = 0.02  # so that what is active can be seen
_LOOKS = {
    State.ACTIVE: Look.ACTIVE,
    State.CUT: Look.CUT,
    State.SEALED: Look.SEALED,
    State.RELEASED: Look.DOOMED,
}
Spread = Mapping[str, Any]
"""Of a histogram: count, mean, p50, p90, p99; ``Any``: numbers, or None."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a walk through all segments has found.

    Attributes:
        by_name: the groups, by route and name.
        work: where the records of work groups are, by the same.
        facts: of the log and its daemon, as they were then.
        archived: what of the log is in archives.
        trouble: why it could not be done; the rest is empty then.
    """

    inventory: Inventory | None
    by_name: Mapping[tuple[str, str], GroupBacklog]
    work: Mapping[tuple[str, str], WorkCounts]
    facts: Facts
    archived: Archived
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """What is there at one moment.

    Attributes:
        number: of the picture; each has a larger one.
        at_ns: when it was taken, ns since 1970.
        daemon: whether it runs.
        activity: how far the log is; None if that cannot be read, and ``trouble`` says why.
        pieces: the segments, oldest first.
        rates: records a second, of the pictures before and of this one; None where that is not known.
        syncs: how long they have taken; None if no daemon says so.
        in_seconds: between the picture before and this one, over which the newest rates are; None for the first one.
        sync_seconds: the time that the syncs are of; None: since the daemon has started.
        walk: None before the first one.
        facts: of the daemon, the head and the disk at this moment; the rest is that of the walk. None
            if they cannot be read, and ``trouble`` says why.
        findings: what is wrong by these, the worst first.
    """

    number: int
    at_ns: int
    daemon: Liveness
    activity: Activity | None
    pieces: tuple[Piece, ...]
    rates: tuple[float | None, ...]
    syncs: Spread | None
    in_seconds: float | None
    sync_seconds: float | None
    walk: Walk | None
    facts: Facts | None
    findings: tuple[Finding, ...]
    trouble: str = ""

    @property
    def is_running(self) -> bool:
        return self.daemon.life is Life.RUNS


class Camera:
    """Takes pictures of a log: :meth:`look` in one thread, :meth:`walk` in another."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._number = 0
        self._head: Sampler[HeadSample] = Sampler(HeadSource(log).sample)
        self._bundled = Bundled(log.root)
        self._archived = self._bundled.newest
        self._all: Sampler[LogSample] = Sampler(LogSource(log, self._bundled.take).sample)
        self._answers: deque[tuple[float, Mapping[str, Any]]] = deque()
        self._rates: deque[float | None] = deque(maxlen=_RATES)
        self._walked: Callable[[float, int], Walk] | None = None
        self._walk_trouble = ""
        self._daemon: Liveness | None = None

    def look(self) -> Picture:
        """A picture with what can be read quickly, now. What goes wrong is part of it."""
        log = self._log
        daemon = self._daemon = self._asked()
        self._head.update()
        now, now_ns = time.monotonic(), time.time_ns()
        seen = activity(self._head.samples, now_ns=now_ns)
        self._rates.append(seen.records_per_second if seen else None)
        walk = self._walked(now, now_ns) if self._walked is not None else None
        trouble, pieces, facts = self._head.problem, tuple[Piece, ...](), None
        try:
            facts = facts_of_daemon(log.root, daemon, walk.facts if walk is not None else None)
            pieces = tuple(self._pieces(log.view(), facts, seen.sequence if seen else 0))
        except (WaldError, OSError) as error:
            trouble = trouble or _words(error)
        trouble = trouble or self._walk_trouble
        syncs = self._syncs(now, daemon)
        self._number += 1
        sync_seconds = now - self._answers[0][0] if len(self._answers) > 1 else None
        taken = [sample.taken for sample in self._head.samples]
        return Picture(
            self._number,
            now_ns,
            daemon,
            seen,
            pieces,
            tuple(self._rates),
            syncs,
            taken[-1] - taken[0] if len(taken) > 1 else None,
            sync_seconds,
            walk,
            facts,
            tuple(findings(facts, now_ns=now_ns, lag_max=None)) if facts is not None else (),
            trouble,
        )

    def walk(self) -> None:
        """Walk through all segments; the next picture shows what there is.

        If that cannot be done, it says why, and shows what there was.
        """
        try:
            self._walked, self._walk_trouble = self._walk_through(), ""
        except (WaldError, OSError) as error:  # such as a file that has gone between two looks
            self._walk_trouble = _words(error)

    def _walk_through(self) -> Callable[[float, int], Walk]:
        log, daemon = self._log, self._daemon
        self._bundled.begin()
        self._all.update()
        if daemon is None:
            daemon = self._asked()
        contents = Contents(unreadable=((self._all.problem, ""),) if self._all.problem else ())
        for newest in self._all.samples[-1:]:
            self._bundled.end(newest.segments)
            full = newest.growth.seconds_until_full(newest.free_bytes) if newest.growth else None
            contents = Contents(tuple(newest.groups), newest.problems, newest.lost_routes, full)
        facts = facts_of(log, daemon, contents)
        by_name = {(each.cursor.route, each.cursor.group): each for each in facts.groups}
        work = work_counts(log, [name for name, each in by_name.items() if each.cursor.of_work_group])
        samples, trouble = self._all.samples, self._all.problem
        archived = self._archived = self._bundled.newest

        def walk(now: float, now_ns: int) -> Walk:
            return Walk(inventory(samples, now=now, now_ns=now_ns), by_name, work, facts, archived, trouble)

        return walk

    def _asked(self) -> Liveness:
        """Whether the daemon runs, which may be impossible to know."""
        log = self._log
        try:
            return liveness(log.root, log.identity, socket_of(log.root), seconds=_ASK_SECONDS)
        except (WaldError, OSError) as error:
            return Liveness(
                Life.UNKNOWN, f"whether a daemon runs is not known: {_words(error)}", f"ls -l {log.root.lock}"
            )

    def _pieces(self, view: View, facts: Facts, head: int) -> list[Piece]:
        """The segments by their names, with what the newest walk knows of each."""
        known = {each.base: each for sample in self._all.samples[-1:] for each in sample.segments}
        listed = view.including_released().segments
        pieces = []
        for segment, following in pairwise((*listed, None)):
            assert segment is not None
            base = segment.base_sequence
            look = _LOOKS[view.state(segment)]
            last = following.base_sequence - 1 if following is not None else max(head, base - 1)
            walked = known.get(base)
            if walked is not None and walked.last is not None and following is not None:
                last = min(last, max(walked.last, base))  # what is between them has been reclaimed
            if walked is not None and walked.is_damaged:
                look = Look.DAMAGED
            held = int(walked is not None and walked.condition is Condition.PINNED)
            fill = _fill(facts, base) if look is Look.ACTIVE else 1.0
            stored_bytes = walked.stored_bytes if walked is not None else 0
            piece = Piece(base, last, look, held, stored_bytes=stored_bytes, fill=fill)
            pieces.append(self._archived.marked(piece))
        return pieces

    def _syncs(self, now: float, daemon: Liveness) -> Spread | None:
        """How long syncs have taken in the last seconds; a new daemon counts from 0."""
        answer = daemon.answer
        if self._answers and self._answers[-1][1].get("epoch") != answer.get("epoch"):
            self._answers.clear()
        if "histograms" not in answer:
            return None
        self._answers.append((now, answer))
        while len(self._answers) > 1 and self._answers[1][0] <= now - _SPREAD_SECONDS:
            self._answers.popleft()
        before = self._answers[0][1] if len(self._answers) > 1 else {}
        found: Spread = measured(before, answer, self._log.root.path)["sync_seconds"]
        return found


def _words(error: WaldError | OSError) -> str:
    if isinstance(error, WaldError):
        return error.message
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _fill(facts: Facts, base: int) -> float:
    """How full the active segment is, by the head; 1 if nothing says how large it may be."""
    head, size = facts.head, _segment_max_bytes(facts)
    position = head.position if head is not None and head.segment == base else 0
    return min(1.0, max(_FILL_MIN, position / size)) if size else 1.0


def _segment_max_bytes(facts: Facts) -> int:
    """As the daemon says, or as it was started with; 0 if neither is known."""
    if isinstance(size := facts.daemon.answer.get("segment_max_bytes"), int):
        return size
    with suppress(LookupError, ValueError, TypeError):  # it has written no report, or one of another version
        value = tomllib.loads(f"size = {facts.settings['segment_max_bytes']['value']}")["size"]
        parsed: int = size_type(1, _SIZE_MAX).parse(value)
        return parsed
    return 0

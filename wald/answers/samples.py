"""The samples that ``wald top`` and the page of the gate show, taken so that neither waits for one.

A slow sample is not repeated soon: a thread rests nine times as long as it worked, and so uses a tenth of a core at
most. The error of a failed sample is shown until one succeeds; it never ends the screen.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from wald.answers.snapshot import Amount, HeadSample, LogSample, SegmentSeen
from wald.errors import Damaged, WaldError
from wald.files.disk import Disk
from wald.files.listing import Segment
from wald.files.locks import is_locked
from wald.files.routes import fifo_problems
from wald.format.names import Kind
from wald.log import Log
from wald.retention.backlog import Backlog, Condition, SegmentStatus, condition_of
from wald.retention.blockers import sealed_index
from wald.retention.progress import last_sequences
from wald.segments.view import SegmentGone, View
from wald.writing.daemon_lock import describe_daemon
from wald.writing.run_reports import last_daemon_fields

T = TypeVar("T")

_REST = 9  # times the work: a tenth of one core


def rest_seconds(took_seconds: float, interval_seconds: float) -> float:
    """How long to wait after a sample before the next one."""
    return max(interval_seconds - took_seconds, _REST * took_seconds)


class Sampler(Generic[T]):
    """Takes samples of one kind, and keeps the last two.

    Args:
        sample: called with the seconds of a clock that only moves forward.

    Attributes:
        samples: oldest first; empty after one that failed, because the last numbers may no longer hold.
        trouble: why the last sample failed; "" if it did not.
        bug: the unexpected error that ended the thread; None as long as it runs.
    """

    def __init__(self, sample: Callable[[float], T]) -> None:
        self._sample = sample
        self.samples: tuple[T, ...] = ()
        self.trouble = ""
        self.bug: Exception | None = None

    def take(self) -> None:
        """Take one sample, now."""
        try:
            self.samples = (*self.samples[-1:], self._sample(time.monotonic()))
            self.trouble = ""
        except WaldError as error:
            self.samples, self.trouble = (), error.message
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.samples, self.trouble = (), f"{where}{error.strerror or error}"

    def start(self, interval_seconds: float, after: Callable[[], None]) -> None:
        """Take samples until the process ends, and call ``after`` after each."""
        threading.Thread(target=self._run, args=(interval_seconds, after), daemon=True).start()

    def _run(self, interval_seconds: float, after: Callable[[], None]) -> None:
        while self.bug is None:
            began = time.monotonic()
            try:
                self.take()
            except Exception as error:  # noqa: BLE001 - a bug; the thread of the screen raises it
                self.bug = error
            after()
            time.sleep(rest_seconds(time.monotonic() - began, interval_seconds))


class HeadSource:
    """Samples what moves every second; sealed segments are counted from the first sample on."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sealed_before: frozenset[int] | None = None
        self._raw_bytes: dict[int, int] = {}
        self._idle_since_ns: int | None = None

    def sample(self, now: float) -> HeadSample:
        """
        Raises:
            Damaged: the head or the directory cannot be read.
            OSError: the operating system refuses.
        """
        head = self._log.head()
        view = self._log.view()  # after the head, so that every segment before the head's is listed
        if self._sealed_before is None:
            self._sealed_before = frozenset(
                s.base_sequence for s in view.including_released().segments if s.kind.form is not Kind.RAW
            )
        self._measure(view, head.segment if head else 0)
        waiting = {segment.base_sequence for segment in view.segments[:-1] if segment.kind is Kind.RAW}
        sealed = [length for base, length in self._raw_bytes.items() if base not in waiting]
        return HeadSample(
            now,
            head.sequence if head else 0,
            head.at_ns if head else 0,
            sum(self._raw_bytes.values()) + (head.position if head else 0),
            len(waiting),
            len(sealed),
            sum(sealed),
            self._daemon(),
        )

    def _measure(self, view: View, active: int) -> None:
        """Note the lengths of segments that were completed since the last sample."""
        done = self._raw_bytes.keys() | (self._sealed_before or frozenset())
        for segment in view.including_released().segments:
            if segment.base_sequence < active and segment.base_sequence not in done:
                with suppress(SegmentGone):
                    self._raw_bytes[segment.base_sequence] = view.follow(segment, self._length)

    def _length(self, segment: Segment) -> int:
        """Raw bytes; 0 if the index of a sealed segment is damaged."""
        if segment.kind.form is Kind.RAW:
            return segment.path.stat().st_size
        try:
            return sealed_index(segment, self._log.identity.log_id).raw_bytes
        except Damaged:
            return 0

    def _daemon(self) -> str:
        """Which daemon runs, as text; "" if none does.

        The test takes the lock for a moment, and a daemon that starts in that moment would find the root locked. So a
        root without a daemon is tested again only when its lock file has changed, which a daemon does on taking it.
        """
        root = self._log.root
        try:
            changed_ns = os.stat(root.lock).st_mtime_ns
        except FileNotFoundError:
            return ""
        if changed_ns != self._idle_since_ns:
            self._idle_since_ns = None if is_locked(root.lock, Disk()) else changed_ns
        return describe_daemon(last_daemon_fields(root)) if self._idle_since_ns is None else ""


class LogSource:
    """Samples what takes a walk through every segment.

    Args:
        beside: called with each segment as it is met, for what else is to be known of it.
    """

    def __init__(self, log: Log, beside: Callable[[SegmentStatus], None] = lambda _: None) -> None:
        self._log = log
        self._beside = beside
        self._end: int | None = None

    def sample(self, now: float) -> LogSample:
        """
        Raises:
            Damaged: the directory or the end of the log cannot be read.
            OSError: the operating system refuses.
        """
        root, since = self._log.root, self._end
        self._end = None  # after a failed sample there is nothing to compare the next one with
        view = self._log.view()
        backlog = Backlog(view, after=since)
        counts: Counter[Condition] = Counter()
        sizes: Counter[Condition] = Counter()
        end = since or 0
        segments: list[SegmentSeen] = []
        problems: list[tuple[str, str]] = []
        for status in backlog.segments():
            self._beside(status)
            seen = SegmentSeen(
                status.segment.base_sequence,
                condition_of(status),
                status.stored_bytes,
                bool(status.problem),
                status.last_sequence,
            )
            segments.append(seen)
            counts[seen.condition] += 1
            sizes[seen.condition] += seen.stored_bytes
            end = max(end, status.last_sequence or 0)
            if status.problem:
                problems.append((status.problem, status.hint))
        log_sample = LogSample(
            now,
            {state: Amount(counts[state], sizes[state]) for state in Condition if counts[state]},
            tuple(backlog.groups.values()),
            last_sequences(view),
            None if since is None else backlog.received(),
            backlog.growth_meter.growth(now_ns=time.time_ns()),
            backlog.free_bytes,
            shutil.disk_usage(root.segments).total,
            tuple(message for _, message in fifo_problems(root)),
            tuple(segments),
            tuple(problems),
            backlog.lost_routes(),
        )
        self._end = end
        return log_sample

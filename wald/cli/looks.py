"""Taking the looks that ``wald top`` shows, each kind in a thread of its own, so that the screen never waits for one.

A look that took long is not repeated soon: a thread rests nine times as long as it worked, and so takes a tenth of a
core at most. What keeps a look from succeeding is shown until one succeeds; it is never the end of the screen.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from wald.cli.producing import runs
from wald.cli.snapshot import Amount, Pulse, State, Survey, state_of
from wald.errors import Damaged, WaldError
from wald.format.names import Kind
from wald.log import Log
from wald.store.files.directory import Listing, Segment, list_segments, look_again
from wald.store.files.fifos import troubles
from wald.store.retention.backlog import Backlog
from wald.store.retention.pins import sealed_index
from wald.store.retention.progress import last_sequences
from wald.store.writing.lock import holder

T = TypeVar("T")

_REST = 9  # a tenth of one core


def rest_seconds(took_seconds: float, interval_seconds: float) -> float:
    """How long to wait after a look before the next one."""
    return max(interval_seconds - took_seconds, _REST * took_seconds)


class Watch(Generic[T]):
    """The last two looks of one kind.

    Args:
        look: is given the seconds of a clock that only moves forward.

    Attributes:
        seen: oldest first; empty after a look that failed, because what it would have shown may be gone.
        trouble: why the last look failed; "" if it did not.
        bug: what nobody expected of a look in the thread, and ended it; None as long as it goes on.
    """

    def __init__(self, look: Callable[[float], T]) -> None:
        self._look = look
        self.seen: tuple[T, ...] = ()
        self.trouble = ""
        self.bug: Exception | None = None

    def take(self) -> None:
        """Look once, now."""
        try:
            self.seen = (*self.seen[-1:], self._look(time.monotonic()))
            self.trouble = ""
        except WaldError as error:
            self.seen, self.trouble = (), error.message
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.seen, self.trouble = (), f"{where}{error.strerror or error}"

    def start(self, interval_seconds: float, tell: Callable[[], None]) -> None:
        """Look again and again, until the process ends, and ``tell`` after each time."""
        threading.Thread(target=self._run, args=(interval_seconds, tell), daemon=True).start()

    def _run(self, interval_seconds: float, tell: Callable[[], None]) -> None:
        while self.bug is None:
            began = time.monotonic()
            try:
                self.take()
            except Exception as error:  # noqa: BLE001 - a bug; whoever draws the screen leaves it and raises this
                self.bug = error
            tell()
            time.sleep(rest_seconds(time.monotonic() - began, interval_seconds))


class Pulses:
    """Quick looks at one log; what has been sealed is counted from the first of them on."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sealed_before: frozenset[int] | None = None
        self._raw_bytes: dict[int, int] = {}
        self._idle_since_ns: int | None = None

    def look(self, now: float) -> Pulse:
        """
        Raises:
            Damaged: the head or the directory cannot be read.
            OSError: so says the operating system.
        """
        head = self._log.head()
        listing = list_segments(self._log.root)  # after the head: what it calls complete is listed then
        if self._sealed_before is None:
            self._sealed_before = frozenset(
                s.base_sequence for s in listing.with_released().segments if s.kind.form is not Kind.RAW
            )
        self._learn(listing, head.segment if head else 0)
        waiting = {segment.base_sequence for segment in listing.segments[:-1] if segment.kind is Kind.RAW}
        sealed = [length for base, length in self._raw_bytes.items() if base not in waiting]
        return Pulse(
            now,
            head.sequence if head else 0,
            head.at_ns if head else 0,
            sum(self._raw_bytes.values()) + (head.position if head else 0),
            len(waiting),
            len(sealed),
            sum(sealed),
            self._daemon(),
        )

    def _learn(self, listing: Listing, active: int) -> None:
        """The lengths of segments that were completed meanwhile."""
        done = self._raw_bytes.keys() | (self._sealed_before or frozenset())
        while True:
            try:
                for segment in listing.with_released().segments:
                    if segment.base_sequence < active and segment.base_sequence not in done:
                        self._raw_bytes[segment.base_sequence] = self._length(segment)
                return
            except FileNotFoundError as gone:
                listing = look_again(self._log.root, listing, gone)

    def _length(self, segment: Segment) -> int:
        """Raw bytes; 0 if a sealed one does not tell."""
        if segment.kind.form is Kind.RAW:
            return segment.path.stat().st_size
        try:
            return sealed_index(segment, self._log.identity.log_id).raw_bytes
        except Damaged:
            return 0

    def _daemon(self) -> str:
        """Who runs, in words; "" if nobody does.

        To ask takes the lock for a moment, and a daemon that starts in it would find the root taken. So a root without
        a daemon is asked again only when its lock file has changed, which is after a daemon has got the lock.
        """
        root = self._log.root
        try:
            changed_ns = os.stat(root.lock).st_mtime_ns
        except FileNotFoundError:
            return ""
        if changed_ns != self._idle_since_ns:
            self._idle_since_ns = None if runs(root.path) else changed_ns
        return holder(root) if self._idle_since_ns is None else ""


class Surveys:
    """Looks at everything in one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._end: int | None = None

    def look(self, now: float) -> Survey:
        """
        Raises:
            Damaged: the directory or the end of the log cannot be read.
            OSError: so says the operating system.
        """
        root, log_id = self._log.root, self._log.identity.log_id
        since = self._end
        self._end = None  # after a look that failed there is nothing to compare the next one with
        backlog = Backlog(root, log_id=log_id, since=since)
        counts: Counter[State] = Counter()
        sizes: Counter[State] = Counter()
        end = since or 0
        for standing in backlog.segments():
            state = state_of(standing)
            counts[state] += 1
            sizes[state] += standing.stored_bytes
            end = max(end, standing.last_sequence or 0)
        survey = Survey(
            now,
            {state: Amount(counts[state], sizes[state]) for state in State if counts[state]},
            tuple(backlog.holds.values()),
            last_sequences(root, log_id),
            None if since is None else backlog.received(),
            backlog.growth(now_ns=time.time_ns()),
            backlog.free_bytes,
            shutil.disk_usage(root.path).total,
            tuple(words for _, words in troubles(root)),
        )
        self._end = end
        return survey

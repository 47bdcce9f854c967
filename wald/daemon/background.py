"""Background thread that seals cut segments and allocates the file for the next cut.

Each pass lists the segments, so a start after a crash needs nothing special. A segment stays unsealed while the disk
lacks room; it can still be read and reclaimed. No error ends the thread. Compression and digests release the GIL, so
they hardly delay the loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.writing.disk_budget import DiskBudget
from wald.writing.sealing import seal, segments_to_seal
from wald.writing.writer import Writer

_NICENESS = 19  # 5 to 15 % more commit rounds than with 10 or 0 (two cores, one producer)
_SWITCH_SECONDS = 0.0001  # the default, 5 ms, is several rounds
_ROOM_SECONDS = 1.0  # between checks of the free space
_RETRY_SECONDS = 5.0  # pause after a failure; doubles each time
_RETRY_MAX_SECONDS = 600.0


@dataclass(slots=True, eq=False)
class Background:
    """Background thread; creating this object starts it."""

    _root: Root
    _disk: Disk
    _ledger: Ledger
    _writer: Writer
    _budget: DiskBudget
    _metrics: Metrics
    _journal: FilteringBoundLogger
    _level: int
    waiting: int = 0  # segments without room at the last attempt
    _prepared: bool = False  # the file for the next cut exists
    _failed: bool = False  # in the last pass
    _reasons: dict[str, str] = field(default_factory=dict)  # last failure of each segment; "" for the listing
    _stopping: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="background")
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Finish the current step and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # sealing at normal priority is better than none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        pause = _RETRY_SECONDS
        while not self._stopping:
            self._work()
            interval = _ROOM_SECONDS if self.waiting or not self._prepared else None
            woken = self._wake.wait(pause if self._failed else interval)
            self._wake.clear()
            pause = min(2 * pause, _RETRY_MAX_SECONDS) if self._failed and not woken else _RETRY_SECONDS

    def _work(self) -> None:
        self._ledger.cut()  # a previous run may have left a long ledger
        self._metrics.seal_waits_since = self._metrics.seal_waits_since or time.monotonic()
        self._failed = False
        with self._reporting(""):
            self._prepared = self._writer.prepare_spare()
            waiting = 0
            for segment in segments_to_seal(self._root, self._writer.base_sequence):
                if self._stopping:
                    break
                with self._reporting(segment.path.name):
                    waiting += not self._seal(segment)
                if not self._stopping:
                    self._prepared = self._writer.prepare_spare()
            self.waiting = waiting
        if not (self._failed or self.waiting):
            self._metrics.seal_waits_since = 0.0

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Log each new error instead of raising it; the thread retries later."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (sealing would end without a report)
            self._failed = True
            self._metrics.seal_failures += 1
            reason = f"{type(error).__name__}: {error}"
            if self._reasons.get(name) != reason:
                self._reasons[name] = reason
                with contextlib.suppress(Exception):  # sealing continues without a journal
                    self._journal.error("not sealed", segment=name, reason=reason, next="retried later")
        else:
            self._reasons.pop(name, None)

    def _seal(self, segment: Segment) -> bool:
        """Seal a segment; return False if the disk lacks room or the segment was reclaimed."""
        try:
            raw_bytes = segment.path.stat().st_size
            if not self._budget.can_seal(raw_bytes):
                return False
            # A failed attempt may have met a quota, which the free space does not show.
            reserve = segment.path.name in self._reasons or not self._budget.has_plenty(raw_bytes)
            done = seal(
                self._root, segment, self._disk, self._ledger, level=self._level, reserve=reserve, now=time.time_ns
            )
        except FileNotFoundError:
            if segment.path.exists():
                raise
            return False
        self._metrics.sealed += 1
        self._metrics.sealed_bytes += done.stored_bytes
        self._metrics.seal_waits_since = time.monotonic()
        self._ledger.cut()
        with contextlib.suppress(Exception):
            index = done.index
            self._journal.debug("sealed", segment=index.base_sequence, raw=index.raw_bytes, bytes=done.stored_bytes)
        return True

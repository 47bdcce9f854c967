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
    waiting_segments: int = 0  # without room at the last attempt
    _has_spare_file: bool = False  # for the next cut
    _has_failed: bool = False  # in the last pass
    _failures: dict[str, str] = field(default_factory=dict)  # last failure of each segment; "" for the listing
    _is_stopping: bool = False
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
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # sealing at normal priority is better than none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        pause = _RETRY_SECONDS
        while not self._is_stopping:
            self._run_pass()
            interval = _ROOM_SECONDS if self.waiting_segments or not self._has_spare_file else None
            was_woken = self._wake.wait(pause if self._has_failed else interval)
            self._wake.clear()
            pause = min(2 * pause, _RETRY_MAX_SECONDS) if self._has_failed and not was_woken else _RETRY_SECONDS

    def _run_pass(self) -> None:
        self._ledger.cut()  # the previous run may have left a long ledger
        self._metrics.seal_waits_since = self._metrics.seal_waits_since or time.monotonic()
        self._has_failed = False
        with self._logging_errors(""):
            self._has_spare_file = self._writer.prepare_spare()
            waiting_segments = 0
            for segment in segments_to_seal(self._root, self._writer.base_sequence):
                if self._is_stopping:
                    break
                with self._logging_errors(segment.path.name):
                    waiting_segments += not self._seal(segment)
                if not self._is_stopping:
                    self._has_spare_file = self._writer.prepare_spare()
            self.waiting_segments = waiting_segments
        if not (self._has_failed or self.waiting_segments):
            self._metrics.seal_waits_since = 0.0

    @contextlib.contextmanager
    def _logging_errors(self, name: str) -> Iterator[None]:
        """Log each new error instead of raising it; the thread retries later."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (sealing would end without a report)
            self._has_failed = True
            self._metrics.seal_failures += 1
            reason = f"{type(error).__name__}: {error}"
            if self._failures.get(name) != reason:
                self._failures[name] = reason
                with contextlib.suppress(Exception):  # sealing must continue even if the journal fails
                    self._journal.error("sealing failed", segment=name, reason=reason, next="the thread retries later")
        else:
            self._failures.pop(name, None)

    def _seal(self, segment: Segment) -> bool:
        """Seal a segment; return False if the disk lacks room or the segment was reclaimed."""
        try:
            raw_bytes = segment.path.stat().st_size
            if not self._budget.can_seal(raw_bytes):
                return False
            # A failed attempt may have met a quota, which the free space does not show.
            reserve = segment.path.name in self._failures or not self._budget.has_plenty(raw_bytes)
            result = seal(
                self._root, segment, self._disk, self._ledger, level=self._level, reserve=reserve, now=time.time_ns
            )
        except FileNotFoundError:
            if segment.path.exists():
                raise
            return False
        self._metrics.sealed += 1
        self._metrics.sealed_bytes += result.stored_bytes
        self._metrics.seal_waits_since = time.monotonic()
        self._ledger.cut()
        with contextlib.suppress(Exception):
            index = result.index
            self._journal.debug("sealed", segment=index.base_sequence, raw=index.raw_bytes, bytes=result.stored_bytes)
        return True

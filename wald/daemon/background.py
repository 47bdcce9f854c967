"""Background thread that seals segments.

The thread beside the loop: it seals the segments that were cut, and allocates the file for the next cut.

When it is woken it lists the directory, so a start after a crash needs nothing special. A segment that the disk has no
room to seal waits; meanwhile it can be read and reclaimed as it is. The thread runs at a lower priority. Compression
and digests release the interpreter's lock, and the rest is short, so the loop does not wait long for it.
No error ends the thread: each is reported and counted, and after a pause everything is tried again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from wald.daemon.metrics import Metrics
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.writing.disk_budget import DiskBudget
from wald.writing.sealing import Sealed, pending, seal
from wald.writing.writer import Writer

_NICENESS = 19  # 5 to 15 % more for the turn than 10 or 0, measured on two cores with a producer on the other
_SWITCH_SECONDS = 0.0001  # the interpreter's 5 ms would be several turns
_ROOM_SECONDS = 1.0  # between checks whether the disk has room by now
_RETRY_SECONDS = 5.0  # after a failure that may pass by itself; doubled while it does not
_RETRY_MAX_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A segment that could not be sealed; without a name: the segments could not even be listed."""

    name: str
    reason: str


class Background:
    """The thread.

    Args:
        metrics: counts what is sealed, what failed, and since when segments wait.
        report: called in the thread with each :class:`Sealed`, and with each :class:`Failure` that is a new one.

    Attributes:
        waiting: how many segments the disk had no room to seal, at the last attempt.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        ledger: Ledger,
        writer: Writer,
        room: DiskBudget,
        metrics: Metrics,
        report: Callable[[Sealed | Failure], None],
        *,
        level: int,
    ) -> None:
        self._root = root
        self._disk = disk
        self._ledger = ledger
        self._writer = writer
        self._room = room
        self._metrics = metrics
        self._report = report
        self._level = level
        self._wake = threading.Event()
        self._stopping = False
        self.waiting = 0
        self._prepared = False  # whether the next cut has its file
        self._reasons: dict[str, str] = {}  # for which the last attempt failed
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="background")
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look for work."""
        self._metrics.seal_waits_since = self._metrics.seal_waits_since or time.monotonic()
        self._wake.set()

    def stop(self) -> None:
        """Finish the step in flight and end."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # slower for the turn is better than not at all
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        pause = _RETRY_SECONDS
        while not self._stopping:
            succeeded = self._work()
            interval = _ROOM_SECONDS if self.waiting or not self._prepared else None
            woken = self._wake.wait(interval if succeeded else pause)
            self._wake.clear()
            pause = _RETRY_SECONDS if succeeded or woken else min(2 * pause, _RETRY_MAX_SECONDS)

    def _work(self) -> bool:
        """Do what there is to do; False if something failed. It raises nothing."""
        self._ledger.cut()  # one from before this daemon may be long
        self._metrics.seal_waits_since = self._metrics.seal_waits_since or time.monotonic()
        try:
            self._prepared = self._writer.prepare_spare()
            succeeded = self._seal_all()
            self._reasons.pop("", None)
        except Exception as error:  # noqa: BLE001  (if the thread ended, sealing would end without a report)
            succeeded = self._failed("", error)
        if succeeded and not self.waiting:
            self._metrics.seal_waits_since = 0.0
        return succeeded

    def _seal_all(self) -> bool:
        """Seal until nothing is left that there is room for; False if something failed."""
        succeeded = True
        waiting = 0
        for segment in pending(self._root, self._writer.base_sequence):
            if self._stopping:
                break
            try:
                sealed = self._seal(segment)
            except Exception as error:  # noqa: BLE001  (it must not hold up other segments)
                succeeded = self._failed(segment.path.name, error)
            else:
                self._reasons.pop(segment.path.name, None)
                waiting += sealed is None
                if sealed is not None:
                    self._metrics.sealed += 1
                    self._metrics.sealed_bytes += sealed.sealed_bytes
                    self._metrics.seal_waits_since = time.monotonic()
                    self._ledger.cut()
                    self._send(sealed)
            if not self._stopping:
                self._writer.prepare_spare()
        self.waiting = waiting
        return succeeded

    def _seal(self, segment: Segment) -> Sealed | None:
        """Seal one segment; None: it waits, for room or because it is about to be reclaimed as it is."""
        try:
            raw_bytes = segment.path.stat().st_size
            if not self._room.lets_seal(raw_bytes):
                return None
            # What has failed may have met a quota, which the free space does not show.
            reserve = segment.path.name in self._reasons or not self._room.is_plenty(raw_bytes)
            return seal(
                self._root, segment, self._disk, self._ledger, level=self._level, reserve=reserve, now=time.time_ns
            )
        except FileNotFoundError:
            if segment.path.exists():
                raise
            return None

    def _failed(self, name: str, error: Exception) -> bool:
        reason = f"{type(error).__name__}: {error}"
        self._metrics.seal_failures += 1
        if self._reasons.get(name) != reason:  # once, however often it is tried again
            self._reasons[name] = reason
            self._send(Failure(name, reason))
        return False

    def _send(self, event: Sealed | Failure) -> None:
        with contextlib.suppress(Exception):  # a report that fails is no reason to seal nothing
            self._report(event)

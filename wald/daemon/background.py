"""The thread that works beside the turn: it seals what was cut and allocates the file for the next cut.

It is woken, and then looks at the directory, so a start after a crash needs nothing special. What the disk has no room
for waits, and takes nothing from others meanwhile: as it is, it can be read and reclaimed. The thread runs at a lower
priority; compression and digests release the interpreter's lock, and for the rest the loop need not wait long for it.
No error ends it: each is told and counted, and after a pause everything is tried again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from wald.metrics import Metrics
from wald.store.files.directory import Root, Segment
from wald.store.files.disk import Disk
from wald.store.files.ledger import Ledger
from wald.store.writing.room import Room
from wald.store.writing.sealer import Sealed, pending, seal
from wald.store.writing.writer import Writer

_NICENESS = 19  # 5 to 15 % more for the turn than 10 or 0, measured on two cores with a producer on the other
_SWITCH_SECONDS = 0.0001  # the interpreter's 5 ms would be several turns
_ROOM_SECONDS = 1.0  # between looks whether there is room on the disk by now
_RETRY_SECONDS = 5.0  # after a failure that may pass by itself; doubled while it does not
_RETRY_MAX_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A segment that could not be sealed; without a name: none could, or not even be looked for."""

    name: str
    reason: str


class Background:
    """The thread.

    Args:
        metrics: gets what is sealed, what failed, and since when segments wait.
        tell: called in the thread with each :class:`Sealed`, and with each :class:`Failure` that is a new one.

    Attributes:
        waiting: segments that the disk had no room to seal, at the last look.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        ledger: Ledger,
        writer: Writer,
        room: Room,
        metrics: Metrics,
        tell: Callable[[Sealed | Failure], None],
        *,
        level: int,
    ) -> None:
        self._root = root
        self._disk = disk
        self._ledger = ledger
        self._writer = writer
        self._room = room
        self._metrics = metrics
        self._tell = tell
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
        """There may be something to do."""
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
            well = self._work()
            looks = _ROOM_SECONDS if self.waiting or not self._prepared else None
            woken = self._wake.wait(looks if well else pause)
            self._wake.clear()
            pause = _RETRY_SECONDS if well or woken else min(2 * pause, _RETRY_MAX_SECONDS)

    def _work(self) -> bool:
        """Do what there is to do; False if something failed. Raises nothing."""
        self._metrics.seal_waits_since = self._metrics.seal_waits_since or time.monotonic()
        try:
            self._prepared = self._writer.prepare_spare()
            well = self._seal_all()
            self._reasons.pop("", None)
        except Exception as error:  # noqa: BLE001  (a thread that ended would end sealing without a word)
            well = self._failed("", error)
        if well and not self.waiting:
            self._metrics.seal_waits_since = 0.0
        return well

    def _seal_all(self) -> bool:
        """Seal until nothing is left that there is room for; False if something failed."""
        well = True
        waiting = 0
        for segment in pending(self._root, self._writer.base_sequence):
            if self._stopping:
                break
            try:
                sealed = self._seal(segment)
            except Exception as error:  # noqa: BLE001  (it holds up no other segment)
                well = self._failed(segment.path.name, error)
            else:
                self._reasons.pop(segment.path.name, None)
                waiting += sealed is None
                if sealed is not None:
                    self._metrics.sealed += 1
                    self._metrics.sealed_bytes += sealed.sealed_bytes
                    self._metrics.seal_waits_since = time.monotonic()
                    self._say(sealed)
            if not self._stopping:
                self._writer.prepare_spare()
        self.waiting = waiting
        return well

    def _seal(self, segment: Segment) -> Sealed | None:
        """None: it waits, because there is no room, or because somebody is about to reclaim it as it is."""
        try:
            raw_bytes = segment.path.stat().st_size
            if not self._room.lets_seal(raw_bytes):
                return None
            # What has failed may have met a quota, of which the numbers do not tell.
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
            self._say(Failure(name, reason))
        return False

    def _say(self, event: Sealed | Failure) -> None:
        with contextlib.suppress(Exception):  # that nobody hears it is no reason to seal nothing
            self._tell(event)

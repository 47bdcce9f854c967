"""The thread that works beside the turn: it seals what was cut and allocates the file for the next cut.

It is woken, and then looks at the directory, so a start after a crash needs nothing special. It runs at a lower
priority; compression and digests release the interpreter's lock, and for the rest the loop need not wait long for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from wald.store.directory import Root
from wald.store.disk import Disk
from wald.store.ledger import Ledger
from wald.store.sealer import Sealed, pending, seal
from wald.store.writer import Writer

_NICENESS = 19  # 5 to 15 % more for the turn than 10 or 0, measured on two cores with a producer on the other
_SWITCH_SECONDS = 0.0001  # the interpreter's 5 ms would be several turns
_RETRY_SECONDS = 5.0  # after a failure that may pass by itself, such as a full disk; doubled while it does not
_RETRY_MAX_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A segment that could not be sealed."""

    name: str
    reason: str


class Background:
    """The thread.

    Args:
        tell: called in the thread with each :class:`Sealed` and :class:`Failure`.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        ledger: Ledger,
        writer: Writer,
        tell: Callable[[Sealed | Failure], None],
        *,
        level: int,
    ) -> None:
        self._root = root
        self._disk = disk
        self._ledger = ledger
        self._writer = writer
        self._tell = tell
        self._level = level
        self._wake = threading.Event()
        self._stopping = False
        self._failures: set[Failure] = set()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="background")
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def stop(self) -> None:
        """Finish the step in flight and end."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        pause = _RETRY_SECONDS
        while not self._stopping:
            self._writer.prepare_spare()
            well = self._seal_all()
            woken = self._wake.wait(None if well else pause)
            self._wake.clear()
            pause = _RETRY_SECONDS if well or woken else min(2 * pause, _RETRY_MAX_SECONDS)

    def _seal_all(self) -> bool:
        """Seal until nothing is left; False if something failed."""
        well = True
        for segment in pending(self._root, self._writer.base_sequence):
            if self._stopping:
                break
            try:
                sealed = seal(
                    self._root,
                    segment,
                    self._disk,
                    self._ledger,
                    level=self._level,
                    now=time.time_ns,
                )
            except Exception as error:  # noqa: BLE001  (a bug here must not end sealing without a word)
                failure = Failure(segment.path.name, str(error))
                if failure not in self._failures:  # once, however often it is tried again
                    self._failures.add(failure)
                    self._tell(failure)
                well = False
            else:
                self._tell(sealed)
            if not self._stopping:
                self._writer.prepare_spare()
        return well

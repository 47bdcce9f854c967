"""A full disk does not end a drain: it goes on where it was, once there is room.

What commands have done meanwhile is in their files, which have their room already. So nothing is processed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wald.errors import DISK_FULL, DiskFailure
from wald_drain.job import Drain
from wald_drain.retries import pause_seconds

_LONG_SECONDS = 60.0  # after which a full disk is another one


def through_full_disks(drain: Drain, run: Callable[[], int]) -> int:
    """Return what ``run`` returns, which is called again whenever the disk was full; or 0 if it is to stop then.

    Raises:
        DiskFailure: the disk fails.
        WaldError: as ``run`` raises.
    """
    number = 1
    while True:
        began = time.monotonic()
        try:
            return run()
        except DiskFailure as error:
            drain.stop.clear()  # a worker that failed has set it
            if drain.asked.is_set():
                drain.stop.set()
            if drain.stop.is_set() or not _is_full(error):
                raise
            number = 1 if time.monotonic() - began > _LONG_SECONDS else number
            drain.report(f"{error.message}; again in {pause_seconds(number):g} s")
        if drain.stop.wait(pause_seconds(number)):
            return 0
        number += 1


def _is_full(error: DiskFailure) -> bool:
    """Whether there may be room later, also on the disk of the daemon."""
    cause = error.__cause__
    return not isinstance(cause, OSError) or cause.errno in DISK_FULL

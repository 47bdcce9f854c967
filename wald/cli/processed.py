"""``wald append --wait-processed``: waits until a group has processed what was sent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from wald.client.producer import Durable
from wald.log import Log
from wald.work.snapshot import Progress, Unprocessed, not_processed, pause


class Awaited:
    """What was sent to ``route``, until ``group`` has processed it.

    Raises:
        NotFound: there is no such group on the route; nothing was sent.
    """

    def __init__(self, root: Path, route: str, group: str) -> None:
        self._log = Log(root)
        self._unprocessed = Unprocessed(route, group)
        self._progress = Progress(self._log, route, group)
        self._progress.read()

    def extend(self, acknowledged: Iterable[Durable]) -> None:
        """Take in what is durable."""
        for first, last in acknowledged:
            self._unprocessed.add(first, last)

    def wait(self, seconds: float) -> None:
        """Return once all of it was processed.

        Raises:
            NotProcessed: it was not for so many seconds.
            NotFound: the group is gone.
            OSError: the files of the group cannot be read or synced.
        """
        until = time.monotonic() + seconds
        sent, slept = self._unprocessed.count, 0.0
        while True:
            began = time.monotonic()
            self._progress.read()
            self._unprocessed.update(self._progress)
            now = time.monotonic()
            if not self._unprocessed.count:
                return
            if now >= until:
                raise not_processed(self._log, self._unprocessed, sent, seconds)
            slept = pause(slept, now - began)
            time.sleep(min(slept, until - now))

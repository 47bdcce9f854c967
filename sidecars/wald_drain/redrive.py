"""Putting dead letters back to the routes they came from: those that are there at the start, each exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from wald_drain.consumer import Consumer
from wald_drain.handing import Handing
from wald_drain.handover import HandoverFile
from wald_drain.portions import portions

_RECORDS_MAX = 1000  # at a time; what is put back is told of


def redrive(consumer: Consumer, *, daemon: Path, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """Put back what is behind the cursor of ``consumer``, whose route is a dead-letter route, and move the cursor.

    Args:
        daemon: the root of the log, or the daemon's socket.
        stop: once it is set nothing more is begun.
        tell: gets a line for every batch.

    Raises:
        NotFound: no such route, or the route of a dead letter is gone; those before it are back.
        Locked: the dead-letter route is being drained for this group.
        InvalidInput: a record is no dead letter of this log; those before it are back.
        Unavailable: there is no daemon.
    """
    with HandoverFile(consumer.log.root, consumer.route, consumer.group, consumer.disk) as file:
        handing = Handing(consumer, file, daemon=daemon, tell=tell)
        handing.finish()
        consumer.enter(tell)
        for portion in portions(consumer.unprocessed(), records_max=_RECORDS_MAX):
            if stop.is_set():
                return
            handing.put_back(portion.records)

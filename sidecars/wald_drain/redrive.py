"""Redrive: puts the dead letters that exist at the start back to the routes they came from, each exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from wald_drain.consumer import Consumer
from wald_drain.handover import HandoverFile, Handovers
from wald_drain.portions import portions

_RECORDS_MAX = 1000  # at a time; each batch is reported


def redrive(consumer: Consumer, *, daemon: Path, stop: threading.Event, report: Callable[[str], None]) -> None:
    """Put back the dead letters after the cursor of ``consumer``, and move the cursor.

    Args:
        daemon: the root of the log, or the daemon's socket.
        stop: after it is set, no other batch is begun.
        report: gets a line for every batch.

    Raises:
        NotFound: there is no such route, or none that a dead letter came from; those before that one are put back.
        Locked: another process drains the dead-letter route for this group.
        InvalidInput: a record is no dead letter of this log; those before it are put back.
        Unavailable: no daemon runs.
    """
    with HandoverFile(consumer.log.root, consumer.route, consumer.group, consumer.disk) as file:
        handovers = Handovers(consumer, file, daemon=daemon, report=report)
        handovers.finish()
        consumer.enter(report)
        for portion in portions(consumer.unprocessed(), records_max=_RECORDS_MAX):
            if stop.is_set():
                return
            handovers.put_back(portion.records)

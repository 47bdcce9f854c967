"""What a drain is asked to do, with workers or without; and what both say and do in the same way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wald.errors import DISK_ERRORS, DiskFailure
from wald.files.layout import Root
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.hints import room_commands
from wald.work.group import Order
from wald_drain.consumer import Consumer
from wald_drain.counts import Counts
from wald_drain.portions import Portion, StdinFormat


@dataclass(frozen=True, slots=True)
class Job:
    """The options of one drain.

    Attributes:
        records_max: how many records the command gets at a time.
        tries: how often it gets a single record before that is given up; None: until it succeeds.
        daemon: the root of the log, or the daemon's socket.
        letter_max_bytes: of a dead letter with a single record; a longer one is not even tried.
        order: in which several workers get records.
    """

    command: tuple[str, ...]
    stdin_format: StdinFormat
    records_max: int
    tries: int | None
    dead_letter: str
    daemon: Path
    exit_at_end: bool
    letter_max_bytes: int = REQUEST_MAX_BYTES
    order: Order = "log"


@dataclass(frozen=True, slots=True)
class Drain:
    """A drain that is under way, with workers or without.

    Attributes:
        stop: after it is set, no other command is started. It is set after a signal, and when a worker fails.
        report: gets a line for every failed try and every record given up; called by many threads.
        counts: gets what has been done.
        asked: set by a signal, before ``stop`` is; on a busy machine long before.
    """

    consumer: Consumer
    job: Job
    counts: Counts
    stop: threading.Event
    report: Callable[[str], None]
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def is_stopping(self) -> bool:
        """Whether no command is started any more, a failed one neither."""
        return self.stop.is_set() or self.asked.is_set()

    def report_of_route(self, text: str) -> None:
        self.report(f"{self.consumer.route}: {text}")


def variables(consumer: Consumer, portion: Portion, number: int) -> dict[str, str]:
    """The environment of a command for its try ``number``."""
    return {
        "WALD_ROUTE": consumer.route,
        "WALD_GROUP": consumer.group,
        "WALD_FIRST": str(portion.first),
        "WALD_LAST": str(portion.last),
        "WALD_COUNT": str(portion.count),
        "WALD_TRY": str(number),
    }


@contextmanager
def disk_failures(root: Root) -> Iterator[None]:
    """
    Raises:
        DiskFailure: the disk is full, or fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise DiskFailure(
            f"{error.filename or root.routes}: {error.strerror}; nothing is lost",
            hint=f"{room_commands(root.path, error=error)}; start wald-drain again, which continues after the cursor",
        ) from error

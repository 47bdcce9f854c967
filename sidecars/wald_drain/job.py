"""What a drain is asked to do, with workers or without; and what both say and do in the same way."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wald.errors import DISK_ERRORS, DiskFailure, command_line
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.store.files.directory import Root
from wald.store.files.moved import moved
from wald.work.arguments import Order
from wald_drain.consumer import Consumer
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
            hint=f"df -h {root.path}; then start wald-drain again, which goes on after the cursor",
        ) from error


class MovedRoute:
    """Reports that nothing more comes to a route that was moved, and how to go on."""

    def __init__(self, consumer: Consumer, job: Job, report: Callable[[str], None]) -> None:
        self._consumer = consumer
        self._job = job
        self._report = report
        self._reported = False

    def report_once(self) -> None:
        """Report it, unless that was done; to be called at the end of the route."""
        root, consumer = self._consumer.log.root, self._consumer
        if self._reported or (mark := moved(root, consumer.route)) is None:
            return
        self._reported = True
        words = f"feed {mark.to} --group {consumer.group} -- {shlex.join(self._job.command)}"
        going_on = command_line(root.path, words, program="wald-drain")
        self._report(f"{mark.message(consumer.route)}\n  hint: {going_on}")

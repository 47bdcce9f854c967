"""The log at one moment, as all pages show it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from wald.answers.liveness import Life, Liveness, liveness, socket_of
from wald.errors import WaldError
from wald.format.head import Head
from wald.log import Log

_ASK_SECONDS = 1.0  # how long the daemon may take to answer STAT


@dataclass(frozen=True, slots=True)
class Picture:
    """What is there at one moment.

    Attributes:
        number: of the picture; each has a larger one.
        at_ns: when it was taken, ns since 1970.
        head: None if there is none, or none that can be read; ``trouble`` says why.
    """

    number: int
    at_ns: int
    daemon: Liveness
    head: Head | None
    trouble: str = ""

    @property
    def is_running(self) -> bool:
        return self.daemon.life is Life.RUNS


class Camera:
    """Takes pictures of a log; in one thread at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._number = 0

    def take(self) -> Picture:
        """A picture, now. What goes wrong is part of it."""
        log = self._log
        daemon = liveness(log.root, log.identity, socket_of(log.root), seconds=_ASK_SECONDS)
        head, trouble = None, ""
        try:
            head = log.head()
        except WaldError as error:
            trouble = error.message
        self._number += 1
        return Picture(self._number, time.time_ns(), daemon, head, trouble)

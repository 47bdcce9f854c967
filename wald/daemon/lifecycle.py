"""What connects the process with its surroundings: signals, which wake the loop, and the journal on stderr."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from types import FrameType

import structlog
from structlog.typing import FilteringBoundLogger


class Signals:
    """SIGTERM and SIGINT stop, SIGHUP reloads, SIGUSR1 cuts; each also makes :attr:`descriptor` readable."""

    def __init__(self) -> None:
        self.stop = False
        self.reload = False
        self.cut = False
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def drain(self) -> None:
        """Make :attr:`descriptor` wait for the next signal."""
        try:
            os.read(self.descriptor, 512)
        except BlockingIOError:
            return

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        elif number == signal.SIGUSR1:
            self.cut = True
        else:
            self.stop = True


def open_journal(log_format: str, log_level: str) -> FilteringBoundLogger:
    """The logger of the daemon: structured lines on stderr. A later call changes the settings of those that are open.

    Args:
        log_format: json, console, or auto for console on a terminal and JSON elsewhere.
    """
    on_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if on_console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def allow_descriptors() -> None:
    """Raise the limit of open files as far as allowed: the usual 1024 is meant for programs that use select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

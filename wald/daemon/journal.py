"""What the daemon says about itself: structured lines on stderr, JSON for machines or coloured for a person."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import FilteringBoundLogger


def open_journal(log_format: str, log_level: str) -> FilteringBoundLogger:
    """A logger; ``log_format`` is json, console, or auto for console on a terminal and JSON elsewhere."""
    person = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if person else structlog.processors.JSONRenderer()
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

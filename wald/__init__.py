"""wald: a durable log and job queue for one machine. ::

    format < files < segments < retention < reading < checking
                     segments < writing < repairing, daemon < cli

A package imports only those to its left. ``client`` sends records over the daemon's socket. A program imports the names
below; each is loaded on first use, so that short commands start fast.

Producer   sends records, and reports which are durable
Consumer   reads the records of a route for a group, and moves its cursor
WorkGroup  leases each record to one of many workers
open       opens the log, to append records and to read from any position

:mod:`wald.aio` has the first three for asyncio, :mod:`wald.logging` a handler for the standard library's logging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from wald import errors
    from wald.client.producer import Producer
    from wald.consumer import Consumer
    from wald.format.records import Record
    from wald.log import Log
    from wald.reading.assembler import Batch
    from wald.retention.cursors import Cursor
    from wald.work.group import WorkGroup

__version__ = "0.1.0"
__all__ = ["Batch", "Consumer", "Cursor", "Log", "Producer", "Record", "WorkGroup", "__version__", "errors", "open"]

_HOMES = {
    "Batch": "wald.reading.assembler",
    "Consumer": "wald.consumer",
    "Cursor": "wald.retention.cursors",
    "Log": "wald.log",
    "Producer": "wald.client.producer",
    "Record": "wald.format.records",
    "WorkGroup": "wald.work.group",
}


def open(root: str | PathLike[str]) -> Log:  # noqa: A001 - called as wald.open
    """Open a log, to read it and to append to it.

    Args:
        root: the directory of the log.

    Returns:
        the log. Only one that appended records needs to be closed.

    Raises:
        WaldError: see :class:`wald.Log`.

    Example::

        log = wald.open("/var/spool/wald")
        for record in log.records("orders", start="earliest"):
            print(record.sequence, record.value)
    """
    from wald.log import Log

    return Log(root)


if not TYPE_CHECKING:  # a type checker uses the imports above; __getattr__ would hide misspelt names

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name == "errors":
            return import_module("wald.errors")
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

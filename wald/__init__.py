"""wald: a durable spool for one machine, read at leisure.

    format < store < daemon < cli       what is to the left knows nothing of what is to the right

``format`` is bytes, ``store`` is files, ``daemon`` is the process, ``cli`` is the commands. A program that reads a log
needs :func:`open` only; nothing is imported before it is used, so that short commands start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from wald.format.record import Record
    from wald.log import Log

__version__ = "0.1.0"
__all__ = ["Log", "Record", "__version__", "open"]


def open(root: str | PathLike[str]) -> Log:  # noqa: A001 - wald.open is what it is called by
    """The log in the directory ``root``.

    Raises:
        NotFound: there is none.
        UnsupportedFormat: it was written by a newer wald.
    """
    from wald.log import Log

    return Log(root)


def __getattr__(name: str) -> Any:  # the attributes below are a class each
    if name == "Log":
        from wald.log import Log

        return Log
    if name == "Record":
        from wald.format.record import Record

        return Record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Every error wald raises on purpose: what happened, what to type next, and the exit code of a command that dies of it.

A message is one line and names the file and the offset where there is one; the hint is a command or an action.
Exit codes are part of the interface (README, "Exit codes"): 0 done, 1 a bug or an unforeseen failure, 2 wrong usage.
"""

from __future__ import annotations


class WaldError(Exception):
    """Something went wrong that an operator can act on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidInput(WaldError):
    """A name, a number, a time or a setting that can never be right."""

    exit_code = 2


class NotFound(WaldError):
    """The root, route, cursor or sequence that was asked for does not exist."""

    exit_code = 3


class Damaged(WaldError):
    """Bytes on disk are not what was written there."""

    exit_code = 4


class Locked(WaldError):
    """Another process does this work already: a daemon on this root, a reclaim or an archive beside it."""

    exit_code = 5


class Unavailable(WaldError):
    """The daemon cannot be reached, or will not take this now."""

    exit_code = 6


class DiskFailure(WaldError):
    """The disk is full, or a write or sync failed and could not be repeated elsewhere."""

    exit_code = 7


class UnsupportedFormat(WaldError):
    """The root was written by a newer wald."""

    exit_code = 8


class Refused(WaldError):
    """The operation would break a promise: a cursor moved backwards, or past the head."""

    exit_code = 9


class GivenUp(WaldError):
    """Records that a command could not process are dead letters now."""

    exit_code = 10

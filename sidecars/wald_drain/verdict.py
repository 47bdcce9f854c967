"""What a try of the command means: its exit code and the number of the try in, what to do next out.

A batch that fails is tried a few times as it is, and then in halves, and a half that fails in halves again: so what is
good in it is processed, and the record that makes it fail stands alone. Only that one is given up, if anything is.
"""

from __future__ import annotations

import os
import signal
from enum import Enum

PAUSE_FIRST_SECONDS = 0.1
PAUSE_MAX_SECONDS = 30.0
TRIES_WHOLE = 3  # of a batch with several records, before it is halved


class Verdict(Enum):
    """What becomes of the records that the command was given."""

    COMMIT = "they are processed"
    RETRY = "the same again, after a pause"
    LATER = "the same again, after a pause, and this was no try"
    HALVE = "the first half of them, after a pause, then the other"
    GIVE_UP = "they go to the dead-letter route"
    LEAVE = "they wait for the next start"


def tries_of(count: int, *, halved: bool, tries: int | None) -> int | None:
    """How often the command gets the same ``count`` records; None: until it succeeds.

    Args:
        halved: whether they were part of a batch that has failed.
        tries: of a record before it is given up; None: it never is.
    """
    if count == 1:
        return tries
    return 1 if halved else min(TRIES_WHOLE, tries or TRIES_WHOLE)


def judge(exit_code: int, *, number: int, tries: int | None, count: int, stopping: bool) -> Verdict:
    """The verdict on one try.

    Args:
        exit_code: as :mod:`subprocess` has it: below 0 is the signal that ended it.
        number: of this try; the first is 1, the last is ``tries``.
        tries: as :func:`tries_of`.
        count: how many records the command was given.
        stopping: whether drain has been told to stop.
    """
    if exit_code == 0:
        return Verdict.COMMIT
    if stopping:
        return Verdict.LEAVE
    if exit_code == os.EX_TEMPFAIL:
        return Verdict.LATER
    if tries is None or number < tries:
        return Verdict.RETRY
    return Verdict.GIVE_UP if count == 1 else Verdict.HALVE


def pause_seconds(number: int) -> float:
    """How long to wait after the failed run ``number``: doubled every time, up to a limit."""
    return min(PAUSE_FIRST_SECONDS * 2.0 ** min(number - 1, 20), PAUSE_MAX_SECONDS)


def ending(exit_code: int) -> str:
    """How the command ended, in words.

    >>> ending(3), ending(-11)
    ('exit 3', 'killed by SIGSEGV')
    """
    if exit_code >= 0:
        return f"exit {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-exit_code}"


def reason(exit_code: int, tries: int) -> str:
    """Why records were given up, in words."""
    return f"{ending(exit_code)} after {tries} {'try' if tries == 1 else 'tries'}"

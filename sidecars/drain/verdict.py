"""What a try of the command means: its exit code and the number of the try in, what to do next out."""

from __future__ import annotations

import signal
from enum import Enum

PAUSE_FIRST_SECONDS = 0.1
PAUSE_MAX_SECONDS = 30.0


class Verdict(Enum):
    """What becomes of the records that the command was given."""

    COMMIT = "they are processed"
    RETRY = "the same again, after a pause"
    GIVE_UP = "they go to the dead-letter route"
    LEAVE = "they wait for the next start"


def judge(exit_code: int, *, number: int, tries: int, stopping: bool) -> Verdict:
    """The verdict on one try.

    Args:
        exit_code: as :mod:`subprocess` has it: below 0 is the signal that ended it.
        number: of this try; the first is 1, the last is ``tries``.
        stopping: whether drain has been told to stop.
    """
    if exit_code == 0:
        return Verdict.COMMIT
    if stopping:
        return Verdict.LEAVE
    return Verdict.RETRY if number < tries else Verdict.GIVE_UP


def pause_seconds(number: int) -> float:
    """How long to wait after the failed try ``number``: doubled every time, up to a limit."""
    return min(PAUSE_FIRST_SECONDS * 2.0 ** (number - 1), PAUSE_MAX_SECONDS)


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

"""What follows a try of the command: its exit code and the number of the try in, the next step out.

A batch that fails is tried a few times as it is, then in halves, and a half that fails in halves again. So its good
records are processed, and the record that makes it fail is alone in the end. Only such a record is ever given up.
"""

from __future__ import annotations

import os
import signal
from enum import Enum

from wald.setting_types import format_seconds

PAUSE_FIRST_SECONDS = 0.1
PAUSE_MAX_SECONDS = 30.0
TRIES_WHOLE = 3  # of a batch with several records, before it is halved
UNKNOWN = 1 << 16  # in place of the exit code of a command whose keeper was killed
TIMED_OUT = 1 << 17  # and above, in place of the exit code of a command that had no time left: plus its time in ms
KILLED_TOO = "killed with its wald-drain"


class NextStep(Enum):
    """What happens to the records that the command was given."""

    COMMIT = "they are processed"
    RETRY = "the command gets them again after a pause"
    LATER = "the command gets them again after a pause, and this was no try"
    HALVE = "the command gets the first half of them after a pause, then the second"
    GIVE_UP = "they go to the dead-letter route"
    SKIPPED = "an operator has moved the cursor past the first of them"
    LEAVE = "they wait for the next start"


def tries_of(count: int, *, halved: bool, tries: int | None) -> int | None:
    """How often the command gets the same ``count`` records; None: until it succeeds.

    Args:
        halved: whether they are part of a batch that has failed.
        tries: of a record before it is given up; None: it is never given up.
    """
    if count == 1:
        return tries
    return 1 if halved else min(TRIES_WHOLE, tries or TRIES_WHOLE)


def next_step(exit_code: int, *, number: int, tries: int | None, count: int, stopping: bool) -> NextStep:
    """What follows one try.

    Args:
        exit_code: as in :mod:`subprocess`: a negative number is the signal that ended the command; or UNKNOWN.
        number: of this try; the first is 1, the last is ``tries``.
        tries: as returned by :func:`tries_of`.
        count: how many records the command was given.
        stopping: whether drain is stopping.
    """
    if exit_code == 0:
        return NextStep.COMMIT
    if stopping:
        return NextStep.LEAVE
    if not is_failure(exit_code):
        return NextStep.LATER
    if tries is None or number < tries:
        return NextStep.RETRY
    return NextStep.GIVE_UP if count == 1 else NextStep.HALVE


def is_failure(exit_code: int) -> bool:
    """Whether that was a failed try: as far as is known, and the command does not just ask for a delay."""
    return exit_code not in (0, os.EX_TEMPFAIL, UNKNOWN)


def pause_seconds(number: int) -> float:
    """How long to wait after the failed run ``number``: doubled every time, up to a limit."""
    return min(PAUSE_FIRST_SECONDS * 2.0 ** min(number - 1, 20), PAUSE_MAX_SECONDS)


def ending(exit_code: int) -> str:
    """How the command ended, as text.

    >>> ending(3), ending(-11), ending(TIMED_OUT + 300_000)
    ('exit 3', 'killed by SIGSEGV', 'time limit of 5 min')
    """
    if exit_code == UNKNOWN:
        return "its keeper was killed, so how it ended is not known"
    if exit_code >= TIMED_OUT:
        return f"time limit of {format_seconds((exit_code - TIMED_OUT) / 1000)}"
    if exit_code >= 0:
        return f"exit {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-exit_code}"


def failure(named: str, step: NextStep, exit_code: int, number: int, tries: int | None, seconds: float) -> str:
    """The line about a failed try.

    Args:
        number: of this try; tries: the most that a single record may have.
        seconds: when the command gets the records again.
    """
    of_tries = "" if tries is None else f" of {tries}"
    text = f"{named}: {ending(exit_code)}"
    match step:
        case NextStep.LATER if exit_code == UNKNOWN:
            return f"{text}, again in {seconds:g} s"
        case NextStep.LATER:
            return f"{text}, which says later, again in {seconds:g} s"
        case NextStep.RETRY:
            return f"{text}, try {number}{of_tries}, again in {seconds:g} s"
        case NextStep.HALVE:
            return f"{text}, try {number}{of_tries}, in halves in {seconds:g} s"
    return f"{text}, try {number}{of_tries}"


def reason(last: str, tries: int) -> str:
    """Why records were given up, as text; ``last`` is how the last try ended."""
    return f"{last} after {tries} {'try' if tries == 1 else 'tries'}"

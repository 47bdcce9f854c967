"""Step after a try of the command: a pure function of the exit code and the number of the try.

A batch that fails is tried a few times unchanged, then in halves, and a half that fails in halves again. So its good
records are processed, and the record that makes it fail is alone in the end. Only a single record is ever given up.
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
TIMED_OUT = 1 << 17  # and above, in place of the exit code of a command that exceeded its limit: plus that, in ms
KILLED_TOO = "killed with its wald-drain"


class NextStep(Enum):
    """Step after a try."""

    COMMIT = "the records are processed"
    RETRY = "the command gets them again after a pause"
    LATER = "the command gets them again after a pause, and this was no try"
    HALVE = "the command gets the first half of them after a pause, then the second"
    GIVE_UP = "they go to the dead-letter route"
    SKIPPED = "the cursor was moved: records are leased again"
    LEAVE = "they wait for the next start"


def tries_of(count: int, *, halved: bool, tries: int | None) -> int | None:
    """Return the number of tries for ``count`` records; None: until the command succeeds.

    Args:
        halved: the records are part of a batch that has failed.
        tries: of a single record before it is given up; None: it is never given up.
    """
    if count == 1:
        return tries
    return 1 if halved else min(TRIES_WHOLE, tries or TRIES_WHOLE)


def next_step(exit_code: int, *, number: int, tries: int | None, count: int, stopping: bool) -> NextStep:
    """Return the step after one try.

    Args:
        exit_code: as in :mod:`subprocess` (a negative number is the signal that ended the command), or UNKNOWN.
        number: of this try, from 1 to ``tries``.
        tries: the result of :func:`tries_of`.
        count: the number of records that the command got.
        stopping: drain is stopping.
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
    """Return True for a failed try: its result is known, and the command did not just ask for a delay."""
    return exit_code not in (0, os.EX_TEMPFAIL, UNKNOWN)


def pause_seconds(number: int) -> float:
    """Return the pause after failure ``number``, which doubles up to a limit."""
    return min(PAUSE_FIRST_SECONDS * 2.0 ** min(number - 1, 20), PAUSE_MAX_SECONDS)


def ending(exit_code: int) -> str:
    """Describe an exit code.

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
    """Describe a failed try; ``tries`` are those of a single record, and ``seconds`` the pause."""
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
    """Describe why a record was given up; ``last`` is the ending of its last try."""
    return f"{last} after {tries} {'try' if tries == 1 else 'tries'}"

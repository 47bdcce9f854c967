"""The positions that people type: a sequence or a time, and the error for what is neither."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from wald.errors import InvalidInput
from wald.format.times import moment

EXAMPLES = ("2026-11-21T10:00:00Z", "14:00", "yesterday", "5m")
"""A time with its zone, one of today, a day, and five minutes ago."""


def time_of(option: str, given: str, now: datetime, examples: Sequence[str] = EXAMPLES) -> datetime:
    """The time that was given for ``option``; without a zone it is in that of ``now``.

    Args:
        now: what a time ago counts back from.
        examples: what the hint of an error shows.

    Raises:
        InvalidInput: it is no time.
    """
    if given.isdecimal():
        raise InvalidInput(
            f"{option} {given}: a number alone is a sequence, not a time",
            case="not-a-time",
            option=option,
            examples=examples,
        )
    try:
        return moment(given, now)
    except ValueError:
        raise InvalidInput(
            f"{option} {given}: not a time", case="not-a-time", option=option, examples=examples
        ) from None


def position(option: str, given: str, now: datetime, names: Collection[str] = ()) -> int | datetime:
    """The sequence or the time that was given for ``option``.

    Args:
        now: as of :func:`time_of`.
        names: what the option takes besides.

    Raises:
        InvalidInput: it is neither.
    """
    if given.isdecimal() and given.isascii():
        return int(given)
    try:
        return moment(given, now)
    except ValueError:
        raise InvalidInput(
            f"{option} {given}: neither a sequence nor a time",
            case="neither-sequence-nor-time",
            option=option,
            examples=(*EXAMPLES, *names),
        ) from None

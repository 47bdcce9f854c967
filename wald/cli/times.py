"""Times and positions on a command line: what ``--from``, ``--since`` and their like take."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, TypeVar

import click

from wald.errors import InvalidInput
from wald.format.times import moment

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLES = ("2026-11-21T10:00:00Z", "14:00", "yesterday", "5m")
"""A time with its zone, one of today, a day, and five minutes ago."""


def time_option(name: str, help_text: str) -> Callable[[F], F]:
    """An option that takes a time; None if it is not given."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> datetime | None:
        return None if given is None else time_of(name, given)

    return click.option(name, metavar="TIME", callback=parsed, help=help_text)


def time_of(option: str, given: str) -> datetime:
    """The time that was given for ``option``; without a zone it is local time.

    Raises:
        InvalidInput: it is no time.
    """
    if given.isdecimal():
        raise InvalidInput(f"{option} {given}: a number alone is a sequence, not a time", hint=_hint(option))
    try:
        return moment(given, datetime.now().astimezone())
    except ValueError:
        raise InvalidInput(f"{option} {given}: not a time", hint=_hint(option)) from None


def position(option: str, given: str, names: Collection[str] = ()) -> int | datetime:
    """The sequence or the time that was given for ``option``; ``names`` are what it takes besides.

    Raises:
        InvalidInput: it is neither.
    """
    if given.isdecimal() and given.isascii():
        return int(given)
    try:
        return moment(given, datetime.now().astimezone())
    except ValueError:
        named = "".join(f", {option} {name}" for name in names)
        raise InvalidInput(
            f"{option} {given}: neither a sequence nor a time", hint=f"{option} 250, {_hint(option)}{named}"
        ) from None


def _hint(option: str) -> str:
    return ", ".join(f"{option} {example}" for example in EXAMPLES)

"""Times on a command line: what ``--since``, ``--at`` and their like take, and from when a time ago counts back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from wald.errors import Damaged, InvalidInput
from wald.format.times import is_relative, nanoseconds, parse_time_option, utc
from wald.hints import command_line, hint_for

F = TypeVar("F", bound=Callable[..., Any])

_TO_COME = ("14:00", "2026-12-01T09:00:00+01:00")
_LATEST_NS = (1 << 63) - 1  # what a record can hold


def time_option(name: str, help_text: str) -> Callable[[F], F]:
    """An option that takes a time; None if it is not given."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> datetime | None:
        return None if given is None else parse_time_option(name, given, now())

    return click.option(name, metavar="TIME", callback=parsed, help=help_text)


def due_option(name: str, counted: str, help_text: str) -> Callable[[F], F]:
    """An option that takes a time to come, in ns since 1970; ``counted`` is the option that counts from now on."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> int | None:
        if given is None:
            return None
        if is_relative(given):
            hint = f"{counted} {given} is that long from now on"
            raise InvalidInput(f"{name} {given}: counts back from now", hint=hint)
        due_ns = nanoseconds(parse_time_option(name, given, now(), _TO_COME))
        if due_ns > _LATEST_NS:
            raise InvalidInput(f"{name} {given}: after {utc(_LATEST_NS)}", hint="nanoseconds since 1970 have 64 bits")
        return due_ns

    return click.option(name, metavar="TIME", callback=parsed, help=help_text)


def now() -> datetime:
    """When the command began to ask: one moment for all that it asks, in the zone that "today" is in."""
    from wald.status.schema import local_now

    context = click.get_current_context(silent=True)
    moments = {} if context is None else context.meta
    found: datetime = moments.setdefault(f"{__name__}.now", local_now())
    return found


def warn_of_wrong_times(root: Path, since: object, until: object) -> None:
    """Warn if a clock that was far ahead decides which records are in a range of times."""
    _warn_of_times_ahead(root, until)
    since_ns = nanoseconds(since) if isinstance(since, datetime) else None
    until_ns = nanoseconds(until) if isinstance(until, datetime) else None
    if since_ns is not None or until_ns is not None:
        _warn_of_clock_step(root, since_ns, until_ns)


def _warn_of_clock_step(root: Path, since_ns: int | None, until_ns: int | None) -> None:
    """Warn if records before a clock step are still in the log, and the range has times that they may have."""
    from wald.files.layout import Root
    from wald.files.listing import list_segments
    from wald.files.uptime import read_steps

    with suppress(Damaged, OSError):  # the command reports it
        steps = [
            step
            for step in read_steps(Root(root))
            if (since_ns is None or since_ns <= step.before_ns) and (until_ns is None or until_ns > step.at_ns)
        ]
        segments = list_segments(Root(root)).segments
        if steps and segments and segments[0].base_sequence < steps[-1].base:
            step = steps[-1]
            before, at = utc(step.before_ns), utc(step.at_ns)
            click.echo(
                f"wald: records before {step.base} have append times up to {before}, because the clock was ahead until "
                f"{at}\n  hint: --from and --to take sequences as well; "
                f"{command_line(root, 'history')} lists clock steps",
                err=True,
            )


def _warn_of_times_ahead(root: Path, until: object) -> None:
    """Warn if records appended before a time may have later append times, because the clock was far ahead."""
    from wald.files.layout import Root
    from wald.segments.durable_end import read_head, seconds_ahead
    from wald.setting_types import format_seconds  # "wald append" parses times too, without needing this

    if not isinstance(until, datetime):
        return
    with suppress(Damaged, OSError):  # the command reports it
        head, now_ns = read_head(Root(root)), nanoseconds(now())
        if head is not None and nanoseconds(until) <= head.at_ns and (ahead := seconds_ahead(head.at_ns, now_ns)):
            message = f"append times are {format_seconds(ahead)} ahead of the clock"
            click.echo(
                f"wald: {message}: newer records look later than they are\n  hint: {hint_for('append-times-ahead')}",
                err=True,
            )


def check_span(since: datetime | None, until: datetime | None) -> None:
    """
    Raises:
        InvalidInput: no time is between them.
    """
    if since is not None and until is not None and nanoseconds(since) >= nanoseconds(until):
        times = [utc(nanoseconds(each), 6) for each in (since, until)]
        raise InvalidInput(f"--since {times[0]} is not before --until {times[1]}", hint="--since 2h --until 1h")

"""Options and arguments shared by several programs, including times and the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wald.cli.command import ROOT
from wald.errors import Damaged, InvalidInput, Unavailable
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.locks import is_locked
from wald.format.names import DEFAULT_GROUP, check_group, check_route
from wald.format.times import is_relative, nanoseconds, parse_time_option, utc
from wald.hints import command_line, hint_for
from wald.setting_types import SettingType, duration, format_seconds, size

if TYPE_CHECKING:
    from wald.client.producer import Producer

F = TypeVar("F", bound=Callable[..., Any])

GROUP_HELP = f"The consumer group; '{DEFAULT_GROUP}' if not given."
START_SECONDS = 10.0  # a daemon that holds the lock but does not listen yet is recovering the log
_NEVER_SEEN_SECONDS = 2.0  # without a daemon: perhaps the command before has just started one
_DAY = 86400
_TO_COME = ("14:00", "2026-12-01T09:00:00+01:00")
_LATEST_NS = (1 << 63) - 1  # the limit of a record


class DefaultGroup(click.Group):
    """A group whose first command is the default: ``wald-archive ROUTE…`` is ``wald-archive pack ROUTE…``."""

    def __init__(self, *args: Any, alone: bool = False, takes_command: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._alone = alone  # it is the default even without arguments
        # Only the first command takes a command line after "--"; a word before "--" is then no name of another command.
        self._takes_command = takes_command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = 2 if args[:1] == ["--root"] else int(bool(args) and args[0].startswith("--root="))
        following, first = args[before : before + 1], next(iter(self.commands))
        names = (first,) if self._takes_command and "--" in args[:-1] else tuple(self.commands)
        if following[0] not in (*names, "--help", "-h", "--version") if following else self._alone:
            args = [*args[:before], first, *args[before:]]
        return super().parse_args(ctx, args)


def _root(ctx: click.Context, _: click.Parameter, given: Path | None) -> Path:
    root = given or ctx.find_object(Path) or os.environ.get("WALD_ROOT")
    if not root:
        raise InvalidInput("which log? no root was given", hint="--root DIR, or export WALD_ROOT=DIR")
    ctx.meta[ROOT] = Path(root)
    return Path(root)


root_option = click.option(  # here or before the command
    "--root",
    type=click.Path(path_type=Path, readable=False),
    callback=_root,
    help="The directory of the log.  [env: WALD_ROOT]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
group_option = click.option(
    "--group", default=DEFAULT_GROUP, callback=lambda _ctx, _, name: check_group(name), help=GROUP_HELP
)
route_argument = click.argument("route", callback=lambda _ctx, _, name: name and check_route(name))
socket_option = click.option(
    "--socket",
    hidden=True,
    type=click.Path(path_type=Path, readable=False),
    envvar="WALD_SOCKET",
    show_envvar=True,
    help="The daemon's socket.  [default: ROOT/wald.sock]",
)
metrics_option = click.option(
    "--metrics", metavar="HOST:PORT", hidden=True, help="Serve /metrics for Prometheus at this address."
)


def config_option(help_text: str) -> Callable[[F], F]:
    """``--config`` or WALD_CONFIG, the daemon's file of settings; the command gets ``config_path``."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        envvar="WALD_CONFIG",
        show_envvar=True,
        help=help_text,
    )


class SequenceNumber(click.IntRange):
    """A sequence; refuses times and names."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            option = param.opts[0] if param else ""
            message = f"{option} {value}: must be a sequence, the number of a record"
            raise InvalidInput(message, hint=f"{option} 250") from None


def count_option(
    *names: str, help_text: str, count_min: int = 1, count_max: int | None = None, hidden: bool = False
) -> Callable[[F], F]:
    """An option for a count; None if not given."""
    kind = click.IntRange(count_min, count_max)
    return click.option(*names, type=kind, metavar="N", hidden=hidden, help=help_text)


def duration_option(
    name: str, default: str | None, help_text: str, *, seconds_min: float = 0, days_max: int = 1, hidden: bool = False
) -> Callable[[F], F]:
    """An option for a duration in seconds or like "10s", "5m", "1h", "7d"; None if not given and without a default."""
    kind = duration(seconds_min, days_max * _DAY)
    return setting_option(name, kind, "DURATION", default, help_text, "30s", hidden=hidden)


def size_option(name: str, default: str | None, help_text: str) -> Callable[[F], F]:
    """An option for a size in bytes or like "64KiB", "1GiB"; None if not given and without a default."""
    return setting_option(name, size(0, 1 << 50), "SIZE", default, help_text, "64MiB")


def setting_option(
    name: str,
    kind: SettingType,
    metavar: str,
    default: str | None,
    help_text: str,
    example: str,
    *,
    hidden: bool = False,
) -> Callable[[F], F]:
    """An option whose value is checked like a setting's; ``example`` is for the hint."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> Any:  # the type depends on the setting
        try:
            return None if given is None else kind.parse(given)
        except ValueError as error:
            raise InvalidInput(f"{name} must be {error}", hint=f"{name} {example}") from None

    return click.option(
        name, default=default, show_default=True, metavar=metavar, callback=parsed, hidden=hidden, help=help_text
    )


def time_option(name: str, help_text: str) -> Callable[[F], F]:
    """An option for a time; None if not given."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> datetime | None:
        return None if given is None else parse_time_option(name, given, now())

    return click.option(name, metavar="TIME", callback=parsed, help=help_text)


def due_option(name: str, counted: str, help_text: str) -> Callable[[F], F]:
    """An option for a future time, in ns since 1970; ``counted`` is the option for a delay from now."""

    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> int | None:
        if given is None:
            return None
        if is_relative(given):
            hint = f"{counted} {given} is a delay from now"
            raise InvalidInput(f"{name} {given}: counts back from now", hint=hint)
        due_ns = nanoseconds(parse_time_option(name, given, now(), _TO_COME))
        if due_ns > _LATEST_NS:
            raise InvalidInput(f"{name} {given}: after {utc(_LATEST_NS)}", hint="nanoseconds since 1970 have 64 bits")
        return due_ns

    return click.option(name, metavar="TIME", callback=parsed, help=help_text)


def now() -> datetime:
    """Return the start time of the command in the local time zone, the same for all options."""
    from wald.status.schema import local_now

    context = click.get_current_context(silent=True)
    moments = {} if context is None else context.meta
    found: datetime = moments.setdefault(f"{__name__}.now", local_now())
    return found


def warn_of_wrong_times(root: Path, since: object, until: object) -> None:
    """Warn if append times from a clock that was far ahead affect a range of times."""
    since_ns = nanoseconds(since) if isinstance(since, datetime) else None
    until_ns = nanoseconds(until) if isinstance(until, datetime) else None
    if since_ns is None and until_ns is None:
        return
    from wald.files.listing import list_segments
    from wald.files.uptime import read_steps
    from wald.segments.durable_end import read_head, seconds_ahead

    here = Root(root)
    with suppress(Damaged, OSError):  # the command reports it
        head, now_ns = read_head(here), nanoseconds(now())
        is_within = head is not None and until_ns is not None and until_ns <= head.at_ns
        if head is not None and is_within and (ahead := seconds_ahead(head.at_ns, now_ns)):
            message = f"append times are {format_seconds(ahead)} ahead of the clock"
            hint = hint_for("append-times-ahead")
            click.echo(f"wald: {message}: newer records look later than they are\n  hint: {hint}", err=True)
    with suppress(Damaged, OSError):
        steps = [
            step
            for step in read_steps(here)
            if (since_ns is None or since_ns <= step.before_ns) and (until_ns is None or until_ns > step.at_ns)
        ]
        segments = list_segments(here).segments
        if steps and segments and segments[0].base_sequence < steps[-1].base:  # records before it are still here
            step = steps[-1]
            times = f"append times up to {utc(step.before_ns)}, because the clock was ahead until {utc(step.at_ns)}"
            hint = f"--from and --to take sequences as well; {command_line(root, 'history')} lists clock steps"
            click.echo(f"wald: records before {step.base} have {times}\n  hint: {hint}", err=True)


def check_span(since: datetime | None, until: datetime | None) -> None:
    if since is not None and until is not None and nanoseconds(since) >= nanoseconds(until):
        times = [utc(nanoseconds(each), 6) for each in (since, until)]
        raise InvalidInput(f"--since {times[0]} is not before --until {times[1]}", hint="--since 2h --until 1h")


def daemon_at(root: Path, socket: Path | None) -> Producer:
    from wald.client.producer import Producer
    from wald.status.findings import frozen  # which wald append does not need

    read_identity(Root(root))
    if (stopped := frozen(Root(root))) is not None:
        raise Unavailable(stopped.message, hint=stopped.hint)
    return Producer(socket or root, retry_for=START_SECONDS, connect_for=START_SECONDS if runs(root) else 0.0)


def producer_at(root: Path, socket: Path | None, route: str, *, retry_for: float, insists: bool) -> Producer:
    """Yield a connection that sends records to ``route``. ``insists``: also wait for a first daemon."""
    from wald.client.producer import Producer

    read_identity(Root(root))
    Root(root).require_route(route)
    connect_for = retry_for if insists or runs(root) else min(retry_for, _NEVER_SEEN_SECONDS)
    return Producer(socket or root, retry_for=retry_for, connect_for=connect_for)


def runs(root: Path) -> bool:
    """Return True if a daemon holds the root, even if it does not listen yet."""
    return is_locked(Root(root).lock, Disk())

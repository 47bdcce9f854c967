"""Options, arguments and the form of command lines that several programs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wald.cli.entry import ROOT
from wald.errors import InvalidInput
from wald.format.names import DEFAULT_GROUP, check_group, check_route

if TYPE_CHECKING:
    from wald.setting_types import SettingType

F = TypeVar("F", bound=Callable[..., Any])

GROUP_HELP = f"The consumer group; without it: {DEFAULT_GROUP}."
_DAY = 86400


class DefaultGroup(click.Group):
    """A group whose first command may be left out: ``wald-archive ROUTE…`` is ``wald-archive pack ROUTE…``.

    Args:
        alone: whether it may be left out where nothing follows.
        takes_command: whether only the first command takes a command line after ``--``, so that a word before ``--`` is
            its argument even if another command has that name.
    """

    def __init__(self, *args: Any, alone: bool = False, takes_command: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._alone = alone
        self._takes_command = takes_command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = 2 if args[:1] == ["--root"] else int(bool(args) and args[0].startswith("--root="))
        following, first = args[before : before + 1], next(iter(self.commands))
        names = (first,) if self._takes_command and "--" in args[:-1] else tuple(self.commands)
        if following[0] not in (*names, "--help", "-h", "--version") if following else self._alone:
            args = [*args[:before], first, *args[before:]]
        return super().parse_args(ctx, args)


def root_option(function: F) -> F:
    """``--root``, here or before the command, or WALD_ROOT; the command gets ``root``."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path, readable=False),
        callback=_root,
        help="The directory of the log.  [env: WALD_ROOT]",
    )(function)


def json_option(function: F) -> F:
    """``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


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


def group_option(function: F) -> F:
    """``--group``."""
    return click.option("--group", default=DEFAULT_GROUP, callback=_group, help=GROUP_HELP)(function)


def route_argument(function: F) -> F:
    """A route with a legal name; the command gets ``route``."""
    return click.argument("route", callback=_route)(function)


def socket_option(function: F) -> F:
    """``--socket``, for a daemon whose socket is not in its root."""
    return click.option(
        "--socket",
        hidden=True,
        type=click.Path(path_type=Path, readable=False),
        envvar="WALD_SOCKET",
        show_envvar=True,
        help="The daemon's socket; without it: ROOT/wald.sock.",
    )(function)


def metrics_option(function: F) -> F:
    """``--metrics``, of a program that runs for long."""
    return click.option(
        "--metrics", metavar="HOST:PORT", hidden=True, help="Serve /metrics for Prometheus there; without it: nowhere."
    )(function)


class SequenceNumber(click.IntRange):
    """A sequence, where no time and no name is taken."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            option = param.opts[0] if param else ""
            raise InvalidInput(
                f"{option} {value}: takes a sequence, the number of a record", hint=f"{option} 250"
            ) from None


def count_option(
    *names: str, help_text: str, count_min: int = 1, count_max: int | None = None, hidden: bool = False
) -> Callable[[F], F]:
    """An option that takes a number of things; None if it is not given."""
    kind = click.IntRange(count_min, count_max)
    return click.option(*names, type=kind, metavar="N", hidden=hidden, help=help_text)


def duration_option(
    name: str, default: str | None, help_text: str, *, seconds_min: float = 0, days_max: int = 1, hidden: bool = False
) -> Callable[[F], F]:
    """An option that takes seconds, or "10s", "5m", "1h", "7d"; None if it has no default and is not given."""

    def kind() -> SettingType:
        from wald.setting_types import duration

        return duration(seconds_min, days_max * _DAY)

    return _kind_option(name, kind, "DURATION", default, help_text, "30s", hidden)


def size_option(name: str, default: str | None, help_text: str, *, hidden: bool = False) -> Callable[[F], F]:
    """An option that takes bytes, or "64KiB", "1GiB"; None if it has no default and is not given."""

    def kind() -> SettingType:
        from wald.setting_types import TIB, size

        return size(0, 1024 * TIB)

    return _kind_option(name, kind, "SIZE", default, help_text, "64MiB", hidden)


def _kind_option(
    name: str,
    kind: Callable[[], SettingType],
    metavar: str,
    default: str | None,
    help_text: str,
    example: str,
    hidden: bool,
) -> Callable[[F], F]:
    def parsed(_: click.Context, __: click.Parameter, given: str | None) -> Any:  # the type depends on the setting
        try:
            return None if given is None else kind().parse(given)
        except ValueError as error:
            raise InvalidInput(f"{name} must be {error}", hint=f"{name} {example}") from None

    return click.option(
        name, default=default, show_default=True, metavar=metavar, callback=parsed, hidden=hidden, help=help_text
    )


def _root(ctx: click.Context, _: click.Parameter, given: Path | None) -> Path:
    root = given or ctx.find_object(Path) or os.environ.get("WALD_ROOT")
    if not root:
        raise InvalidInput("which log? no root was given", hint="--root DIR, or export WALD_ROOT=DIR")
    ctx.meta[ROOT] = Path(root)
    return Path(root)


def _route(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    return None if name is None else check_route(name)


def _group(_: click.Context, __: click.Parameter, name: str) -> str:
    return check_group(name)

"""``wald run``, ``wald init`` and ``wald cut``: the daemon, what it runs on, and what one asks of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.options import config_option, json_option, root_option, socket_option
from wald.cli.output import json_line
from wald.format.names import check_route

if TYPE_CHECKING:
    from wald.config import Setting


class _WithSettings(click.Command):
    """Adds every setting to the help; they are loaded only for that."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from wald.config import reference
        from wald.limits import Retention, RouteLimits

        for title, table in (
            ("Settings, in the config file or as WALD_<NAME>; * marks what SIGHUP reloads", reference()),
            ("In the table [retention] of the config file, for wald-reclaim --config", reference(Retention)),
            ("In [routes.NAME], or in [retention] for all routes", reference(RouteLimits)),
        ):
            with formatter.section(title):
                formatter.write_dl([_described(setting) for setting in table], col_max=40)


@click.command(cls=_WithSettings)
@root_option
@config_option("A TOML file of settings.")
@click.option("--stdin", "stdin_route", metavar="ROUTE", help="Also take lines from stdin, and stop at its end.")
@click.option(
    "--check", "only_check", is_flag=True, help="Only check the settings and that the root is or can be a log."
)
def run(root: Path, config_path: Path | None, stdin_route: str | None, only_check: bool) -> int:
    """Run the daemon on a root, which is made if it is missing or empty.

    SIGTERM and SIGINT stop it, SIGHUP reads the settings again, SIGUSR1 cuts the active segment. With --stdin, the end
    of stdin stops it too; ROUTE is made if it is missing, and reactivated if it is retired. It must not have a FIFO.
    """
    from wald.config import Config, load
    from wald.daemon import service
    from wald.store.files.identity import check_root

    if stdin_route is not None:
        check_route(stdin_route)

    def settings() -> Config:
        return load(config_path, os.environ)

    if only_check:
        settings()
        check_root(root)
        return 0
    return service.run(root, settings(), stdin_route=stdin_route, reload=settings)


@click.command()
@root_option
def init(root: Path) -> None:
    """Make a log in a directory that is missing or empty; an existing log stays as it is.

    The daemon does the same, unless on_missing_root = "refuse".
    """
    import time

    from wald.format.times import utc
    from wald.store.files.disk import Disk
    from wald.store.files.identity import create_root

    create_root(root, Disk(), now=utc(time.time_ns(), 3))


@click.command()
@root_option
@socket_option
@json_option
def cut(root: Path, socket: Path | None, as_json: bool) -> None:
    """Cut the active segment now, so that it can be sealed. Needs the daemon."""
    from wald.cli.connect import daemon_at

    with daemon_at(root, socket) as daemon:
        what, base = daemon.command("CUT").split()
    if as_json:
        click.echo(json_line("cut", {"cut": what == "cut", "segment": int(base)}))
    else:
        click.echo(f"{what.replace('-', ' ')}: the active segment begins with record {base}")


def _described(setting: Setting) -> tuple[str, str]:
    """A setting with its default, and its meaning."""
    default = f" = {setting.default}" if setting.default else ""
    unit = f", {setting.unit}" if setting.unit and setting.unit not in ("octal", "fraction") else ""
    name = f"{setting.name}{default}{' *' if setting.reloadable else ''}"
    return name, f"{setting.meaning} [{setting.bounds}{unit}]"

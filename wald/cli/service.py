"""``wald run``, ``init``, ``metrics`` and ``cut``: the daemon, what it runs on, and what one asks of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.command import Command, examples
from wald.cli.options import config_option, json_option, root_option, size_option, socket_option
from wald.cli.output import json_line
from wald.cli.streams import stdout_is_a_report
from wald.format.names import check_route

if TYPE_CHECKING:
    from wald.settings import Setting


def _tables() -> Iterator[tuple[str, list[Setting]]]:
    from wald.settings import Retention, RouteConfig, RouteLimits, reference

    yield "Settings, in the config file or as WALD_<NAME>; * marks what SIGHUP reloads", reference()
    yield "In the table [retention] of the config file, for wald-reclaim --config", reference(Retention)
    yield "In [routes.NAME]", reference(RouteConfig)
    yield "In [routes.NAME], or in [retention] for all routes", reference(RouteLimits)


@click.command(
    cls=Command,
    tables=_tables,
    epilog=examples(
        "wald run --root /var/lib/wald --config /etc/wald/wald.toml",
        "journalctl -f | wald run --root /var/lib/wald --stdin journal",
    ),
)
@root_option
@config_option("A TOML file of settings.")
@click.option("--stdin", "stdin_route", metavar="ROUTE", help="Also take lines from stdin, and stop at its end.")
@click.option(
    "--check", "only_check", is_flag=True, help="Only check the settings and that the root is or can be a log."
)
@stdout_is_a_report
def run(root: Path, config_path: Path | None, stdin_route: str | None, only_check: bool) -> int:
    """Run the daemon on a root; create the root if it is missing or empty.

    SIGTERM and SIGINT stop it, SIGHUP reloads the settings, SIGUSR1 cuts the active segment. With --stdin, the end of
    stdin also stops it; ROUTE is created if it is missing, and reactivated if it is retired. It must not have a FIFO.
    """
    from wald.daemon import loop
    from wald.files.identity import check_root
    from wald.settings import Config, load

    if stdin_route is not None:
        check_route(stdin_route)

    def settings() -> Config:
        return load(config_path, os.environ)

    if only_check:
        settings()
        check_root(root)
        return 0
    return loop.run(root, settings(), stdin_route=stdin_route, reload=settings)


@click.command(epilog=examples("wald metrics", "wald metrics --needed-bytes 1GiB > wald.prom"))
@root_option
@size_option("--needed-bytes", "0", "Predict when free space falls to this size; below it, the daemon takes no input.")
def metrics(root: Path, needed_bytes: int) -> None:
    """Print Prometheus metrics from the directory: segments, groups, lag, growth, times of the last runs.

    The daemon's /metrics has the same and its own counters. This command needs no daemon; its output can be a file for
    the textfile collector of node_exporter. Retired routes are left out.
    """
    import time

    import wald
    from wald.cli.metrics import measure, of_directory
    from wald.exposition import render

    found = measure(wald.open(root))
    click.echo(render(of_directory(found, needed_bytes=needed_bytes, now_ns=time.time_ns())), nl=False)


@click.command(epilog=examples("wald init --root /var/lib/wald", "wald --root ./log init"))
@root_option
def init(root: Path) -> None:
    """Create a log in a directory that is missing or empty; leave an existing log unchanged.

    The daemon does the same, unless on_missing_root = "refuse".
    """
    import time

    from wald.files.disk import Disk
    from wald.files.identity import create_root
    from wald.format.times import utc

    create_root(root, Disk(), now=utc(time.time_ns(), 3))


@click.command(cls=Command, epilog=examples("wald cut", "wald cut --json"))
@root_option
@socket_option
@json_option
@stdout_is_a_report
def cut(root: Path, socket: Path | None, as_json: bool) -> None:
    """Cut the active segment now, so that it can be sealed. Needs the daemon."""
    from wald.cli.connect import daemon_at

    with daemon_at(root, socket) as daemon:
        what, base = daemon.command("CUT").split()
    if as_json:
        click.echo(json_line("cut", {"cut": what == "cut", "segment": int(base)}))
    else:
        click.echo(f"{what.replace('-', ' ')}: the active segment begins with record {base}")

"""``wald run``, ``init``, ``metrics``, ``cut``, ``clock``, ``hold`` and ``route``: the daemon, and requests to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.options import (
    config_option,
    daemon_at,
    json_option,
    root_option,
    route_argument,
    runs,
    setting_option,
    size_option,
    socket_option,
)
from wald.cli.output import aligned, counted, json_line, print_result, stdout_is_a_report
from wald.cli.positions import warn_without_daemon
from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.routes import FIFO_MODE, add_route, has_fifo, retire_route
from wald.format.names import check_route
from wald.format.times import utc
from wald.hints import command_line
from wald.retention.cursors import CursorState
from wald.setting_types import MODE, OS_GROUP

if TYPE_CHECKING:
    from wald.retention.progress import Progress
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
@click.option("--stdin", "stdin_route", metavar="ROUTE", help="Also read lines from stdin, and stop at its end.")
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
@size_option("--needed-bytes", "0", "Predict when free space falls to this size; below it, no input is accepted.")
def metrics(root: Path, needed_bytes: int) -> None:
    """Print Prometheus metrics from the directory: segments, groups, lag, growth, times of the last runs.

    The daemon's /metrics has the same metrics and its own counters. This command needs no daemon; its output can be a
    file for the textfile collector of node_exporter. Retired routes are left out.
    """
    from wald.cli.metrics import directory_metrics
    from wald.exposition import render

    click.echo(render(directory_metrics(wald.open(root), needed_bytes=needed_bytes)), nl=False)


@click.command(epilog=examples("wald init --root /var/lib/wald", "wald --root ./log init"))
@root_option
def init(root: Path) -> None:
    """Create a log in a directory that is missing or empty; leave an existing log unchanged.

    The daemon does the same, unless on_missing_root = "refuse".
    """
    from wald.files.identity import create_root

    create_root(root, Disk(), now=utc(time.time_ns(), 3))


@click.command(cls=Command, epilog=examples("wald cut", "wald cut --json"))
@root_option
@socket_option
@json_option
@stdout_is_a_report
def cut(root: Path, socket: Path | None, as_json: bool) -> None:
    """Cut the active segment now, so that it can be sealed. Needs the daemon."""
    with daemon_at(root, socket) as daemon:
        what, base = daemon.command("CUT").split()
    text = f"{what.replace('-', ' ')}: the active segment begins with record {base}"
    print_result("cut", as_json, {"cut": what == "cut", "segment": int(base)}, [text])


@click.group()
def clock() -> None:
    """Recover from a clock that was far ahead."""


@clock.command(cls=Command, epilog=examples("wald clock step", "wald clock step --json"))
@root_option
@socket_option
@json_option
@stdout_is_a_report
def step(root: Path, socket: Path | None, as_json: bool) -> None:
    """Record a clock step, after the clock was corrected.

    The next records get their append times from the clock again.

    While the clock was far ahead, records got append times in the future, and all later records get the last of them
    until the clock has caught up. Correct the clock first. Sequences and records do not change; look-ups by time treat
    the records before and after the step as separate ranges. Only the log's owner may use it. Needs the daemon.
    """
    with daemon_at(root, socket) as daemon:
        what, base = daemon.command("CLOCK STEP").split()
    text = "nothing to step: append times are not ahead of the clock"
    if what == "stepped":
        text = f"stepped: append times follow the clock again, from record {base}"
    print_result("clock.step", as_json, {"stepped": what == "stepped", "sequence": int(base)}, [text])


_REFRESH_SECONDS = 1.0  # between searches for new or replaced FIFOs
_ENDING = (signal.SIGTERM, signal.SIGINT)


@click.command(epilog=examples("wald hold --all", "wald hold access orders"))
@click.argument("routes", nargs=-1, metavar="[ROUTE...]")
@root_option
@click.option("--all", "every", is_flag=True, help="Hold every FIFO, including those created later.")
@stdout_is_a_report
def hold(root: Path, routes: tuple[str, ...], every: bool) -> None:
    """Hold FIFOs open, without reading, until SIGTERM or SIGINT; SIGHUP is ignored.

    If only producers hold a FIFO open, their writes fail while the daemon restarts (EPIPE, SIGPIPE). If this command
    holds it too, they wait, and the bytes in the pipe survive, even part of a line. Prints one line when all are held.
    """
    here = Root(root)
    read_identity(here)
    if bool(routes) == every:
        raise InvalidInput("no FIFO given: name routes, or use --all", hint=command_line(root, "hold --all"))
    for route in map(check_route, routes):
        here.require_route(route)
        if not has_fifo(here, route):
            raise InvalidInput(
                f"{here.fifo(route)}: there is no FIFO", hint=command_line(root, f"route add {route} --fifo")
            )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # so that closing the terminal does not make producers fail
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    held: dict[str, int] = {}
    _hold(here, routes, held)
    click.echo(f"holding {counted(len(held), 'FIFO')}")
    troubles: set[str] = set()
    while signal.sigtimedwait(_ENDING, _REFRESH_SECONDS) is None:
        try:
            _hold(here, routes, held)
        except OSError as error:  # continue to hold the others
            message = f"wald hold: {error.filename or root}: {error.strerror or error}"
            if message not in troubles:
                troubles.add(message)
                click.echo(message, err=True)


def _hold(root: Root, routes: Sequence[str], held: dict[str, int]) -> None:
    """Open both ends of these FIFOs or of all, because a pipe without a writer is at its end.

    A FIFO that was replaced is released, so that the daemon reads it to its end.
    """
    for route in routes or root.route_names():
        if not has_fifo(root, route):
            continue
        path, before = root.fifo(route), held.get(route)
        if before is not None and os.path.samestat(os.stat(path), os.fstat(before)):
            continue
        held[route] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if before is not None:
            os.close(before)


_COLUMNS = ("ROUTE", "LAST", "GROUP", "CURSOR", "LAG", "")


@click.group()
def route() -> None:
    """List, add or retire routes: the named streams of a log."""


@route.command("list", epilog=examples("wald route list", "wald route list --json"))
@root_option
@json_option
def list_(root: Path, as_json: bool) -> None:
    """List routes, and the cursor and lag of each group.

    LAG is the number of records of the route that the log has and the group has not processed.
    """
    from wald.retention.progress import read_progress
    from wald.status.schema import Routes

    log = wald.open(root)
    every = read_progress(log.view())
    if as_json:
        click.echo(json_line("route.list", Routes.of(log.root, every)))
        return
    warn_without_daemon(log.root)
    rows = [_COLUMNS, *(row for route in every for row in _rows(route))]
    click.echo("\n".join(aligned(rows, numeric=(1, 3, 4))))


@route.command(cls=Command, epilog=examples("wald route add orders", "wald route add access --fifo --mode 0620"))
@route_argument
@root_option
@socket_option
@click.option("--fifo", is_flag=True, help="Make ROOT/routes/NAME/in, for programs that write to a file.")
@setting_option("--mode", MODE, "OCTAL", None, f"Permissions of the FIFO; a new one has {FIFO_MODE:04o}.", "0620")
@click.option(
    "--consumers",
    metavar="GROUP",
    help="An OS group whose members may create cursors; 'group': the root's group; '': none.",
)
@json_option
@stdout_is_a_report
def add(
    root: Path, socket: Path | None, route: str, fifo: bool, mode: int | None, consumers: str | None, as_json: bool
) -> None:
    """Create a route, or reactivate a retired one. Uses the daemon if one runs."""
    if mode is not None and not fifo:
        hint = command_line(root, f"route add {route} --fifo --mode {mode:04o}")
        raise InvalidInput("--mode needs --fifo", hint=hint)
    try:
        group: str | None = None if consumers is None else OS_GROUP.parse(consumers)
    except ValueError as error:
        raise InvalidInput(f"--consumers must be {error}", hint="getent group") from None
    if runs(root):
        given = (fifo and "fifo", mode is not None and f"mode={mode:o}", group is not None and f"consumers={group}")
        options = [option for option in given if option]
        with daemon_at(root, socket) as daemon:
            daemon.command("ROUTE", "ADD", route, *options)
    else:
        here = Root(root)
        read_identity(here)
        add_route(here, Disk(), route, fifo=fifo, mode=mode, consumers=group)
    if as_json:
        _print_state("route.add", Root(root), route)


@route.command(cls=Command, epilog=examples("wald route retire orders", "wald route retire orders --json"))
@route_argument
@root_option
@socket_option
@json_option
@stdout_is_a_report
def retire(root: Path, socket: Path | None, route: str, as_json: bool) -> None:
    """Stop accepting records for a route. Its cursors no longer keep wald-reclaim from deleting."""
    here = Root(root)
    read_identity(here)
    here.require_route(route)
    if runs(root):
        with daemon_at(root, socket) as daemon:
            daemon.command("ROUTE", "RETIRE", route)
    else:
        retire_route(here, Disk(), route, now=utc(time.time_ns()))
    if as_json:
        _print_state("route.retire", here, route)


def _print_state(command: str, root: Root, route: str) -> None:
    fields = {"route": route, "path": str(root.route(route)), "retired": root.retired(route).exists()}
    click.echo(json_line(command, fields | {"fifo": has_fifo(root, route)}))


def _rows(route: Progress) -> list[tuple[str, ...]]:
    last = "?" if route.last_sequence is None else str(route.last_sequence)
    name, notes = route.route, ["fifo"] * route.fifo + ["retired"] * route.retired
    notes += [f"consumers={route.consumers}"] * bool(route.consumers)
    rows: list[tuple[str, ...]] = []
    for cursor, lag in zip(route.cursors, route.lags, strict=True):
        notes += [cursor.state.value] * (cursor.state not in (CursorState.VALID, CursorState.ABSENT))
        notes += ["work group"] * cursor.of_work_group
        shown = "-" if cursor.state is CursorState.ABSENT else str(cursor.sequence)
        rows.append((name, last, cursor.group, shown, str(lag), " ".join(notes)))
        name, last, notes = "", "", []
    return rows

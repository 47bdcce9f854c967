"""``wald hold``: keeps FIFOs readable while no daemon runs, so that a producer waits instead of failing."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from wald.cli.command import examples
from wald.cli.options import root_option
from wald.cli.streams import stdout_is_a_report
from wald.errors import InvalidInput
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.routes import has_fifo
from wald.format.names import check_route
from wald.hints import command_line

_REFRESH_SECONDS = 1.0  # between searches for FIFOs that were made or replaced
_ENDING = (signal.SIGTERM, signal.SIGINT)


@click.command(epilog=examples("wald hold --all", "wald hold access orders"))
@click.argument("routes", nargs=-1, metavar="[ROUTE...]")
@root_option
@click.option("--all", "every", is_flag=True, help="Every FIFO, including those that are created later.")
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
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # closing the terminal must not make producers fail
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    held = _Held(here, routes)
    held.refresh()
    click.echo(f"holding {held.count} FIFO{'' if held.count == 1 else 's'}")
    troubles: set[str] = set()
    while signal.sigtimedwait(_ENDING, _REFRESH_SECONDS) is None:
        try:
            held.refresh()
        except OSError as error:  # go on holding the others
            message = f"wald hold: {error.filename or root}: {error.strerror or error}"
            if message not in troubles:
                troubles.add(message)
                click.echo(message, err=True)


class _Held:
    """Holds both ends of pipes open, because a pipe without a writer is at its end.

    Args:
        routes: those to hold; every route if empty.
    """

    def __init__(self, root: Root, routes: Sequence[str]) -> None:
        self._root = root
        self._routes = routes
        self._descriptors: dict[str, int] = {}

    @property
    def count(self) -> int:
        return len(self._descriptors)

    def refresh(self) -> None:
        """Hold the FIFOs that exist now; release one that was replaced, so that the daemon reads it to its end.

        Raises:
            OSError: one of them cannot be opened.
        """
        for route in self._routes or self._root.route_names():
            if not has_fifo(self._root, route):
                continue
            path, before = self._root.fifo(route), self._descriptors.get(route)
            if before is not None and os.path.samestat(os.stat(path), os.fstat(before)):
                continue
            self._descriptors[route] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if before is not None:
                os.close(before)

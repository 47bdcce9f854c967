"""``wald top``: the log on a screen, live: segments, routes, rates, lag, disk.

The screen waits for three things at once: a key, a signal, and a look that is done. Signals and looks come through one
pipe: a signal as its number, a look as zero.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.looks import Pulses, Surveys, Watch
from wald.cli.options import duration_option, root_option
from wald.cli.snapshot import Pulse, Snapshot, Survey, flow, stock
from wald.errors import InvalidInput, command_line
from wald.log import Log

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_INTERVAL_MIN_SECONDS = 0.1  # nobody reads faster
_PLAIN_CELLS = 200  # a file is as wide as a row of the table needs
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
_HEARD = (*_ENDING, signal.SIGWINCH)
_LOOKED = b"\0"


@click.command()
@root_option
@duration_option("--interval", "1s", "How long between two looks at the head.")
@click.option("--once", is_flag=True, help="Print one look as plain text; so it is where there is no terminal.")
def top(root: Path, interval: float, once: bool) -> None:
    """Watch the log: its segments, its routes, who holds back what, and when the disk is full.

    IN/S and OUT/S are records a second that a route receives and a group processes; LAG is in records of the route, and
    OLDEST is how long the first of them has been waiting. Looking at every segment takes time: where there are very
    many it is done more rarely, and the screen says how old the numbers are. q leaves.
    """
    if interval < _INTERVAL_MIN_SECONDS:
        raise InvalidInput(
            f"--interval must be {_INTERVAL_MIN_SECONDS} s or more", hint=command_line(root, "top --interval 1s")
        )
    try:
        from rich.console import Console

        from wald.cli import screen
    except ModuleNotFoundError as error:
        raise InvalidInput("wald top: rich, which draws it, is not installed", hint="pip install 'wald[ui]'") from error
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a bar cannot be spelled, "?" can
    looks = _Looks(wald.open(root))
    console = Console()
    if once or not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        looks.take()
        time.sleep(interval)
        looks.take()
        click.echo(screen.plain(looks.snapshot(), width=_PLAIN_CELLS))
    else:
        _watch(looks, interval, console)


class _Looks:
    """Both kinds of look at one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pulses: Watch[Pulse] = Watch(Pulses(log).look)
        self._surveys: Watch[Survey] = Watch(Surveys(log).look)
        self._every = (self._pulses, self._surveys)

    def take(self) -> None:
        """One of each, here and now."""
        for watch in self._every:
            watch.take()

    def start(self, interval_seconds: float, wake: int) -> None:
        """Look from now on; each time that is done, the descriptor ``wake`` is told."""
        for watch in self._every:
            watch.start(interval_seconds, lambda: _tell(wake))

    def snapshot(self) -> Snapshot:
        """What has been seen.

        Raises:
            Exception: a bug in a look.
        """
        for watch in self._every:
            if watch.bug is not None:
                raise watch.bug
        troubles = dict.fromkeys(watch.trouble for watch in self._every if watch.trouble)
        if self._surveys.seen:
            troubles |= dict.fromkeys(self._surveys.seen[-1].fifo_troubles)
        now, now_ns = time.monotonic(), time.time_ns()
        return Snapshot(
            str(self._log.root.path),
            flow(self._pulses.seen, now_ns=now_ns),
            stock(self._surveys.seen, now=now, now_ns=now_ns),
            tuple(troubles),
        )


def _watch(looks: _Looks, interval_seconds: float, console: Console) -> None:
    """Show the screen until somebody leaves it; between Ctrl-Z and ``fg`` the terminal is the shell's."""
    from rich.live import Live

    # Never closed: a look that is under way when the screen is left still writes to it.
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    looks.start(interval_seconds, wake)
    while True:
        with (
            _signals_to(wake),
            _keys(sys.stdin.fileno()),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            heard = _show(looks, live, woken)
        if signal.SIGTSTP not in heard:
            return
        signal.raise_signal(signal.SIGTSTP)


def _show(looks: _Looks, live: Live, woken: int) -> bytes:
    """Draw whenever something has changed; returns the signals that ended it, none if it was a key."""
    from wald.cli.screen import drawn

    keys = sys.stdin.fileno()
    while True:
        width, height = live.console.size = os.get_terminal_size(sys.stdout.fileno())
        live.update(drawn(looks.snapshot(), width=width, height=height), refresh=True)
        readable, _, _ = select.select([keys, woken], [], [])
        if woken in readable:
            heard = os.read(woken, 4096)
            if any(number in heard for number in _ENDING):
                return heard
        if keys in readable:
            typed = os.read(keys, 4096)
            if not typed or b"q" in typed:  # nothing at all: the terminal is gone
                return b""


@contextmanager
def _signals_to(wake: int) -> Iterator[None]:
    """Signals only write their number to the descriptor ``wake``."""
    before = {number: signal.signal(number, lambda *_: None) for number in _HEARD}
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys(descriptor: int) -> Iterator[None]:
    """Keys come one by one and are not shown."""
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def _tell(wake: int) -> None:
    with suppress(BlockingIOError):  # a full pipe: whoever reads it has been told often enough
        os.write(wake, _LOOKED)

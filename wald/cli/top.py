"""``wald top``: the log on a screen, live: segments, routes, rates, lag, disk.

The screen waits for three things at once: a key, a signal, and a finished sample. Signals and samples arrive through
one pipe: a signal as its number, a sample as zero.
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
from wald.cli.command import examples
from wald.cli.options import duration_option, root_option
from wald.errors import InvalidInput
from wald.hints import command_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from wald.log import Log
    from wald.status.rates import HeadSample, LogSample, Sampler, Snapshot

_INTERVAL_MIN_SECONDS = 0.1  # people read no faster
_PLAIN_CELLS = 200  # enough for one row of the table
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
_CAUGHT = (*_ENDING, signal.SIGWINCH)
_SAMPLED = b"\0"


@click.command(epilog=examples("wald top", "wald top --once"))
@root_option
@duration_option("--interval", "1s", "The time between two samples of the head.")
@click.option("--once", is_flag=True, help="Print one screen as plain text; the default if stdout is not a terminal.")
def top(root: Path, interval: float, once: bool) -> None:
    """Watch the log: its segments, its routes, which group pins which segments, and when the disk will be full.

    IN/S and OUT/S are the records per second that a route receives and a group processes. LAG is counted in records of
    the route; OLDEST is how long the first of them has been waiting. If there are very many segments, they are read
    less often, and the screen shows the age of the numbers. Press q to quit.
    """
    if interval < _INTERVAL_MIN_SECONDS:
        raise InvalidInput(
            f"--interval must be {_INTERVAL_MIN_SECONDS} s or more", hint=command_line(root, "top --interval 1s")
        )
    try:
        from rich.console import Console

        from wald.cli import top_screen
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "wald top: rich, which draws it, is not installed", hint="in a clone of wald: pip install '.[ui]'"
        ) from error
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the encoding lacks becomes "?"
    samplers = _Samplers(wald.open(root))
    console = Console()
    if once or not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        samplers.update()
        time.sleep(interval)
        samplers.update()
        click.echo(top_screen.plain(samplers.snapshot(), width=_PLAIN_CELLS))
    else:
        _watch(samplers, interval, console)


class _Samplers:
    """Both samplers of one log."""

    def __init__(self, log: Log) -> None:
        from wald.status.rates import HeadSource, LogSource, Sampler

        self._log = log
        self._head_sampler: Sampler[HeadSample] = Sampler(HeadSource(log).sample)
        self._log_sampler: Sampler[LogSample] = Sampler(LogSource(log).sample)
        self._every = (self._head_sampler, self._log_sampler)

    def update(self) -> None:
        for sampler in self._every:
            sampler.update()

    def start(self, interval_seconds: float, wake: int) -> None:
        def after() -> None:
            with suppress(BlockingIOError):  # a full pipe wakes its reader anyway
                os.write(wake, _SAMPLED)

        for sampler in self._every:
            sampler.start(interval_seconds, after)

    def snapshot(self) -> Snapshot:
        from wald.status.rates import Snapshot, activity, inventory

        for sampler in self._every:
            if sampler.bug is not None:
                raise sampler.bug
        problems = dict.fromkeys(sampler.problem for sampler in self._every if sampler.problem)
        if self._log_sampler.samples:
            problems |= dict.fromkeys(self._log_sampler.samples[-1].fifo_problems)
        now, now_ns = time.monotonic(), time.time_ns()
        return Snapshot(
            str(self._log.root.path),
            activity(self._head_sampler.samples, now_ns=now_ns),
            inventory(self._log_sampler.samples, now=now, now_ns=now_ns),
            tuple(problems),
        )


def _watch(samplers: _Samplers, interval_seconds: float, console: Console) -> None:
    """Show the screen until the user quits; between Ctrl-Z and ``fg`` the terminal belongs to the shell."""
    from rich.live import Live

    # Never closed: a sampler that is at work when the screen ends still writes to it.
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    samplers.start(interval_seconds, wake)
    while True:
        with (
            _signals_to(wake),
            _keys(sys.stdin.fileno()),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            caught = _show(samplers, live, woken)
        if signal.SIGTSTP not in caught:
            return
        signal.raise_signal(signal.SIGTSTP)


def _show(samplers: _Samplers, live: Live, woken: int) -> bytes:
    """Draw on every change; return the signals that ended it, none if a key did."""
    from wald.cli.top_screen import drawn

    keys = sys.stdin.fileno()
    while True:
        width, height = live.console.size = os.get_terminal_size(sys.stdout.fileno())
        live.update(drawn(samplers.snapshot(), width=width, height=height), refresh=True)
        readable, _, _ = select.select([keys, woken], [], [])
        if woken in readable:
            caught = os.read(woken, 4096)
            if any(number in caught for number in _ENDING):
                return caught
        if keys in readable:
            typed = os.read(keys, 4096)
            if not typed or b"q" in typed:  # no bytes at all: the terminal is closed
                return b""


@contextmanager
def _signals_to(wake: int) -> Iterator[None]:
    """Let signals only write their number to the descriptor ``wake``."""
    before = {number: signal.signal(number, lambda *_: None) for number in _CAUGHT}
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys(descriptor: int) -> Iterator[None]:
    """Read keys one by one, without echo."""
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)

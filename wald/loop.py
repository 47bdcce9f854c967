"""Main loops of programs: wait for file changes or a timeout, and stop on a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from wald.hints import hint_for

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK_MS = 500


class _Stop(threading.Event):
    """Event that a signal handler sets: ``is_set`` is true at once; waiting threads wake a moment later.

    In a thread that leaves signals to the main thread, ``is_set`` is true even before the main thread runs.
    """

    signalled = False

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        super().__init__()
        self._signals = signals

    def is_set(self) -> bool:
        return self.signalled or super().is_set() or not signal.sigpending().isdisjoint(self._signals)

    def wait(self, timeout: float | None = None) -> bool:
        return self.signalled or super().wait(timeout)


def outlive_signals() -> None:
    """Make a forked child ignore the terminal's signals while it waits for another process."""
    # Caught, not ignored: a program that this process starts would inherit ignored signals.
    for number in (*SIGNALS, signal.SIGHUP):
        if number in SIGNALS or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@contextmanager
def threads_without_signals() -> Iterator[None]:
    """Start threads in this block to leave signals to the main thread.

    The kernel may give a signal of the process to any thread that does not block it. Python runs handlers in the main
    thread only, which such a signal does not wake.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def stop_on_signals(again: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM, SIGINT and SIGHUP set, instead of killing the process at once.

    A SIGHUP that is already ignored or handled stays so: a process under ``nohup`` continues.

    Args:
        again: called in the main thread for each further Ctrl-C.

    Yields:
        the event; the end of the block restores the previous handlers.

    Example::

        with stop_on_signals() as stop, wald.Consumer(root, "orders", follow=True, cancel=stop) as consumer:
            for record in consumer:
                handle(record)
    """
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    stop = _Stop([*SIGNALS, *hangup])

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.is_set():
            again()
        stop.signalled = True  # so that no work starts before that thread runs
        # In another thread: the signal may have interrupted this one while it holds the event's lock.
        threading.Thread(target=stop.set).start()

    previous_handlers = {number: signal.signal(number, handle) for number in (*SIGNALS, *hangup)}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def watch_files(
    directories: Callable[[], Sequence[Path]],
    is_relevant: Callable[[Path], bool],
    *,
    period_seconds: float,
    stop: threading.Event,
    on_tick: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Yield at once, after each change of a relevant file in ``directories``, and once per period, until ``stop``.

    Events may be lost or unavailable (network file systems, no watches left): check everything after each yield.
    Subdirectories are not watched: other users may create any number, and the kernel limits watches.

    ``directories`` is called again after each yield; ``on_tick``, which may raise, twice a second; and
    ``report`` with a message when polling replaces events.
    """
    from watchfiles import watch  # takes 50 ms, which a single pass does not need

    def readable_directories() -> list[Path]:
        # ignore_permission_denied would also hide that the kernel has run out of watches.
        return [path for path in directories() if os.access(path, os.R_OK) or not path.exists()]

    yield
    is_polling = False
    while not stop.is_set():
        watched = readable_directories()
        due = 0.0  # no event reports a change during the last yield
        try:
            for changes in watch(
                *watched,
                recursive=False,
                watch_filter=None,  # filtered below: other changes do not delay a yield
                rust_timeout=_TICK_MS,
                yield_on_timeout=True,
                stop_event=stop,
                raise_interrupt=False,
            ):
                on_tick()
                is_polling = False
                if time.monotonic() >= due or any(is_relevant(Path(path)) for _, path in changes):
                    yield
                    due = time.monotonic() + period_seconds
                    if readable_directories() != watched:
                        break
        except (OSError, RuntimeError) as error:  # a directory is missing, or the kernel has no watches left
            if not (is_polling or isinstance(error, FileNotFoundError)):
                is_polling = True
                hint = hint_for("inotify-unavailable")
                report(f"inotify is unavailable ({error}); polling every {period_seconds:g} s; {hint}")
            if not stop.wait(period_seconds):
                yield

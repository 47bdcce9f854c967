"""What programs that watch a log share: waiting for a changed file or for some time, and stopping on a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK_MS = 500


class _Stop(threading.Event):
    """An event that a signal sets: it is set at once, and those who wait for it hear of it a moment later."""

    signalled = False

    def is_set(self) -> bool:
        return self.signalled or super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self.signalled or super().wait(timeout)


def _ending() -> list[signal.Signals]:
    """Return the signals that would end this process; they include SIGHUP unless nohup has ignored it."""
    return [*SIGNALS, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else [])]


def outlive_signals() -> None:
    """Survive the terminal's signals, in a forked child that waits for another process.

    The signals are caught instead of ignored, because a program that it starts would inherit ignored signals.
    """
    for number in (*SIGNALS, signal.SIGHUP):
        if number in SIGNALS or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@contextmanager
def stop_on_signals(again: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM, SIGINT and SIGHUP set, instead of killing the process at once.

    SIGHUP keeps a disposition other than the default: a process under ``nohup`` continues.

    Args:
        again: called for each Ctrl-C that follows, wherever the main thread is then.

    Yields:
        the event; signals are handled as before when the block ends.

    Example::

        with stop_on_signals() as stop, wald.Consumer(root, "orders", follow=True, cancel=stop) as consumer:
            for record in consumer:
                handle(record)
    """
    stop = _Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.is_set():
            again()
        stop.signalled = True  # so that nothing is begun before the thread has run
        # Not in this thread: the signal may have interrupted code in it that holds the event's lock.
        threading.Thread(target=stop.set).start()

    before = {number: signal.signal(number, handle) for number in _ending()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wakes(
    directories: Callable[[], Sequence[Path]],
    wanted: Callable[[Path], bool],
    *,
    period_seconds: float,
    stop: threading.Event,
    on_tick: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Yield at once, then whenever a wanted file in ``directories`` has changed, and at least every period.

    Events only save waiting. They may be lost, or not come at all (network file systems, no watches left), so the
    caller checks everything each time. Ends when ``stop`` is set.

    Args:
        directories: the directories to watch, asked for again at each yield; what is below them is not watched. Other
            users may make directories and links there, and the kernel has so many watches only.
        wanted: whether to yield for a change of this path.
        period_seconds: at most this long between two yields.
        stop: ends the iteration.
        on_tick: called twice a second while waiting for events; it may raise.
        report: gets a line when the kernel stops delivering events and this falls back to polling.
    """
    from watchfiles import watch  # 50 ms that a single pass need not take

    def readable() -> list[Path]:
        # With ignore_permission_denied, watchfiles would also ignore that the kernel has run out of watches.
        return [path for path in directories() if os.access(path, os.R_OK) or not path.exists()]

    yield
    without_events = False
    while not stop.is_set():
        watched = readable()
        due = 0.0  # no event reports what has changed between the yield above and the beginning of the watch
        try:
            for changes in watch(
                *watched,
                recursive=False,
                watch_filter=None,  # filtered here, so that what is not wanted does not put off what is due
                rust_timeout=_TICK_MS,
                yield_on_timeout=True,
                stop_event=stop,
                raise_interrupt=False,
            ):
                on_tick()
                without_events = False
                if time.monotonic() >= due or any(wanted(Path(path)) for _, path in changes):
                    yield
                    due = time.monotonic() + period_seconds
                    if readable() != watched:
                        break
        except (OSError, RuntimeError) as error:  # a directory is missing, or the kernel has no watches left
            if not (without_events or isinstance(error, FileNotFoundError)):
                without_events = True
                more = "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536"
                report(f"inotify unavailable ({error}); polling every {period_seconds:g} s; {more}")
            if not stop.wait(period_seconds):
                yield

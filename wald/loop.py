"""What watching programs share: to be woken by a changed file or after a while, and to stop when a signal says so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK_MS = 500


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending the process where it stands."""
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        # Not here: the handler may have interrupted somebody in this thread who holds the event's lock.
        threading.Thread(target=stop.set).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wakes(
    directories: Sequence[Path], wanted: Callable[[Path], bool], *, period_seconds: float, stop: threading.Event
) -> Iterator[None]:
    """Yield at once, then whenever a wanted file below ``directories`` has changed, and at least every period.

    Events only save waiting: they may be lost, or not come at all (network file systems, no watches left), so whoever
    is woken looks at everything. Ends when ``stop`` is set.

    Args:
        wanted: whether a change of this path is worth a look.
    """
    from watchfiles import watch  # 50 ms that a single pass need not take

    yield
    while not stop.is_set():
        due = 0.0  # what has changed between the look above and the beginning of the watch, nobody tells
        try:
            for changes in watch(
                *directories,
                watch_filter=None,  # filtered here, so that what is not wanted does not put off what is due
                rust_timeout=_TICK_MS,
                yield_on_timeout=True,
                stop_event=stop,
                raise_interrupt=False,
                ignore_permission_denied=True,
            ):
                if time.monotonic() >= due or any(wanted(Path(path)) for _, path in changes):
                    yield
                    due = time.monotonic() + period_seconds
        except OSError:  # a directory is missing, or the kernel has no watches left
            if not stop.wait(period_seconds):
                yield

"""What a signal does to a drain: it lets the commands end that run, and says so; Ctrl-C again leaves them running."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from wald.errors import Interrupted
from wald.work.ownership import command_files, running
from wald_drain.job import Drain

_NAMED = 5  # processes, of many workers
_LEFT = b"wald-drain: interrupted; commands that run go on, and the next start waits for them\n"


def leave() -> None:
    """End this process at once, as if it were killed: that costs nothing but what the next start does again."""
    with suppress(OSError):  # stderr is closed, or its disk is full
        os.write(2, _LEFT)
    os._exit(Interrupted.exit_code)


@contextmanager
def stopping(drain: Drain) -> Iterator[None]:
    """Set the ``stop`` of a drain once a signal has set its ``asked``, and report what is waited for then."""
    over = threading.Event()

    def forward() -> None:
        drain.asked.wait()
        drain.stop.set()
        if not over.is_set() and (text := _running(drain)):
            drain.report_of_route(text)

    threading.Thread(target=forward, name="wald-drain-stopping", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _running(drain: Drain) -> str:
    """What runs, and what ends this process before that ends; "" if nothing does."""
    consumer = drain.consumer
    directory = consumer.log.root.cursor_directory(consumer.route)
    found = running(command_files(directory, consumer.group), [os.getpid()]).values()
    own = [str(each.process) for commands in found for each in commands if not each.left]
    if not own:
        return ""
    named = ", ".join(own[:_NAMED]) + f" and {len(own) - _NAMED} more" * (len(own) > _NAMED)
    processes = "process" if len(own) == 1 else "processes"
    return f"stops once its commands have ended, {processes} {named}; Ctrl-C again leaves them to the next start"

"""A log of many small segments and routes, with real records, to be shown by a page or a command."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from logs import Built

import wald

EACH = 10
"""How many of the routes are in each segment, with a record each."""


def large(path: Path, segments: int, routes: int) -> Built:
    """Make a root with ``segments`` sealed, unread segments, and a group on each route."""
    log = Built(path, segment_max_bytes=1 << 16)
    for number in range(segments):
        for each in range(EACH):
            route = (number * EACH + each) % routes
            log.lines(f"route-{route:04}", [b"record %d of segment %d" % (each, number)])
        log.cut()
    log.seal()
    for route in range(routes):
        log.root.cursor(f"route-{route:04}", "processed").write_text("0\n")
    return log


@contextmanager
def sending(root: Path, routes: Sequence[str], *, batch: int) -> Iterator[None]:
    """Send ten batches of records a second, to each route in turn, and cut once a second."""
    over = threading.Event()

    def send() -> None:
        number = 0
        with wald.Producer(root) as producer:
            while not over.wait(0.1):
                number += 1
                producer.send(
                    routes[number % len(routes)], [f"record {each} of batch {number}" for each in range(batch)]
                )
                producer.flush()
                if not number % 10:
                    producer.command("CUT")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

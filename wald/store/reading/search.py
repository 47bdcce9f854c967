"""A search of a log by several processes, each with a portion of it at a time; what they find comes in order.

Decompressing and the search of ``re`` and ``bytes.find`` fill a processor, and the latter hold the interpreter's lock.
So the portions are dealt out to processes that are forked. Each keeps what it finds in a portion until it is asked
for, up to ``_HELD_BYTES``.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

from wald.errors import Damaged, WaldError
from wald.store.reading.batches import Batch
from wald.store.reading.portions import portions
from wald.store.reading.reader import read_portion
from wald.store.reading.selection import Selection
from wald.store.retention.missing import Missing
from wald.store.segments.view import View

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_HELD_BYTES = 4 << 20


class Found(NamedTuple):
    """How many records were found, and what is to be written of them."""

    records: int
    output: bytes


class _Failed(NamedTuple):
    error: Exception


Event = Found | Damaged | Missing
Show = Callable[[Batch], Found]
Absent = Callable[[bytes], bool]


def search(view: View, selection: Selection, show: Show, *, absent: Absent, jobs: int) -> Iterator[Event]:
    """What ``show`` finds in the selected batches, and what cannot be read, in the order of the log.

    Args:
        absent: whether ``show`` would find nothing, whatever batches these bytes are.

    Raises:
        WaldError, OSError: the search cannot go on.
    """
    view = view if selection.earliest else view.including_released()
    dealt = list(portions(view, selection))
    if jobs == 1 or len(dealt) == 1:
        for portion in dealt:
            yield from _searched(view, selection, portion, show, absent)
        return
    with closing(_in_processes(view, selection, dealt, show, absent, min(jobs, len(dealt)))) as events:
        yield from events


def _searched(
    view: View, selection: Selection, portion: tuple[int, int], show: Show, absent: Absent
) -> Iterator[Event]:
    """One portion."""
    events: list[Event] = []
    records, parts, held = 0, list[bytes](), 0
    report = events.append
    batches = read_portion(view, selection, *portion, absent=absent, on_damage=report, on_missing=report)
    for batch in batches:
        found = show(batch)
        if events or held > _HELD_BYTES:
            yield Found(records, b"".join(parts))
            yield from events
            events.clear()
            records, parts, held = 0, [], 0
        if found.records:
            records += found.records
            held += len(found.output)
            parts.append(found.output)
    yield Found(records, b"".join(parts))
    yield from events


def _in_processes(
    view: View, selection: Selection, dealt: Sequence[tuple[int, int]], show: Show, absent: Absent, jobs: int
) -> Generator[Event]:
    import multiprocessing  # 20 ms, which a small log need not take

    context = multiprocessing.get_context("fork")
    receivers: list[Connection] = []
    processes = []
    try:
        for number in range(jobs):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            work = (view, selection, dealt[number::jobs], show, absent, sender, receivers)
            processes.append(context.Process(target=_work, args=work, daemon=True))
            processes[-1].start()
            sender.close()
        for number in range(len(dealt)):
            yield from _received(receivers[number % jobs])
    finally:
        for process, receiver in zip(processes, receivers, strict=False):
            receiver.close()
            process.terminate()
            process.join()


def _received(receiver: Connection) -> Iterator[Event]:
    """What one process found in one portion."""
    while True:
        try:
            event = receiver.recv()
        except EOFError:
            raise OSError(errno.ECHILD, "a process of the search was killed") from None
        if event is None:
            return
        if isinstance(event, _Failed):
            raise event.error
        yield event


def _work(
    view: View,
    selection: Selection,
    dealt: Sequence[tuple[int, int]],
    show: Show,
    absent: Absent,
    sender: Connection,
    receivers: Sequence[Connection],
) -> None:
    """Search the portions of one process. It ends when its pipe has no reader any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for receiver in receivers:
        receiver.close()
    with suppress(BrokenPipeError):
        try:
            for portion in dealt:
                for event in _searched(view, selection, portion, show, absent):
                    sender.send(event)
                sender.send(None)
        except BrokenPipeError:
            raise
        except (WaldError, OSError) as error:
            sender.send(_Failed(error))

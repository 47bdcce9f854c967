"""Parallel search in a log by forked processes, with results in order.

Threads would not help: ``re`` and ``bytes.find`` hold the interpreter's lock.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

from wald.errors import Damaged, WaldError
from wald.files.listing import Segment
from wald.files.uptime import read_steps
from wald.format.names import Kind
from wald.reading.assembler import Batch
from wald.reading.reader import read_span
from wald.reading.selection import Selection
from wald.retention.blockers import sealed_index
from wald.retention.missing import Missing
from wald.segments.view import View

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PORTION_BYTES = 8 << 20  # raw; outweighs opening a segment, fits in memory


def portions(view: View, selection: Selection) -> Iterator[Portion]:
    """Split the selection into consecutive portions, without gaps even if records are missing."""
    first, last, collected = selection.first, selection.last, 0
    stepped = max((step.base for step in read_steps(view.root)), default=0)  # append times restart there
    segments = view.segments[view.listing.covering(first) :] if view.segments else ()
    wanted = takewhile(lambda segment: segment.base_sequence <= last, segments)
    for start, raw_bytes, earliest_ns, latest_ns in chain.from_iterable(_frames(each, view) for each in wanted):
        if start > last:
            break
        if selection.until_ns <= earliest_ns <= latest_ns and start >= stepped:
            if first < start:
                yield first, start - 1
            elif first == selection.first:
                yield first, first
            return
        if collected >= PORTION_BYTES and start > selection.first:
            if first < start:
                yield first, start - 1
                first = start
            collected = 0
        collected += raw_bytes
    yield first, last


def _frames(segment: Segment, view: View) -> Iterable[tuple[int, int, int, int]]:
    """Return first sequence, raw bytes, earliest and latest time of each frame; one large frame without an index."""
    if segment.kind.form is Kind.SEALED:
        with suppress(Damaged, FileNotFoundError):
            table = sealed_index(segment, view.log_id).frames
            return zip(table.first_sequences, table.raw_bytes, table.earliest_ns, table.latest_ns, strict=True)
    return [(segment.base_sequence, PORTION_BYTES, 0, -1)]


_WRITTEN_BYTES = 64 << 10  # output of one result
_PIPE_BYTES = 256 << 10
_HELD_BYTES = 12 << 20  # results held for the parent


class Match(NamedTuple):
    """Number and output of matching records."""

    records: int
    output: bytes


class _Failed(NamedTuple):
    error: Exception


Event = Match | Damaged | Missing
Portion = tuple[int, int]  # first and last sequence
Find = Callable[[Portion], Iterator[Event]]
Show = Callable[[Batch], Match]
Absent = Callable[[bytes], bool]


def search(view: View, selection: Selection, show: Show, *, absent: Absent, jobs: int) -> Iterator[Event]:
    """Apply ``show`` to the selected batches in ``jobs`` processes; return results and damage in log order.

    ``absent`` returns True for bytes in which ``show`` would find nothing.
    """
    view = view if selection.earliest else view.including_released()
    dealt = list(portions(view, selection))
    find = partial(_find, view, selection, show, absent)
    if jobs == 1 or len(dealt) == 1:
        return chain.from_iterable(map(find, dealt))
    return _in_processes(find, dealt, min(jobs, len(dealt)))


def _find(view: View, selection: Selection, show: Show, absent: Absent, portion: Portion) -> Iterator[Event]:
    events: list[Event] = []
    records, parts, held = 0, list[bytes](), 0
    report, span = events.append, replace(selection, first=portion[0], last=portion[1])
    batches = read_span(view, span, absent=absent, on_damage=report, on_missing=report)
    for batch in batches:
        found = show(batch)
        if events or held > _WRITTEN_BYTES:
            yield Match(records, b"".join(parts))
            yield from events
            events.clear()
            records, parts, held = 0, [], 0
        if found.records:
            records += found.records
            held += len(found.output)
            parts.append(found.output)
    yield Match(records, b"".join(parts))
    yield from events


def _in_processes(find: Find, dealt: Sequence[Portion], jobs: int) -> Iterator[Event]:
    import multiprocessing  # takes 20 ms

    context = multiprocessing.get_context("fork")
    receivers: list[Connection] = []
    processes = []
    try:
        for number in range(jobs):
            receiver, sender = context.Pipe(duplex=False)
            with suppress(OSError):  # at the user's limit
                fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            receivers.append(receiver)
            work = (find, dealt[number::jobs], sender, receivers)
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
    """Yield the events of one portion."""
    while True:
        try:
            event = receiver.recv()
        except (EOFError, OSError):
            raise OSError(errno.ECHILD, "a process of the search was killed") from None
        if event is None:
            return
        if isinstance(event, _Failed):
            raise event.error
        yield event


def _work(find: Find, dealt: Sequence[Portion], sender: Connection, receivers: Sequence[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # do not traverse inherited objects
    for receiver in receivers:
        receiver.close()
    try:
        for portion in dealt:
            held, held_bytes = list[Event | None](), 0
            for event in chain(find(portion), [None]):
                held.append(event)
                held_bytes += len(event.output) if isinstance(event, Match) else 0
                if event is None or held_bytes > _HELD_BYTES:
                    for each in held:
                        sender.send(each)
                    held, held_bytes = [], 0
    except BrokenPipeError:
        pass
    except (WaldError, OSError) as error:
        with suppress(BrokenPipeError):
            sender.send(_Failed(error))

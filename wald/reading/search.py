"""Parallel search in a log by forked processes, with results in order.

Not by threads: ``re`` and ``bytes.find`` hold the interpreter's lock.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

from wald.errors import Damaged, WaldError
from wald.files.listing import Segment
from wald.files.uptime import read_steps
from wald.format.names import Kind
from wald.reading.assembler import Batch
from wald.reading.reader import read_portion
from wald.reading.selection import Selection
from wald.retention.blockers import sealed_index
from wald.retention.missing import Missing
from wald.segments.view import View

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PORTION_BYTES = 8 << 20  # raw; much more than opening a segment costs, much less than a process's memory


def portions(view: View, selection: Selection) -> Iterator[tuple[int, int]]:
    """Yield each portion's first and last sequence, in order, without gaps even if records are missing."""
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
    """Return each frame's first sequence, raw bytes, earliest and latest time; one large frame without an index."""
    if segment.kind.form is Kind.SEALED:
        with suppress(Damaged, FileNotFoundError):
            table = sealed_index(segment, view.log_id).frames
            return zip(table.first_sequences, table.raw_bytes, table.earliest_ns, table.latest_ns, strict=True)
    return [(segment.base_sequence, PORTION_BYTES, 0, -1)]


_WRITTEN_BYTES = 64 << 10  # of output, at once
_PIPE_BYTES = 256 << 10
_HELD_BYTES = 12 << 20  # of results, in each process until the parent reads them


class Match(NamedTuple):
    """Number of records, and the output for them."""

    records: int
    output: bytes


class _Output(NamedTuple):
    """Announcement of a :class:`Match` whose output follows in the pipe."""

    records: int
    output_bytes: int


class _Failed(NamedTuple):
    error: Exception


Event = Match | Damaged | Missing
Show = Callable[[Batch], Match]
Absent = Callable[[bytes], bool]


def search(view: View, selection: Selection, show: Show, *, absent: Absent, jobs: int) -> Iterator[Event]:
    """Return the results of ``show`` for the selected batches, and unreadable parts, in log order.

    ``absent`` returns True if ``show`` finds nothing in batches with these bytes.
    """
    view = view if selection.earliest else view.including_released()
    dealt = list(portions(view, selection))
    if jobs == 1 or len(dealt) == 1:
        return chain.from_iterable(_searched(view, selection, portion, show, absent) for portion in dealt)
    return _in_processes(view, selection, dealt, show, absent, min(jobs, len(dealt)))


def _searched(
    view: View, selection: Selection, portion: tuple[int, int], show: Show, absent: Absent
) -> Iterator[Event]:
    events: list[Event] = []
    records, parts, held = 0, list[bytes](), 0
    report = events.append
    batches = read_portion(view, selection, *portion, absent=absent, on_damage=report, on_missing=report)
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


def _in_processes(
    view: View, selection: Selection, dealt: Sequence[tuple[int, int]], show: Show, absent: Absent, jobs: int
) -> Iterator[Event]:
    import multiprocessing  # 20 ms, which a small log can save

    context = multiprocessing.get_context("fork")
    receivers: list[Connection] = []
    processes = []
    try:
        for number in range(jobs):
            receiver, sender = context.Pipe(duplex=False)
            with suppress(OSError):  # smaller if the user's limit is reached
                fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
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
    try:
        while (event := receiver.recv()) is not None:
            if isinstance(event, _Failed):
                raise event.error
            if not isinstance(event, _Output):
                yield event
                continue
            records, left = event
            while left or records:
                part = os.read(receiver.fileno(), min(left, _PIPE_BYTES)) if left else b""
                if left and not part:
                    raise EOFError
                yield Match(records, part)
                records, left = 0, left - len(part)
    except EOFError:
        raise OSError(errno.ECHILD, "a process of the search was killed") from None


def _work(
    view: View,
    selection: Selection,
    dealt: Sequence[tuple[int, int]],
    show: Show,
    absent: Absent,
    sender: Connection,
    receivers: Sequence[Connection],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # existing objects stay to the end
    for receiver in receivers:
        receiver.close()
    try:
        for portion in dealt:
            held, held_bytes = list[Event](), 0
            for event in _searched(view, selection, portion, show, absent):
                held.append(event)
                held_bytes += len(event.output) if isinstance(event, Match) else 0
                if held_bytes > _HELD_BYTES:
                    _send(sender, held)
                    held, held_bytes = [], 0
            _send(sender, held)
            sender.send(None)
    except BrokenPipeError:
        pass
    except (WaldError, OSError) as error:
        with suppress(BrokenPipeError):
            sender.send(_Failed(error))


def _send(sender: Connection, events: Sequence[Event]) -> None:
    for event in events:
        if not isinstance(event, Match):
            sender.send(event)
            continue
        sender.send(_Output(event.records, len(event.output)))
        left = memoryview(event.output)
        while left:
            left = left[os.write(sender.fileno(), left) :]

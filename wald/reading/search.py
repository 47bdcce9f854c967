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
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.retention.blockers import sealed_index
from wald.retention.missing import Missing
from wald.segments.view import View

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PORTION_BYTES = 8 << 20  # raw; fits in memory, and outweighs opening a segment


def _split(view: View, selection: Selection) -> Iterator[Portion]:
    """Split the selection into consecutive portions, without gaps even if records are missing."""
    first, last, portion_bytes = selection.first, selection.last, 0
    last_step = max((step.base for step in read_steps(view.root)), default=0)  # append times restart there
    segments = view.segments[view.listing.index_covering(first) :] if view.segments else ()
    selected = takewhile(lambda segment: segment.base_sequence <= last, segments)
    for start, raw_bytes, earliest_ns, latest_ns in chain.from_iterable(_frames(each, view) for each in selected):
        if start > last:
            break
        if selection.until_ns <= earliest_ns <= latest_ns and start >= last_step:
            if first < start:
                yield first, start - 1
            elif first == selection.first:
                yield first, first
            return
        if portion_bytes >= PORTION_BYTES and start > selection.first:
            if first < start:
                yield first, start - 1
                first = start
            portion_bytes = 0
        portion_bytes += raw_bytes
    yield first, last


def _frames(segment: Segment, view: View) -> Iterable[tuple[int, int, int, int]]:
    """Return first sequence, raw bytes, earliest and latest time of each frame; one large frame without an index."""
    if segment.kind.form is Kind.SEALED:
        with suppress(Damaged, FileNotFoundError):
            table = sealed_index(segment, view.log_id).frames
            return zip(table.first_sequences, table.raw_bytes, table.earliest_ns, table.latest_ns, strict=True)
    return [(segment.base_sequence, PORTION_BYTES, 0, -1)]


_OUTPUT_BYTES = 64 << 10  # of one result
_PIPE_BYTES = 256 << 10
_BUFFER_BYTES = 12 << 20  # results that wait for the parent


class Match(NamedTuple):
    """Number and output of matching records."""

    records: int
    output: bytes


class _Failure(NamedTuple):
    error: Exception


Event = Match | Damaged | Missing
Portion = tuple[int, int]  # first and last sequence
Find = Callable[[Portion], Iterator[Event]]
Show = Callable[[Batch], Match]
CannotMatch = Callable[[bytes], bool]


def search(view: View, selection: Selection, show: Show, *, cannot_match: CannotMatch, jobs: int) -> Iterator[Event]:
    """Apply ``show`` to the selected batches in ``jobs`` processes; return results and damage in log order.

    ``cannot_match`` returns True for bytes in which ``show`` would find nothing.
    """
    view = view if selection.from_earliest else view.including_released()
    portions = list(_split(view, selection))
    find = partial(_search_portion, view, selection, show, cannot_match)
    if jobs == 1 or len(portions) == 1:
        return chain.from_iterable(map(find, portions))
    return _search_in_processes(find, portions, min(jobs, len(portions)))


def _search_portion(
    view: View, selection: Selection, show: Show, cannot_match: CannotMatch, portion: Portion
) -> Iterator[Event]:
    events: list[Event] = []
    records, parts, output_bytes = 0, list[bytes](), 0
    part, report = replace(selection, first=portion[0], last=portion[1]), events.append
    batches = read_selection(view, part, cannot_match=cannot_match, on_damage=report, on_missing=report)
    for batch in batches:
        match = show(batch)
        if events or output_bytes > _OUTPUT_BYTES:
            yield Match(records, b"".join(parts))
            yield from events
            events.clear()
            records, parts, output_bytes = 0, [], 0
        if match.records:
            records += match.records
            output_bytes += len(match.output)
            parts.append(match.output)
    yield Match(records, b"".join(parts))
    yield from events


def _search_in_processes(find: Find, portions: Sequence[Portion], jobs: int) -> Iterator[Event]:
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
            work = (find, portions[number::jobs], sender, receivers)
            processes.append(context.Process(target=_run_worker, args=work, daemon=True))
            processes[-1].start()
            sender.close()
        for number in range(len(portions)):
            yield from _receive_events(receivers[number % jobs])
    finally:
        for process, receiver in zip(processes, receivers, strict=False):
            receiver.close()
            process.terminate()
            process.join()


def _receive_events(receiver: Connection) -> Iterator[Event]:
    while True:
        try:
            event = receiver.recv()
        except (EOFError, OSError):
            raise OSError(errno.ECHILD, "a search process was killed") from None
        if event is None:
            return
        if isinstance(event, _Failure):
            raise event.error
        yield event


def _run_worker(find: Find, portions: Sequence[Portion], sender: Connection, receivers: Sequence[Connection]) -> None:
    """Search ``portions``; send the events, and None after each portion."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # do not traverse inherited objects
    for receiver in receivers:
        receiver.close()
    try:
        for portion in portions:
            buffer, buffer_bytes = list[Event | None](), 0
            for event in chain(find(portion), [None]):
                buffer.append(event)
                buffer_bytes += len(event.output) if isinstance(event, Match) else 0
                if event is None or buffer_bytes > _BUFFER_BYTES:
                    for each in buffer:
                        sender.send(each)
                    buffer, buffer_bytes = [], 0
    except BrokenPipeError:
        pass
    except (WaldError, OSError) as error:
        with suppress(BrokenPipeError):
            sender.send(_Failure(error))

"""The state of a log at the end of a segment, rebuilt from the batches of that segment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from wald.errors import Damaged
from wald.format.batch import BatchHeader
from wald.format.names import Kind
from wald.format.parsing import StoredBatch
from wald.format.state import BadControl, Ending, LogState, decode_state
from wald.store.files.clock import read_steps, step_between
from wald.store.files.directory import Root
from wald.store.files.listing import Listing, Segment
from wald.store.files.regular import open_file
from wald.store.segments.compression import SealedFile
from wald.store.segments.indexes import find_index
from wald.store.segments.raw import FIRST_BATCH, RawFile, ScannedBatch, SegmentEnd
from wald.store.segments.salvage import SalvagedSegment

Dropped = Callable[[int], Mapping[str, int] | None]
"""The last sequence that relief has dropped of each route of a segment, by the ledger; None if unknown."""


def _not_known(_base: int) -> None:
    return None


class Replay:
    """The state that batches build up: a control batch replaces it, every other batch adds to it.

    Attributes:
        batches: how many there were.
        pieces: whether one of them continues a record that began in an earlier segment.
        dropped: what relief has dropped of the segment, as of :func:`wald.format.state.still_open`.
    """

    def __init__(self, state: LogState) -> None:
        self.state = state
        self.batches = 0
        self.pieces = False
        self.dropped: Mapping[str, int] | None = None

    def add(self, header: BatchHeader, route: str, payload: bytes | memoryview) -> None:
        """Add the next batch. The payload is used only if it is a state."""
        self.batches += 1
        self.pieces = self.pieces or bool(header.continues_sequence)
        self.state.apply(header, route, self.dropped)
        if header.is_dropped:
            self._keep_lasts(header)
        if not header.is_state:
            return
        with contextlib.suppress(BadControl):  # a newer wald wrote it; the batches that follow say enough
            before, self.state = self.state, decode_state(payload)
            self.state.next_sequence = max(self.state.next_sequence, before.next_sequence)
            self.state.append_time_ns = max(self.state.append_time_ns, before.append_time_ns)

    def _keep_lasts(self, dropped: BatchHeader) -> None:
        """Keep the last sequence of each route whose last record was dropped."""
        routes = self.state.routes
        for route, last in (self.dropped or {}).items():
            if last < dropped.end_sequence:
                routes[route] = max(last, routes.get(route, 0))

    def add_scanned(self, raw: RawFile, batch: ScannedBatch) -> None:
        """Add a batch of a raw segment."""
        self.add(batch.header, batch.route, raw.control_payload(batch))


def state_after(listing: Listing, log_id: bytes, errors: list[str], dropped: Dropped = _not_known) -> LogState:
    """The state at the end of the newest segment, as far as it can be read; without segments that of a new log.

    Args:
        errors: what cannot be read is added to these.
        dropped: used if the index does not have the routes of all that relief has dropped.
    """
    if not listing.segments:
        return LogState()
    newest = listing.segments[-1]
    replay = Replay(LogState(next_sequence=newest.base_sequence))
    replay.dropped = dropped(newest.base_sequence)
    if newest.kind is Kind.RAW:
        _replay_raw(newest, log_id, replay)
        return replay.state
    try:
        with SealedFile(newest.path) as sealed:
            _replay_sealed(sealed, replay, errors)
    except Damaged as error:
        errors.append(error.message)
        _replay_salvaged(newest, log_id, replay, error)
    return replay.state


def state_before(
    root: Root, segment: Segment, older: Listing, log_id: bytes, errors: list[str], dropped: Dropped = _not_known
) -> LogState:
    """Return the state at the beginning of a segment; ``older`` are the segments before it.

    Args:
        errors, dropped: as of :func:`state_after`.
    """
    state = state_after(older, log_id, errors, dropped)
    take_step(root, state, end_of_times(older, state), segment.base_sequence)
    return state


def end_of_times(older: Listing, state: LogState) -> int:
    """Return the first base that a clock step after ``older`` can have; ``state`` is the one at their end."""
    return max(state.next_sequence, older.segments[-1].base_sequence + 1) if older.segments else 1


def take_step(root: Root, state: LogState, first: int, base: int) -> None:
    """Restart append times for a segment at ``base``, if a clock step lies at one of ``first`` to ``base``."""
    step = step_between(read_steps(root), first, base)
    if step is not None:
        state.append_time_ns = min(state.append_time_ns, step.at_ns)


def _replay_raw(segment: Segment, log_id: bytes, replay: Replay) -> None:
    index = partial(find_index, segment.path.parent, log_id, segment.base_sequence)
    with open_file(segment.path) as file:
        raw = RawFile(file.fileno(), index=index)
        for met in raw.scan():
            if isinstance(met, ScannedBatch):
                replay.add_scanned(raw, met)
            elif isinstance(met, SegmentEnd):
                replay.state.previous = Ending(raw.salt, met.offset)


def _replay_sealed(sealed: SealedFile, replay: Replay, errors: list[str]) -> None:
    if sealed.index.relieved is not None and sealed.index.relieved.names_all:
        replay.dropped = sealed.index.relieved.lasts
    for number, frame in enumerate(sealed.index.frames):
        if sealed.index.is_damage(frame):
            continue  # its bytes may look like batches
        try:
            data = sealed.frame(number)
        except Damaged as error:
            errors.append(error.message)
            continue
        for batch in sealed.batches(number, data):
            replay.add(batch.header, batch.route, batch.payload)
    replay.state.next_sequence = max(replay.state.next_sequence, sealed.index.next_sequence)
    replay.state.previous = Ending(sealed.index.salt, sealed.index.raw_bytes)


def _replay_salvaged(segment: Segment, log_id: bytes, replay: Replay, error: Damaged) -> None:
    """Add the batches that can be read of a sealed segment without its index."""
    with contextlib.suppress(Damaged), contextlib.closing(SalvagedSegment(segment, log_id, error)) as salvaged:
        for met in salvaged.batches(FIRST_BATCH, None):
            if isinstance(met, StoredBatch):
                replay.add(met.header, met.route, met.payload)
    replay.state.previous = None

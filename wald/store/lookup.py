"""Where a record is: one answer for every number from 1 on, never just "not found"."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from wald.errors import Damaged, InvalidInput
from wald.format.names import Kind, segment_name
from wald.store.cursors import cursors_of
from wald.store.directory import Listing, Root, Segment, look_again
from wald.store.head import Bound, look, lost_head
from wald.store.history import History
from wald.store.raw import Gap
from wald.store.segments import Whole, open_segment


class State(Enum):
    """What has become of a record."""

    ACTIVE = "active"
    """In the segment that is being written."""
    CUT = "cut"
    """In a complete segment that waits to be sealed."""
    SEALED = "sealed"
    DOOMED = "doomed"
    """Reclaimed; its file is still there, for the grace period."""
    QUARANTINED = "quarantined"
    """Its bytes are damaged, or were put aside because they were."""
    RECLAIMED = "reclaimed"
    ARCHIVED = "archived"
    """Not in the log any more, but in a bundle."""
    NEVER_ISSUED = "never-issued"
    UNKNOWN = "unknown"
    """It was issued; nothing that is left tells more."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The answer.

    Attributes:
        segment: file name of the segment that holds it, or held it last.
        position: of its batch in the raw segment, bytes.
        processed: per group of its route, whether the group has processed it.
        words: the answer for a person.
    """

    sequence: int
    state: State
    words: str
    durable: bool = False
    segment: str | None = None
    route: str | None = None
    append_time_ns: int | None = None
    position: int | None = None
    processed: dict[str, bool] = field(default_factory=dict)


def where(root: Root, sequence: int, *, log_id: bytes) -> Whereabouts:
    """What has become of record ``sequence``.

    Raises:
        InvalidInput: below 1.
    """
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", hint="the first record is number 1")
    while True:
        bound, listing = look(root)
        try:
            return _where(root, sequence, log_id, bound, listing)
        except FileNotFoundError as gone:
            try:
                look_again(root, listing, gone)
            except Damaged as error:
                return _gone(root, sequence, error.message)


def _where(root: Root, sequence: int, log_id: bytes, bound: Bound, listing: Listing) -> Whereabouts:
    segments = [*listing.doomed, *listing.segments]
    newest = max((segment.base_sequence for segment in segments), default=0)
    if bound.lost and sequence > (bound.sequence or 0):
        return Whereabouts(sequence, State.UNKNOWN, lost_head(root, bound).message)
    if bound.sequence is not None and sequence > bound.sequence:
        return _beyond(sequence, bound.sequence)
    holding = [segment for segment in segments if segment.base_sequence <= sequence]
    reason = ""
    if holding:
        # The newest at or below it; of two forms of one segment the one that is not doomed.
        segment = max(holding, key=lambda found: (found.base_sequence, found.kind is not Kind.DOOMED))
        found = _in_segment(root, sequence, segment, bound, newest, log_id)
        if isinstance(found, Whereabouts):
            return found
        reason = found
    if bound.sequence is None and (not holding or segment.base_sequence == newest):
        return _beyond(sequence, None)
    return _gone(root, sequence, reason)


def _in_segment(
    root: Root, sequence: int, segment: Segment, bound: Bound, newest: int, log_id: bytes
) -> Whereabouts | str:
    """Its place in the segment that should hold it; or what is found there instead, "" for nothing."""
    limit = bound.limit(segment.base_sequence)
    try:
        opened = open_segment(segment, log_id)
    except Damaged as error:
        return error.message
    gap: Gap | None = None
    try:
        for met in opened.batches(opened.position_of_sequence(sequence, limit), limit):
            if isinstance(met, Gap):
                gap = met
            elif isinstance(met, Whole) and met.header.count and met.header.base_sequence <= sequence:
                gap = None
                if sequence < met.header.end_sequence:
                    return _placed(root, sequence, segment, met, newest, log_id, bound)
            elif isinstance(met, Whole) and met.header.base_sequence > sequence:
                break
    finally:
        opened.close()
    tail = opened.tail
    if gap is not None:
        return f"{segment.path}: offset {opened.file_offset(gap.offset)}: damaged ({gap.reason})"
    if tail is not None and tail.garbage_bytes:
        return f"{segment.path}: offset {tail.offset}: damaged ({tail.reason})"
    return ""


def _placed(
    root: Root, sequence: int, segment: Segment, met: Whole, newest: int, log_id: bytes, bound: Bound
) -> Whereabouts:
    states = {Kind.SEALED: State.SEALED, Kind.DOOMED: State.DOOMED}
    state = states.get(segment.kind, State.ACTIVE if segment.base_sequence == newest else State.CUT)
    place = f"in {segment.path.name} at {met.position}, route {met.route}"
    if state is State.DOOMED:
        place = f"reclaimed; still {place}"
    head_sequence = bound.sequence if bound.sequence is not None else met.header.end_sequence - 1
    processed = {}
    if (root.routes / met.route).is_dir():
        cursors = cursors_of(root, met.route, log_id=log_id, head_sequence=head_sequence)
        processed = {cursor.group: cursor.effective >= sequence for cursor in cursors}
    return Whereabouts(
        sequence,
        state,
        place,
        durable=True,
        segment=segment.path.name,
        route=met.route,
        append_time_ns=met.header.append_time_ns,
        position=met.position,
        processed=processed,
    )


def _beyond(sequence: int, last: int | None) -> Whereabouts:
    known = f"the last durable record is {last}" if last is not None else "no head says that it was"
    return Whereabouts(sequence, State.NEVER_ISSUED, f"never issued: {known}")


def _gone(root: Root, sequence: int, reason: str) -> Whereabouts:
    """Issued, and in no segment that can be read."""
    history = History(root)
    sealed = history.sealed(sequence)
    segment = segment_name(int(sealed["base"]), Kind.SEALED) if sealed else None
    archived, reclaimed = history.archived(None, sequence), history.reclaimed(sequence)
    if reason:
        return Whereabouts(sequence, State.QUARANTINED, reason, segment=segment)
    if archived is not None:
        return Whereabouts(sequence, State.ARCHIVED, f"in bundle {archived.get('bundle', 'unnamed')}", segment=segment)
    if reclaimed is not None:
        return Whereabouts(
            sequence, State.RECLAIMED, f"reclaimed at {reclaimed.get('at', 'an unknown time')}", segment=segment
        )
    words = "it was issued, no segment holds it, and no ledger says why"
    return Whereabouts(sequence, State.UNKNOWN, words, segment=segment)

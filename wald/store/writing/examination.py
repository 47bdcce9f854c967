"""The facts about the newest raw segment by which a start decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from wald.format.batch import Flag
from wald.format.names import Kind, segment_name
from wald.format.parsing import Outcome
from wald.format.segment import BadHeader, NewerVersion
from wald.format.state import LogState
from wald.store.files.directory import Root
from wald.store.files.listing import Listing, Segment
from wald.store.files.regular import open_file
from wald.store.segments.indexes import find_index
from wald.store.segments.raw import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.store.writing.replay import Replay, state_before

_BARRIER = int(Flag.BARRIER)  # enums are slow


class Header(Enum):
    """The first 64 bytes of the segment."""

    OURS = "ours"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # good, but of another log, or of another segment
    NEWER = "newer"  # good, but of a newer wald


class Content(Enum):
    """What the good batches of the segment hold."""

    NOTHING = "nothing"  # not even the control batch, which was durable before the segment had its name
    CONTROL = "control"  # only the control batch
    PIECES = "pieces"  # of a record that began earlier; no sequence of its own
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the newest raw segment.

    Attributes:
        reason: what is wrong with the header; "" if nothing is.
        state: of the log at the end of the segment.
        batches: how many good ones there are.
        durable_bytes: its length by the head; 0: the head stands in another segment.
        salt: of its checksums.
    """

    segment: Segment
    header: Header
    reason: str
    content: Content
    state: LogState
    batches: int
    gaps: list[DamagedBytes]
    tail: SegmentEnd
    durable_bytes: int
    salt: int


def examine(root: Root, listing: Listing, log_id: bytes, durable_bytes: int, errors: list[str]) -> Facts:
    """Scan the newest segment of ``listing``, which is a raw one.

    Args:
        durable_bytes: as in :class:`Facts`.
        errors: what cannot be read of the segment before it is added to these.
    """
    torn_turn = _TornTurn(durable_bytes)
    facts = _scan(root, listing, log_id, durable_bytes, errors, torn_turn.add)
    if torn_turn.offset is None:
        return facts
    # The batches behind the gap are not durable either. Only those in front of it count.
    end = facts.tail.offset + facts.tail.garbage_bytes
    facts = _scan(root, listing, log_id, durable_bytes, errors, lambda _: None, limit=torn_turn.offset)
    reason = "parts of one turn reached the disk, others did not"
    return replace(facts, tail=SegmentEnd(torn_turn.offset, Outcome.TORN, reason, end - torn_turn.offset))


class _TornTurn:
    """Finds the gap that a power cut can leave in the last turn, whose pages reach the disk in any order.

    The first batch of a turn says whether everything before it was synced before it was written. So a gap behind the
    durable end is an unfinished write if no such batch follows it, and damage if one does. Append times cannot tell:
    after a clock was set back, several turns have the same one.

    Attributes:
        offset: where the unfinished turn begins; None if there is none.
    """

    def __init__(self, durable_bytes: int) -> None:
        self.offset: int | None = None
        # The control batch was durable before the segment had its name.
        self._from = max(durable_bytes, FIRST_BATCH + 1)

    def add(self, found: ScannedBatch | DamagedBytes) -> None:
        if isinstance(found, ScannedBatch):
            if found.header.flags & _BARRIER:
                self.offset = None
        elif self.offset is None and found.offset >= self._from:
            self.offset = found.offset


def _scan(
    root: Root,
    listing: Listing,
    log_id: bytes,
    durable_bytes: int,
    errors: list[str],
    report: Callable[[ScannedBatch | DamagedBytes], None],
    *,
    limit: int | None = None,
) -> Facts:
    segment, older = listing.segments[-1], Listing(listing.segments[:-1])
    replay, gaps, end = Replay(LogState(next_sequence=segment.base_sequence)), list[DamagedBytes](), None
    with open_file(segment.path) as file:
        index = partial(find_index, segment.path.parent, log_id, segment.base_sequence)
        raw = RawFile(file.fileno(), limit=limit, durable=durable_bytes, index=index)
        salt = raw.salt
        header, reason = _header_fact(raw, log_id, segment.base_sequence)
        for found in raw.scan():
            if isinstance(found, SegmentEnd):
                end = found
                continue
            report(found)
            if isinstance(found, ScannedBatch):
                replay.add_scanned(raw, found)
                continue
            gaps.append(found)
            if found.offset == FIRST_BATCH:  # without the control batch its state comes from the segment before
                replay.state = state_before(root, segment, older, log_id, errors)
    assert end is not None, "a scan ends with its tail"
    content = _content(replay, segment.base_sequence)
    return Facts(segment, header, reason, content, replay.state, replay.batches, gaps, end, durable_bytes, salt)


def _content(replay: Replay, base_sequence: int) -> Content:
    if replay.state.next_sequence > base_sequence:
        return Content.RECORDS
    if replay.pieces:
        return Content.PIECES
    return Content.CONTROL if replay.batches else Content.NOTHING


def _header_fact(raw: RawFile, log_id: bytes, base_sequence: int) -> tuple[Header, str]:
    try:
        found = raw.header()
    except NewerVersion as error:
        return Header.NEWER, str(error)
    except BadHeader as error:
        return Header.DAMAGED, str(error)
    if found.log_id != log_id:
        return Header.FOREIGN, f"the segment belongs to another log (log id {found.log_id.hex()})"
    if found.base_sequence != base_sequence:  # its records would be missed
        name = segment_name(found.base_sequence, Kind.RAW)
        return Header.FOREIGN, f"the segment begins with record {found.base_sequence}: its name was {name}"
    return Header.OURS, ""

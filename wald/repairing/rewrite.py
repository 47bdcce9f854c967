"""New segments written from the intact batches of a damaged one: one for each contiguous range of sequences.

If every batch is intact, the new segment has the raw bytes and the digest of the old one. Otherwise batches move, and
each new segment starts with a control batch that contains the state of the log at its beginning.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from wald.checking.checker import Level, SegmentToCheck, check
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format.batch import BatchHeader, Encoding, Flag, checksum_body, encode_batch, route_prefix, seed
from wald.format.log_state import FIFO_PEER, STDIN_PEER, UNKNOWN_PEER, LogState, encode_state, peer_number
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.format.segment import BadHeader, SegmentHeader, encode_segment_header
from wald.repairing.rescue import IntactBatch, batches, state_of, without
from wald.segments.raw_scan import FIRST_BATCH, RawFile
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import compress_segment

_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Source:
    """Segment to rewrite.

    Attributes:
        durable, end, cut: see :func:`wald.repairing.rescue.batches`.
        broken: predicate for records to leave out, because a piece of them is lost.
        dropped: see :func:`wald.format.log_state.still_open`.
        whole: all batches are intact, and none is left out.
    """

    segment: Segment
    log_id: bytes
    durable: int | None
    end: int
    broken: Callable[[int], bool]
    whole: bool
    cut: int
    dropped: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Made:
    """New segment under a temporary name, synced and read back; ``index`` is None if it is raw."""

    base_sequence: int
    path: Path
    index: SealedIndex | None


def remake(root: Root, disk: Disk, source: Source, before: LogState) -> list[Made]:
    """Write the new segments and return them, oldest first; remove all of them on failure.

    Args:
        before: state of the log at the beginning of the segment.

    Raises:
        Damaged: a new segment differs when it is read back.
        OSError: a system call failed.
    """
    made: list[Made] = []
    try:
        if source.whole:
            for path, base in _same(root, disk, source):
                made.append(_finished(root, disk, source, path, base))
            if made and not _wrong(made[0], source):
                return made
            _discard(made)
            made.clear()
        for path, base in _moved(root, disk, source, before):
            made.append(_finished(root, disk, source, path, base))
        for each in made:
            if wrong := _wrong(each, source):
                raise Damaged(f"{each.path}: does not read back: {wrong}", case="copy-differs")
    except BaseException:
        _discard(made)
        raise
    return made


def header_of(source: Source) -> SegmentHeader:
    """Return the header of the segment, or one made from its first batch if it is lost."""
    found = _own_header(source.segment, source.log_id)
    if found is not None:
        return found
    first = next(met for met in _batches(source) if isinstance(met, IntactBatch))
    epoch, time_ns = first.header.epoch, first.header.append_time_ns
    return SegmentHeader(source.log_id, source.segment.base_sequence, epoch, time_ns, secrets.randbits(32))


def _own_header(segment: Segment, log_id: bytes) -> SegmentHeader | None:
    if segment.kind.form is Kind.SEALED:
        with closing(SalvagedSegment(segment, log_id, Damaged(str(segment.path)))) as salvaged:
            return salvaged.header
    with open_file(segment.path) as file:
        try:
            return RawFile(file.fileno()).header()
        except BadHeader:
            return None


def _batches(source: Source) -> Iterator[IntactBatch | str]:
    return batches(source.segment, source.log_id, durable=source.durable, end=source.end, cut=source.cut)


def _same(root: Root, disk: Disk, source: Source) -> Iterator[tuple[Path, int]]:
    """Yield a copy of the raw bytes; nothing if the header, which has the salt, is lost."""
    header = _own_header(source.segment, source.log_id)
    if header is None:
        return
    with closing(_Output(root, disk, header)) as output:
        for met in _batches(source):
            assert isinstance(met, IntactBatch), "all batches are intact"
            if met.position != output.position:
                return  # other bytes are between them
            output.add(met)
        yield output.finish(), header.base_sequence


def _moved(root: Root, disk: Disk, source: Source, before: LogState) -> Iterator[tuple[Path, int]]:
    """Yield segments of moved batches, one for each contiguous range."""
    header, output = header_of(source), None
    state = replace(before, open_records=_without_broken(before.open_records, source))
    try:
        peers: dict[int, IntactBatch] = {}
        for met in _batches(source):
            if isinstance(met, str):
                state.open_records.clear()
                continue
            if met.header.is_control and met.header.peer:
                peers[met.header.peer] = met
                continue
            if met.header.is_state:
                state = _joined(state_of(met), state, source)
                continue
            kept = without(met, source.broken)
            if kept is None or (not kept.header.is_dropped and _is_orphan(kept.header, state)):
                continue
            if not kept.header.count:  # a segment of pieces alone could have the name of the next one
                place = max(state.next_sequence, source.segment.base_sequence)
                kept = replace(kept, header=kept.header._replace(base_sequence=place))
            base = kept.header.base_sequence
            if output is None or base != state.next_sequence:
                if output is not None:
                    yield output.finish(), output.base_sequence
                    output.close()
                state.next_sequence = base
                output = _Output(root, disk, replace(header, base_sequence=base, salt=secrets.randbits(32)))
                output.add(_control(state, header.epoch))
            time_ns = max(kept.header.append_time_ns, state.append_time_ns)
            kept = replace(kept, header=kept.header._replace(append_time_ns=time_ns))
            output.add_from(peers, kept)
            state.apply(kept.header, kept.route, source.dropped)
        if output is not None:
            yield output.finish(), output.base_sequence
    finally:
        if output is not None:
            output.close()


def _without_broken(open_records: dict[str, int], source: Source) -> dict[str, int]:
    return {route: sequence for route, sequence in open_records.items() if not source.broken(sequence)}


def _joined(found: LogState | None, before: LogState, source: Source) -> LogState:
    """Return the state in a control batch without broken records, or ``before`` if this version cannot read it."""
    if found is None:
        return before
    found.open_records = _without_broken(found.open_records, source)
    found.append_time_ns = max(found.append_time_ns, before.append_time_ns)
    return found


def _is_orphan(header: BatchHeader, state: LogState) -> bool:
    """True if a batch is only a piece of a record whose beginning is missing."""
    return not header.count and header.continues_sequence not in state.open_records.values()


def _control(state: LogState, epoch: int) -> IntactBatch:
    payload = encode_state(state)
    header = BatchHeader(
        body_checksum=checksum_body(b"", [payload], len(payload)),
        payload_bytes=len(payload),
        base_sequence=state.next_sequence,
        append_time_ns=state.append_time_ns,
        producer_id=0,
        producer_sequence=0,
        count=0,
        epoch=epoch & _U32,
        encoding=Encoding.CONTROL,
        flags=Flag.CONTROL,
        route_bytes=0,
    )
    return IntactBatch(header, "", FIRST_BATCH, memoryview(payload))


class _Output:
    """Raw segment under construction, under a temporary name."""

    def __init__(self, root: Root, disk: Disk, header: SegmentHeader) -> None:
        self.base_sequence = header.base_sequence
        self.path = _temporary(root, header.base_sequence, Kind.RAW)
        self._disk = disk
        self._salt = header.salt
        self._numbers = {FIFO_PEER: FIFO_PEER, STDIN_PEER: STDIN_PEER}  # old → new peer number
        self._descriptor = disk.create(self.path)
        self.position = disk.write(self._descriptor, [encode_segment_header(header)], 0)
        self._finished = False

    def add(self, whole: IntactBatch) -> None:
        prefix = route_prefix(whole.route.encode())
        buffers = encode_batch(whole.header, prefix, [whole.payload], seed(self._salt, self.position))
        self.position += self._disk.write(self._descriptor, buffers, self.position)

    def add_from(self, peers: dict[int, IntactBatch], whole: IntactBatch) -> None:
        """Add a batch, after the introduction of its peer."""
        header, number = whole.header, whole.header.peer
        if number in peers and number not in self._numbers:
            self._numbers[number] = peer_number(self.position)
            introduction = peers[number].header._replace(
                peer=self._numbers[number], base_sequence=header.base_sequence, append_time_ns=header.append_time_ns
            )
            self.add(replace(peers[number], header=introduction))
        self.add(replace(whole, header=header._replace(peer=self._numbers.get(number, UNKNOWN_PEER))))

    def finish(self) -> Path:
        """Sync the segment and return its path."""
        self._disk.sync(self._descriptor)
        self._finished = True
        return self.path

    def close(self) -> None:
        """Close the file; remove it unless it is finished."""
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1
            if not self._finished:
                self.path.unlink(missing_ok=True)


def _temporary(root: Root, base: int, kind: Kind) -> Path:
    path = root.segment(base, kind)
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def _finished(root: Root, disk: Disk, source: Source, raw: Path, base: int) -> Made:
    """Return the new segment in the form of the old one."""
    if source.segment.kind.form is Kind.RAW:
        return Made(base, raw, None)
    path = _temporary(root, base, Kind.SEALED)
    target = disk.create(path)
    try:
        with open_file(raw) as file:
            compressed = compress_segment(file.fileno(), target, disk)
        disk.sync(target)
        os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read back from the disk
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        disk.close(target)
        raw.unlink(missing_ok=True)
    return Made(base, path, compressed.index)


def _wrong(made: Made, source: Source) -> str:
    """Return the first error in a new segment, or ""."""
    sha256 = None if made.index is None else made.index.sha256.hex()
    kind = source.segment.kind.form
    target = SegmentToCheck(Segment(made.base_sequence, kind, made.path), source.log_id, sha256=sha256)
    return next((found.message for found in check(target).findings if found.level is Level.ERROR), "")


def _discard(made: list[Made]) -> None:
    for each in made:
        each.path.unlink(missing_ok=True)

"""New segments from the intact batches of a damaged one, one for each contiguous range of sequences.

If every batch is intact, raw bytes and digest stay the same. Otherwise batches move, and each new segment starts with a
control batch.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from wald.checking.checker import SegmentToCheck, check
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format.batch import control_header, encode_batch, route_prefix, seed
from wald.format.log_state import FIFO_PEER, STDIN_PEER, UNKNOWN_PEER, LogState, encode_state, peer_number
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.format.segment import BadHeader, SegmentHeader, encode_segment_header
from wald.repairing.rescue import IntactBatch, control_state, without_broken
from wald.segments.raw_scan import FIRST_BATCH, RawFile
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import compress_segment


@dataclass(frozen=True, slots=True)
class NewSegment:
    """New segment, synced under a temporary name. A raw segment has no index."""

    base_sequence: int
    path: Path
    index: SealedIndex | None


@dataclass(frozen=True, slots=True)
class Rewriter:
    """Writer of the segments that replace a damaged one."""

    root: Root
    disk: Disk
    segment: Segment
    log_id: bytes
    batches: Callable[[], Iterator[IntactBatch | str]]  # see :func:`intact_batches`
    is_broken: Callable[[int], bool]  # True to omit a record
    dropped: Mapping[str, int] | None  # as in ``still_open``
    is_intact: bool  # no batch is damaged or changes

    def rewrite(self, before: LogState) -> list[NewSegment]:
        """Write the new segments. Raise Damaged if one is not intact. A failure removes all."""
        segments: list[NewSegment] = []
        try:
            if self.is_intact and (path := self._copy()) is not None:
                segments.append(self._finish_segment(path, self.segment.base_sequence))
                if not self._first_error(segments[0]):
                    return segments
                _discard(segments)
                segments.clear()
            for path, base in self._move_batches(before):
                segments.append(self._finish_segment(path, base))
            for each in segments:
                if error := self._first_error(each):
                    raise Damaged(f"{each.path}: is not intact when read back: {error}", case="copy-differs")
        except BaseException:
            _discard(segments)
            raise
        return segments

    def _original_header(self) -> SegmentHeader | None:
        if self.segment.kind.form is Kind.SEALED:
            with closing(SalvagedSegment(self.segment, self.log_id, Damaged(str(self.segment.path)))) as salvaged:
                return salvaged.header
        with open_file(self.segment.path) as file:
            try:
                return RawFile(file.fileno()).header()
            except BadHeader:
                return None

    def _copy(self) -> Path | None:
        """Copy all batches to their old positions. Return None if the header, with the salt, is lost."""
        header = self._original_header()
        if header is None:
            return None
        with closing(_SegmentWriter(self.disk, self._temporary_path(header.base_sequence, Kind.RAW), header)) as output:
            for batch in self.batches():
                assert isinstance(batch, IntactBatch), "all batches are intact"
                if batch.position != output.position:
                    return None  # other bytes are between the batches
                output.add(batch)
            return output.finish()

    def _move_batches(self, before: LogState) -> Iterator[tuple[Path, int]]:
        """Write a new raw segment for each contiguous range; yield its path and base."""
        template, output = self._original_header(), None
        state = replace(before, open_records=self._unbroken(before.open_records))
        peers: dict[int, IntactBatch] = {}
        try:
            for batch in self.batches():
                if isinstance(batch, str):
                    state.open_records.clear()
                    continue
                header = batch.header
                template = template or SegmentHeader(self.log_id, 0, header.epoch, header.append_time_ns, 0)
                if header.is_control and header.peer:
                    peers[header.peer] = batch
                elif header.is_state:
                    if (new_state := control_state(batch)) is not None:
                        new_state.open_records = self._unbroken(new_state.open_records)
                        new_state.append_time_ns = max(new_state.append_time_ns, state.append_time_ns)
                        state = new_state
                elif (part := self._writable_part(batch, state)) is not None:
                    base = part.header.base_sequence
                    if output is None or base != state.next_sequence:
                        if output is not None:
                            yield output.finish(), output.base_sequence
                            output.close()
                        state.next_sequence = base
                        segment_header = replace(template, base_sequence=base, salt=secrets.randbits(32))
                        output = _SegmentWriter(self.disk, self._temporary_path(base, Kind.RAW), segment_header)
                        output.add(_control_batch(state, segment_header.epoch))
                    output.add_with_peer(peers, part)
                    state.apply(part.header, part.route, self.dropped)
            if output is not None:
                yield output.finish(), output.base_sequence
        finally:
            if output is not None:
                output.close()

    def _unbroken(self, open_records: dict[str, int]) -> dict[str, int]:
        return {route: sequence for route, sequence in open_records.items() if not self.is_broken(sequence)}

    def _writable_part(self, batch: IntactBatch, state: LogState) -> IntactBatch | None:
        """Return the part of a batch to write, or None if nothing remains."""
        part = without_broken(batch, self.is_broken)
        if part is None:
            return None
        header = part.header
        header = header._replace(append_time_ns=max(header.append_time_ns, state.append_time_ns))
        if not header.count:
            if not header.is_dropped and header.continues_sequence not in state.open_records.values():
                return None  # the record's beginning is missing
            # Otherwise a segment of pieces alone could get the next segment's name.
            header = header._replace(base_sequence=max(state.next_sequence, self.segment.base_sequence))
        return part._replace(header=header)

    def _temporary_path(self, base: int, kind: Kind) -> Path:
        path = self.root.segment(base, kind)
        return path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")

    def _finish_segment(self, raw: Path, base: int) -> NewSegment:
        if self.segment.kind.form is Kind.RAW:
            return NewSegment(base, raw, None)
        path = self._temporary_path(base, Kind.SEALED)
        target = self.disk.create(path)
        try:
            with open_file(raw) as file:
                compressed = compress_segment(file.fileno(), target, self.disk)
            self.disk.sync(target)
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)  # the check must read the disk, not the cache
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            self.disk.close(target)
            raw.unlink(missing_ok=True)
        return NewSegment(base, path, compressed.index)

    def _first_error(self, new: NewSegment) -> str:
        sha256 = None if new.index is None else new.index.sha256.hex()
        segment = Segment(new.base_sequence, self.segment.kind.form, new.path)
        return next(iter(check(SegmentToCheck(segment, self.log_id, sha256=sha256)).errors), "")


def _control_batch(state: LogState, epoch: int) -> IntactBatch:
    payload = encode_state(state)
    header = control_header(payload, state.next_sequence, state.append_time_ns, epoch)
    return IntactBatch(header, "", FIRST_BATCH, memoryview(payload))


class _SegmentWriter:
    def __init__(self, disk: Disk, path: Path, header: SegmentHeader) -> None:
        self.base_sequence = header.base_sequence
        self.path = path
        self._disk = disk
        self._salt = header.salt
        self._numbers = {FIFO_PEER: FIFO_PEER, STDIN_PEER: STDIN_PEER}  # old → new peer number
        self._descriptor = disk.create(self.path)
        self.position = disk.write(self._descriptor, [encode_segment_header(header)], 0)
        self._is_finished = False

    def add(self, batch: IntactBatch) -> None:
        prefix = route_prefix(batch.route.encode())
        buffers = encode_batch(batch.header, prefix, [batch.payload], seed(self._salt, self.position))
        self.position += self._disk.write(self._descriptor, buffers, self.position)

    def add_with_peer(self, peers: dict[int, IntactBatch], batch: IntactBatch) -> None:
        """Add a batch, preceded by the introduction of its peer if needed."""
        header, number = batch.header, batch.header.peer
        if number in peers and number not in self._numbers:
            self._numbers[number] = peer_number(self.position)
            introduction = peers[number].header._replace(
                peer=self._numbers[number], base_sequence=header.base_sequence, append_time_ns=header.append_time_ns
            )
            self.add(peers[number]._replace(header=introduction))
        self.add(batch._replace(header=header._replace(peer=self._numbers.get(number, UNKNOWN_PEER))))

    def finish(self) -> Path:
        self._disk.sync(self._descriptor)
        self._is_finished = True
        return self.path

    def close(self) -> None:
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1
            if not self._is_finished:
                self.path.unlink(missing_ok=True)


def _discard(segments: list[NewSegment]) -> None:
    for each in segments:
        each.path.unlink(missing_ok=True)

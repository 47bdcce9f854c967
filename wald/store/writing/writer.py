"""The active segment: the only place that appends to the log and the only one that cuts it.

    placed = writer.place(drafts, now_ns=…)   where each batch will stand; nothing has happened yet
    writer.commit(placed)                     one gather-write, one fdatasync; then it is durable
    writer.cut(now_ns=…)                      the segment is complete; the next one is active

Memory changes only after the disk agreed. After an OSError from a write or a sync the descriptor is finished
(:attr:`Writer.failed`): nothing is written to it or synced again. :meth:`Writer.replace` leaves the file at its durable
length and opens the next one, where the same drafts are placed again.

A batch lies in one segment, and a segment is cut only after it has given out a sequence, so every segment has a name of
its own; a record larger than a segment makes its segment grow.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wald.format.batch import (
    OUTSIDE_BYTES,
    BatchHeader,
    Buffer,
    Encoding,
    Fields,
    Flag,
    checksum_body,
    encode,
    padded,
    route_prefix,
    seed,
)
from wald.format.names import Kind
from wald.format.segment import SegmentHeader, encode_header
from wald.format.state import LogState, encode_state, fingerprint
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.inodes import Name
from wald.store.segments.indexes import SparseIndexWriter
from wald.store.segments.raw import FIRST_BATCH, RawFile
from wald.store.writing.blanks import Blanks
from wald.store.writing.room import Room

_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Route:
    """A route as the writer needs it: its name, and the bytes that open the body of each of its batches."""

    name: str
    prefix: bytes
    name_bytes: int

    @classmethod
    def named(cls, name: str) -> Route:
        return cls(name, route_prefix(name.encode("ascii")), len(name))


@dataclass(slots=True)
class Draft:
    """One batch before it has a place in the log.

    Attributes:
        payload: the buffers; empty where ``spool`` holds the payload.
        count: records that begin in it.
        continues: sequence of the record that the payload starts in the middle of; 0 if it does not.
        body_checksum: once it is known; with ``spool`` it has to be.
        spool: descriptor of the file that holds a payload too large for memory.
        source: whoever it is from and wants to know what becomes of it.
    """

    route: Route
    payload: list[Buffer]
    payload_bytes: int
    count: int
    encoding: int = Encoding.LINES
    flags: int = 0
    continues: int = 0
    producer_id: int = 0
    producer_sequence: int = 0
    body_checksum: int | None = None
    spool: int | None = None
    source: object = None

    def checksum(self) -> int:
        """Of the body; computed once."""
        if self.body_checksum is None:
            self.body_checksum = checksum_body(self.route.prefix, self.payload, self.payload_bytes)
        return self.body_checksum

    @property
    def fingerprint(self) -> int:
        """By which a producer's batch is told from another; see :func:`wald.format.state.fingerprint`."""
        return fingerprint(
            body_checksum=self.checksum(),
            payload_bytes=self.payload_bytes,
            encoding=self.encoding,
            route_bytes=self.route.name_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """What it takes in the segment."""
        return OUTSIDE_BYTES + len(self.route.prefix) + padded(self.payload_bytes)


class Placed(NamedTuple):
    """A draft with its place: ``position`` in the segment, and the sequence of the first record that begins in it."""

    draft: Draft
    position: int
    base_sequence: int

    @property
    def last_sequence(self) -> int:
        return self.base_sequence + self.draft.count - 1

    def header(self, append_time_ns: int, epoch: int, flags: int) -> Fields:
        """The header it is written with; ``flags`` are added to the draft's."""
        draft, _, base_sequence = self
        return (
            draft.checksum(),
            draft.payload_bytes,
            base_sequence,
            append_time_ns,
            draft.producer_id,
            draft.continues or draft.producer_sequence,
            draft.count,
            epoch,
            draft.encoding,
            int(draft.flags) | flags,  # flags are slow to combine
            draft.route.name_bytes,
        )


class Placement(NamedTuple):
    """What one commit will write."""

    segment: int
    position: int
    end: int
    append_time_ns: int
    batches: tuple[Placed, ...]


class Writer:
    """The one appender of a log.

    Attributes:
        path: of the active segment.
        failed: whether a write or sync of the active segment failed; only :meth:`replace` helps then.
        unsynced: whether there are commits that were not synced.

    Args:
        state: what recovery found; the writer owns it from now on.
        carry: a raw file without a sequence of its own, and how many of its bytes are good: the first segment takes
            them over, at the same positions, and replaces it.
        room: what of the disk may be allocated ahead; None: as much as there is.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        state: LogState,
        *,
        log_id: bytes,
        epoch: int,
        segment_max_bytes: int,
        now_ns: int,
        carry: tuple[Path, int] | None = None,
        sync_commits: bool = True,
        room: Room | None = None,
    ) -> None:
        self.root = root
        self.state = state
        self.epoch = epoch
        self.segment_max_bytes = segment_max_bytes
        self._first_position = 0
        self.sync_commits = sync_commits
        self.unsynced = False
        self.failed = False
        self._disk = disk
        self._log_id = log_id
        self._blanks = Blanks(root.segments, disk, epoch=epoch, room=room)
        self._index: SparseIndexWriter | None = None
        self._descriptor = -1
        self._salt = 0
        self.base_sequence = 0
        self.path = root.segments
        self.position = 0
        self._open_next(now_ns, carry)

    @property
    def advanced(self) -> bool:
        """Whether the active segment has given out a sequence: only then may it be cut."""
        return self.state.next_sequence > self.base_sequence

    @property
    def full_at(self) -> int:
        """The position that batches are not to pass: twice the control batch if a full one leaves less than half."""
        return max(self.segment_max_bytes, 2 * self._first_position)

    def overshoots(self, total_bytes: int) -> bool:
        """Whether the segment has to be cut before ``total_bytes`` more are written."""
        return self.position + total_bytes > self.full_at and self.advanced

    def place(self, drafts: Sequence[Draft], *, now_ns: int) -> Placement:
        """Where ``drafts`` will stand, in their order."""
        position, sequence = self.position, self.state.next_sequence
        batches = []
        for draft in drafts:
            batches.append(Placed(draft, position, sequence))
            position += draft.total_bytes
            sequence += draft.count
        time_ns = max(now_ns, self.state.append_time_ns)
        return Placement(self.base_sequence, self.position, position, time_ns, tuple(batches))

    def commit(self, placement: Placement) -> None:
        """Write the batches and return when they are on disk.

        Raises:
            OSError: they are not; nothing but :attr:`failed` has changed in memory.
        """
        assert not self.failed, "the descriptor is finished"
        try:
            headers = self._write(placement)
            if self.sync_commits:
                self._disk.sync(self._descriptor)
        except OSError:
            self.failed = True
            raise
        self.unsynced = not self.sync_commits
        self.position = placement.end
        self._remember(placement, headers)

    def _write(self, placement: Placement) -> list[Fields]:
        """Write the batches; returns their headers."""
        headers: list[Fields] = []
        pending: list[Buffer] = []
        start, time_ns, epoch, salt = placement.position, placement.append_time_ns, self.epoch & _U32, self._salt
        flags = 0 if self.unsynced else int(Flag.BARRIER)
        for placed in placement.batches:
            draft, position, _ = placed
            header = placed.header(time_ns, epoch, flags)
            flags = 0
            headers.append(header)
            buffers = encode(header, draft.route.prefix, draft.payload, seed(salt, position))
            if draft.spool is None:
                pending += buffers
                continue
            # The body is copied inside the kernel, between its header and its padding.
            pending.append(buffers[0])
            body = position + len(buffers[0])
            self._disk.write(self._descriptor, pending, start)
            self._disk.copy(self._descriptor, draft.spool, draft.payload_bytes, body)
            pending, start = buffers[1:], body + draft.payload_bytes
        self._disk.write(self._descriptor, pending, start)
        return headers

    def sync(self) -> None:
        """Make durable what commits left unsynced.

        Raises:
            OSError: it is not, and no later sync could tell.
        """
        self.unsynced = False
        try:
            self._disk.sync(self._descriptor)
        except OSError:
            self.failed = True
            raise

    def cut(self, *, now_ns: int) -> None:
        """Complete the active segment and open the next one.

        Raises:
            OSError: there is no next segment (a full disk); unless :attr:`failed`, the active one goes on.
        """
        assert self.advanced, "a segment without a sequence has no successor's name"
        if self.unsynced:
            self.sync()
        self._open_next(now_ns, None)

    def replace(self, *, now_ns: int) -> None:
        """After a failure: leave the file at its durable length and go on in a new one.

        Raises:
            OSError: that fails too; the log is as it was before, and this can be tried again.
        """
        # Through a descriptor of its own, and durable before there is a next segment: what was written and is in doubt
        # would have the sequences of that one.
        descriptor = self._disk.open(self.path)
        try:
            self._disk.truncate(descriptor, self.position)
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._open_next(now_ns, None if self.advanced else (self.path, self.position))

    def is_named(self) -> bool:
        """Whether the active segment is what stands at :attr:`path`."""
        return self._name.holds()

    def name_again(self) -> Path | None:
        """Go on in a copy of the active segment, at its path; returns the place in ``quarantine/`` of what stood there.

        Raises:
            OSError: there is no copy; or there is, and its name was not synced: then it has :attr:`failed`.
        """
        blank = self._blanks.take(self.segment_max_bytes)
        descriptor = blank.descriptor
        try:
            # Linux gives no name to a file that has lost its last one.
            self._disk.copy(descriptor, self._descriptor, self.position, 0)
            self._disk.sync(descriptor)
            found = self._quarantine()
            self._blanks.name(blank, self.path)
        except OSError:
            self._blanks.discard(blank)
            raise
        self._disk.close(self._descriptor)
        self._descriptor, self._name = descriptor, Name(self.path, descriptor)
        self._sync_names()
        return found

    def prepare_spare(self) -> bool:
        """Allocate the file that the next cut will need, from the background thread; False if there is no room."""
        return self._blanks.prepare(self.segment_max_bytes)

    def abandon(self) -> None:
        """Touch the active segment no more: it is another daemon's by now, or what is written to it is lost."""
        self.failed = True

    def close(self) -> None:
        """Leave the active segment at its true length; the next start cuts it."""
        self._complete()
        self._disk.close(self._descriptor)
        if self._index is not None:
            self._index.close()
        self._blanks.close()

    def _remember(self, placement: Placement, headers: list[Fields]) -> None:
        apply, time_ns, index = self.state.apply, placement.append_time_ns, self._index
        for (draft, position, base_sequence), header in zip(placement.batches, headers, strict=True):
            apply(header, draft.route.name)
            if index is not None:
                index.add(base_sequence, position, time_ns)

    def _complete(self) -> None:
        """Leave the active segment at its true length."""
        if self.failed:
            return
        try:
            self._disk.truncate(self._descriptor, self.position)
            self._disk.sync(self._descriptor)
        except OSError:
            self.failed = True  # what it holds is durable already, and zeros behind that are harmless

    def _open_next(self, now_ns: int, carry: tuple[Path, int] | None) -> None:
        """Make the next segment complete under a temporary name, then name it: a crash leaves it whole or not there."""
        state = self.state
        # Stored with the state: a clock that was set back must not make what follows older than the control batch.
        state.append_time_ns = max(now_ns, state.append_time_ns)
        # A carried batch is one only under its own salt.
        salt = secrets.randbits(32) if carry is None else _salt_of(carry[0])
        header = SegmentHeader(self._log_id, state.next_sequence, self.epoch, now_ns, salt)
        blank = self._blanks.take(self.segment_max_bytes)
        descriptor = blank.descriptor
        try:
            if carry is None:
                end = self._disk.write(descriptor, [encode_header(header), *self._control(salt)], 0)
            else:
                # The old file's control batch and pieces stay where they were, so a reader's offsets stay right.
                end = self._copy(descriptor, *carry)
                self._disk.write(descriptor, [encode_header(header)], 0)
            self._disk.sync(descriptor)
            if self._descriptor >= 0:
                self._complete()
            self._blanks.name(blank, self.root.segment(state.next_sequence, Kind.RAW))
        except OSError:
            self._blanks.discard(blank)
            raise
        # From here on the new segment is there: what went to the old one now would be given out twice.
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
        if self._index is not None:
            self._index.close()
        self._descriptor = descriptor
        self._salt = salt
        self.base_sequence = state.next_sequence
        self.path = self.root.segment(self.base_sequence, Kind.RAW)
        self._name = Name(self.path, descriptor)
        self.position = end
        self._first_position = end
        self._index = SparseIndexWriter(self.root.segment(self.base_sequence, Kind.INDEX), header)
        self.unsynced = False
        self._sync_names()

    def _sync_names(self) -> None:
        # Nothing is acknowledged under a name that is perhaps not on disk.
        self.failed = True
        self._disk.sync_directory(self.root.segments)
        self.failed = False

    def _quarantine(self) -> Path | None:
        """Give what stands at :attr:`path` a name in ``quarantine/``, so that it may be replaced; None: nothing."""
        if not os.path.lexists(self.path):
            return None
        target = self.root.quarantine / f"{self.path.name}-{secrets.token_hex(8)}"
        try:
            self._disk.link(self.path, target)  # not a rename: a kill would leave the segment without any file
        except OSError:  # a directory, a file system without links, another user's file
            self._disk.rename(self.path, target)
        self._disk.sync_directory(self.root.quarantine)
        return target

    def _copy(self, descriptor: int, path: Path, length: int) -> int:
        source = self._disk.open(path)
        try:
            self._disk.copy(descriptor, source, length, 0)
        finally:
            self._disk.close(source)
        return length

    def _control(self, salt: int) -> list[Buffer]:
        payload = encode_state(self.state)
        header = BatchHeader(
            body_checksum=checksum_body(b"", [payload], len(payload)),
            payload_bytes=len(payload),
            base_sequence=self.state.next_sequence,
            append_time_ns=self.state.append_time_ns,
            producer_id=0,
            producer_sequence=0,
            count=0,
            epoch=self.epoch & _U32,
            encoding=Encoding.CONTROL,
            flags=Flag.CONTROL,
            route_bytes=0,
        )
        return encode(header, b"", [payload], seed(salt, FIRST_BATCH))


def _salt_of(path: Path) -> int:
    with path.open("rb") as file:
        return RawFile(file.fileno()).salt

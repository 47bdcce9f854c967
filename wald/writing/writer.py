"""Append-only writer of the active segment.

    placed = writer.place(drafts)        assign positions and sequences
    writer.commit(placed, now_ns=…)      one gather-write and one fdatasync
    writer.cut(now_ns=…)                 complete the segment, open the next

After an OSError, the descriptor is never written or synced again: :meth:`Writer.replace` truncates the file to its
durable length and opens the next segment. A segment is named by its first sequence, so it can be cut only after
assigning one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeGuard

from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.files.safe_open import FileIdentity
from wald.format.batch import (
    FRAMING_BYTES,
    BatchHeader,
    Buffer,
    Encoding,
    Flag,
    checksum_body,
    control_header,
    encode_batch,
    padded,
    route_prefix,
    seed,
)
from wald.format.log_state import (
    FIFO_PEER,
    PEER_POSITION_MAX,
    STDIN_PEER,
    UNKNOWN_PEER,
    LogState,
    Peer,
    PreviousEnd,
    encode_peer,
    encode_state,
    fingerprint,
    peer_number,
)
from wald.format.names import Kind
from wald.format.segment import SegmentHeader, encode_segment_header
from wald.segments.index_builder import SparseIndexWriter, find_index
from wald.segments.raw_scan import FIRST_BATCH, RawFile
from wald.writing.disk_budget import DiskBudget


@dataclass(frozen=True, slots=True)
class Route:
    """Route name with the prefix of its batch bodies."""

    name: str
    prefix: bytes
    name_bytes: int

    @classmethod
    def named(cls, name: str) -> Route:
        return cls(name, route_prefix(name.encode("ascii")), len(name))


_NO_ROUTE = Route.named("")

Sender = Peer | int
"""A process on the socket, or the number of a peer that is not introduced."""


@dataclass(slots=True)
class Draft:
    """Batch to be written; :meth:`Writer.place` sets the last three fields."""

    route: Route
    payload: list[Buffer]
    payload_bytes: int
    count: int  # records that begin in it
    encoding: int = Encoding.LINES
    flags: int = 0
    continues: int = 0  # sequence of the record that this batch continues
    producer_id: int = 0
    producer_sequence: int = 0
    body_checksum: int | None = None  # computed on first use; required with ``spool``
    spool: int | None = None  # descriptor of a payload too large for memory
    source: object = None  # pipe or connection
    peer: Sender = UNKNOWN_PEER
    introduces: bool = False  # control batch that numbers ``peer``
    position: int = 0
    base_sequence: int = 0
    peer_number: int = UNKNOWN_PEER

    def checksum(self) -> int:
        if self.body_checksum is None:
            self.body_checksum = checksum_body(self.route.prefix, self.payload, self.payload_bytes)
        return self.body_checksum

    @property
    def fingerprint(self) -> int:
        return fingerprint(self.checksum(), self.payload_bytes, self.encoding, self.route.name_bytes)

    @property
    def total_bytes(self) -> int:
        return FRAMING_BYTES + len(self.route.prefix) + padded(self.payload_bytes)

    @property
    def last_sequence(self) -> int:
        return self.base_sequence + self.count - 1

    def header(self, append_time_ns: int, epoch: int, flags: int) -> BatchHeader:
        checksum = self.body_checksum
        if checksum is None:  # faster than self.checksum()
            checksum = checksum_body(self.route.prefix, self.payload, self.payload_bytes)
        return BatchHeader._make(
            (
                checksum,
                self.payload_bytes,
                self.base_sequence,
                append_time_ns,
                self.producer_id,
                self.continues or self.producer_sequence,
                self.count,
                epoch,
                self.encoding,
                int(self.flags) | flags,  # flags are slow to combine
                self.route.name_bytes,
                self.peer_number,
            )
        )


def introduction(peer: Peer) -> Draft:
    payload = encode_peer(peer)
    return Draft(_NO_ROUTE, [payload], len(payload), 0, Encoding.CONTROL, Flag.CONTROL, peer=peer, introduces=True)


class Blank(NamedTuple):
    """Empty file under a temporary name."""

    path: Path
    descriptor: int


class Preallocator:
    """Factory for new segment files in ``directory``; keeps one spare ready."""

    def __init__(self, directory: Path, disk: Disk, *, epoch: int, disk_budget: DiskBudget | None) -> None:
        self._directory = directory
        self._disk = disk
        self._epoch = epoch
        self._disk_budget = disk_budget
        self._identity: FileIdentity | None = None
        self._spare: Blank | None = None
        self._mutex = threading.Lock()

    def require_directory(self) -> None:
        """Raise ESTALE if the directory was unmounted or replaced."""
        if self._identity is not None and not self._identity.is_current():
            raise OSError(errno.ESTALE, "the directory was unmounted or replaced", os.fspath(self._directory))

    def prepare(self, length: int) -> bool:
        """Create a missing spare file, in the background thread; return False without room."""
        with self._mutex:
            if self._spare is None and self._can_allocate(length):
                with contextlib.suppress(OSError):  # the cut will report the full disk
                    self._spare = self._create("spare", length)
                self._set_spare_bytes(os.fstat(self._spare.descriptor).st_blocks * 512 if self._spare else 0)
            return self._spare is not None

    def take(self, length: int) -> Blank:
        """Return the spare file or a new one; the caller names or discards it."""
        with self._mutex:
            spare, self._spare = self._spare, None
            self._set_spare_bytes(0)
        if spare is not None and not FileIdentity(*spare).is_current():
            self._disk.close(spare.descriptor)
            spare = None
        return spare or self._create("next", length)

    def name(self, blank: Blank, target: Path) -> None:
        """Rename the file to ``target``; the caller syncs the directory."""
        if not FileIdentity(*blank).is_current():
            raise OSError(errno.ENOENT, "another program removed or replaced the file", os.fspath(blank.path))
        self._disk.rename(blank.path, target)

    def discard(self, blank: Blank) -> None:
        self._disk.close(blank.descriptor)
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.unlink(blank.path)

    def close(self) -> None:
        with self._mutex:
            if self._spare is not None:
                self.discard(self._spare)
                self._spare = None
                self._set_spare_bytes(0)

    def _can_allocate(self, length: int) -> bool:
        return self._disk_budget is None or self._disk_budget.can_allocate(length)

    def _set_spare_bytes(self, spare_bytes: int) -> None:
        if self._disk_budget is not None:
            self._disk_budget.spare_bytes = spare_bytes

    def _create(self, purpose: str, length: int) -> Blank:
        self.require_directory()
        # The name is unique: another thread or a superseded daemon may also create one.
        path = self._directory / f"{purpose}-{self._epoch}-{secrets.token_hex(8)}{TEMPORARY}"
        blank = Blank(path, self._disk.create(path))
        try:
            if self._identity is None:  # not earlier: on overlayfs, the first file replaces the directory (copy-up)
                descriptor = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    self._identity = FileIdentity(self._directory, descriptor)
                finally:
                    os.close(descriptor)
            if self._can_allocate(length):  # otherwise the file grows as it is written
                self._disk.allocate(blank.descriptor, length)
        except OSError:
            self.discard(blank)
            raise
        return blank


_U32 = 0xFFFFFFFF
_PEERS_MAX = 4096
_NUMBERED_BYTES = PEER_POSITION_MAX >> 1  # leaves room for any commit round
_NO_PEERS: dict[Sender, int] = {number: number for number in (UNKNOWN_PEER, FIFO_PEER, STDIN_PEER)}


class Writer:
    """The only appender of a log. It changes ``state``.

    ``carry`` is the path and good length of a raw file that uses no sequence. The first segment replaces it and begins
    with a copy.
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
        disk_budget: DiskBudget | None = None,
        version: int = 0,  # see :func:`wald.format.segment.pack_version`
    ) -> None:
        self.root = root
        self.state = state
        self.epoch = epoch
        self.segment_max_bytes = segment_max_bytes
        self._first_position = 0
        self._control_end = 0  # 0 if the segment began as a copy of another
        self._truncated = False  # by another program
        self.sync_commits = sync_commits
        self.unsynced = False
        self.sync_seconds = 0.0
        self.failed = False  # by a write or sync, until :meth:`replace`
        self._disk = disk
        self._log_id = log_id
        self._version = version
        self._preallocator = Preallocator(root.segments, disk, epoch=epoch, disk_budget=disk_budget)
        self._index: SparseIndexWriter | None = None
        self._descriptor = -1
        self._salt = 0
        self._peers = _NO_PEERS  # of the active segment
        self.base_sequence = 0
        self.path = root.segments
        self.position = 0
        self._open_next(now_ns, carry)

    @property
    def has_advanced(self) -> bool:
        """True if the active segment has assigned a sequence and may be cut."""
        return self.state.next_sequence > self.base_sequence

    @property
    def full_at(self) -> int:
        """Position at which the segment is full; a large control batch leaves at least half of it for records."""
        return max(self.segment_max_bytes, 2 * self._first_position)

    def overshoots(self, total_bytes: int) -> bool:
        """Return True if the segment must be cut before that many bytes."""
        return self.position + total_bytes > self.full_at and self.has_advanced

    def place(self, drafts: Sequence[Draft], *, limited: bool = False) -> list[Draft]:
        """Assign positions and sequences; introduce each new peer before its first draft. Writes nothing.

        If ``limited``, stop before a draft that would overfill the segment, unless it is the first.
        """
        position, sequence = self.position, self.state.next_sequence
        full_at = self.full_at if limited else sys.maxsize
        peers, introduced = self._peers, dict[Sender, int]()
        placed: list[Draft] = []
        for draft in drafts:
            peer, start = draft.peer, len(placed)
            number = peers.get(peer)
            if number is None and (number := introduced.get(peer)) is None:
                number = UNKNOWN_PEER
                if self._is_new(peer):
                    first = introduction(peer)
                    first.position, first.base_sequence = position, sequence
                    first.peer_number = number = introduced[peer] = peer_number(position)
                    placed.append(first)
                    position += first.total_bytes
            draft.position, draft.base_sequence, draft.peer_number = position, sequence, number
            position += draft.total_bytes
            if position > full_at and start:
                del placed[start:]
                break
            placed.append(draft)
            sequence += draft.count
        return placed

    def needed_bytes(self, draft: Draft) -> int:
        """Return the size of ``draft`` in the log, including the introduction of a new peer."""
        if draft.peer not in self._peers and self._is_new(draft.peer):
            return introduction(draft.peer).total_bytes + draft.total_bytes
        return draft.total_bytes

    def _is_new(self, peer: Sender) -> TypeGuard[Peer]:
        return isinstance(peer, Peer) and self.position < _NUMBERED_BYTES

    def commit(self, placed: Sequence[Draft], *, now_ns: int) -> None:
        """Write placed drafts and sync. After an OSError, only :attr:`failed` has changed in memory."""
        assert not self.failed, "the descriptor must not be used again"
        time_ns = max(now_ns, self.state.append_time_ns)
        try:
            headers = self._write(placed, time_ns)
            if self.sync_commits:
                self._sync()
        except OSError:
            self.failed = True
            raise
        self.unsynced = not self.sync_commits
        self.position = placed[-1].position + placed[-1].total_bytes
        self._apply(placed, headers, time_ns)

    def _write(self, placed: Sequence[Draft], time_ns: int) -> list[BatchHeader]:
        headers: list[BatchHeader] = []
        pending: list[Buffer] = []
        start, epoch, salt = placed[0].position, self.epoch & _U32, self._salt
        flags = 0 if self.unsynced else int(Flag.BARRIER)
        for draft in placed:
            position = draft.position
            header = draft.header(time_ns, epoch, flags)
            flags = 0
            headers.append(header)
            buffers = encode_batch(header, draft.route.prefix, draft.payload, seed(salt, position))
            if draft.spool is None:
                pending += buffers
                continue
            # The kernel copies the payload between the header and the padding.
            pending.append(buffers[0])
            body = position + len(buffers[0])
            self._disk.write(self._descriptor, pending, start)
            self._disk.copy(self._descriptor, draft.spool, draft.payload_bytes, body)
            pending, start = buffers[1:], body + draft.payload_bytes
        self._disk.write(self._descriptor, pending, start)
        return headers

    def _apply(self, placed: Sequence[Draft], headers: list[BatchHeader], time_ns: int) -> None:
        apply, index = self.state.apply, self._index
        if len(self._peers) > _PEERS_MAX and any(draft.introduces for draft in placed):
            self._peers = dict(_NO_PEERS)  # active senders are introduced again
        for draft, header in zip(placed, headers, strict=True):
            if draft.introduces:
                self._peers[draft.peer] = draft.peer_number
                continue
            apply(header, draft.route.name)
            if index is not None:
                index.add(draft.base_sequence, draft.position, time_ns)

    def sync(self) -> None:
        """Sync unsynced commits. After an OSError, they may be lost; a later sync would not report this."""
        self.unsynced = False
        try:
            self._sync()
        except OSError:
            self.failed = True
            raise

    def _sync(self) -> None:
        started = time.monotonic()
        self._disk.sync(self._descriptor)
        self.sync_seconds = time.monotonic() - started

    def cut(self, *, now_ns: int) -> None:
        """Open the next segment. After an OSError, the active one is still writable unless :attr:`failed`."""
        assert self.has_advanced, "its successor would have the same name"
        if self.unsynced:
            self.sync()
        self._open_next(now_ns, None)

    def _open_next(self, now_ns: int, carry: tuple[Path, int] | None) -> None:
        """Write the next segment to a temporary file, sync and rename it: a crash leaves all or nothing."""
        state = self.state
        # Append times never decrease, even if the clock was set back.
        state.append_time_ns = max(now_ns, state.append_time_ns)
        # The checksums of carried batches depend on the salt of their segment.
        salt = secrets.randbits(32) if carry is None else self._salt_of(carry[0])
        header = SegmentHeader(self._log_id, state.next_sequence, self.epoch, now_ns, salt, writer=self._version)
        blank = self._preallocator.take(self.segment_max_bytes)
        old_previous = state.previous
        if self._descriptor >= 0 and self.has_advanced:  # otherwise the next segment replaces this one
            state.previous = None if self._truncated else PreviousEnd(self._salt, self.position)
        try:
            end = self._write_segment_start(blank.descriptor, header, carry)
            self._disk.sync(blank.descriptor)
            if self._descriptor >= 0:
                self._trim()
            self._preallocator.name(blank, self.root.segment(state.next_sequence, Kind.RAW))
        except OSError:
            state.previous = old_previous
            self._preallocator.discard(blank)
            raise
        # Switch even if the sync fails: the old segment would assign the same sequences again.
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
        if self._index is not None:
            self._index.close()
        self._descriptor, self._salt = blank.descriptor, salt
        self._peers = dict(_NO_PEERS)
        self.base_sequence = state.next_sequence
        self.path = self.root.segment(self.base_sequence, Kind.RAW)
        self._identity = FileIdentity(self.path, self._descriptor)
        self.position = self._first_position = end
        if carry is None:
            self._control_end = end
        self._index = SparseIndexWriter(self.root.segment(self.base_sequence, Kind.INDEX), header)
        self.unsynced = self._truncated = False
        self._sync_names()

    def _write_segment_start(self, descriptor: int, header: SegmentHeader, carry: tuple[Path, int] | None) -> int:
        """Write the header and a control batch, or copy the start of ``carry``; return the end position."""
        if carry is None:
            return self._disk.write(descriptor, [encode_segment_header(header), *self._control_batch(header.salt)], 0)
        # The control batch and the pieces keep their positions, which readers may hold.
        path, end = carry
        source = self._disk.open(path)
        try:
            self._disk.copy(descriptor, source, end, 0)
        finally:
            self._disk.close(source)
        self._disk.write(descriptor, [encode_segment_header(header)], 0)
        return end

    def _control_batch(self, salt: int) -> list[Buffer]:
        state, payload = self.state, encode_state(self.state)
        header = control_header(payload, state.next_sequence, state.append_time_ns, self.epoch)
        return encode_batch(header, b"", [payload], seed(salt, FIRST_BATCH))

    def _salt_of(self, path: Path) -> int:
        """Return the salt of the replaced segment, even if its header is lost."""
        index = partial(find_index, path.parent, self._log_id, self.state.next_sequence)
        with path.open("rb") as file:
            return RawFile(file.fileno(), index=index).salt

    def _trim(self) -> None:
        if self.failed:
            return
        try:
            self._disk.truncate(self._descriptor, self.position)
            self._disk.sync(self._descriptor)
        except OSError:
            self.failed = True  # its batches are durable, and readers ignore trailing zeros

    def _sync_names(self) -> None:
        # A batch must not be acknowledged while a crash could lose its segment's name.
        self.failed = True
        self._disk.sync_directory(self.root.segments)
        self.failed = False

    @property
    def may_step_clock(self) -> bool:
        """False while the active segment holds only pieces of a record, which the next segment would replace."""
        return self.has_advanced or (self.position == self._control_end and not self.state.open_records)

    def step_clock(self, *, now_ns: int) -> None:
        """Begin a segment whose append times restart at the earlier ``now_ns``. After an OSError, they do not."""
        assert self.may_step_clock, "the pieces of the open record would be lost"
        before_ns, self.state.append_time_ns = self.state.append_time_ns, now_ns
        try:
            if self.unsynced:
                self.sync()
            self._open_next(now_ns, None)
        except OSError:
            self.state.append_time_ns = before_ns
            raise

    def replace(self, *, now_ns: int) -> None:
        """After a failure, truncate the file to its durable length and open a new segment. May be retried."""
        if self.is_truncated():  # a copy of its pieces would have a hole
            self.leave_truncated(now_ns=now_ns)
            return
        # Truncate through a new descriptor, and sync before the next segment exists: that segment assigns again the
        # sequences of the failed batches, which may be on disk.
        descriptor = self._disk.open(self.path)
        try:
            self._disk.truncate(descriptor, self.position)
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._open_next(now_ns, None if self.has_advanced else (self.path, self.position))

    def is_named(self) -> bool:
        return self._identity.is_current()

    def is_truncated(self) -> bool:
        """Return True if another program truncated the active segment."""
        # Unlike lseek(2), stat(2) would slow each write.
        return self._truncated or os.lseek(self._descriptor, 0, os.SEEK_END) < self.position

    def leave_truncated(self, *, now_ns: int) -> None:
        """Continue in a new segment after another program truncated the active one. May be retried.

        The truncated file stays. If pieces may be lost, skip one sequence, so that readers do not join the rest.
        """
        if not self._truncated:
            self._truncated = True  # the file regains its length before the next one is named
            if self.state.open_records or not self.has_advanced:
                self.state.next_sequence += 1
        self._open_next(now_ns, None)

    def restore_name(self) -> Path | None:
        """Continue in a copy of the active segment after its file was removed or replaced.

        Move a replacement to quarantine and return its new path. After an OSError, :attr:`failed` means that the name
        is not synced.
        """
        self._preallocator.require_directory()  # another file system may have files of the same names
        blank = self._preallocator.take(self.segment_max_bytes)
        descriptor = blank.descriptor
        try:
            # Linux cannot link a file whose last name was removed.
            self._disk.copy(descriptor, self._descriptor, self.position, 0)
            self._disk.sync(descriptor)
            moved_file = None
            if os.path.lexists(self.path):
                target = self.root.quarantine / f"{self.path.name}-{secrets.token_hex(8)}"
                # move_aside links if it can: after a rename, a crash would leave no file at the path.
                moved_file = self._disk.move_aside(self.path, target)
                self._disk.sync_directory(moved_file.parent)
            self._preallocator.name(blank, self.path)
        except OSError:
            self._preallocator.discard(blank)
            raise
        self._disk.close(self._descriptor)
        self._descriptor, self._identity = descriptor, FileIdentity(self.path, descriptor)
        self._sync_names()
        return moved_file

    def prepare_spare(self) -> bool:
        return self._preallocator.prepare(self.segment_max_bytes)

    def abandon(self) -> None:
        """Stop writing: another daemon owns the active segment, or writes to it are lost."""
        self.failed = True

    def close(self) -> None:
        self._trim()
        self._disk.close(self._descriptor)
        if self._index is not None:
            self._index.close()
        self._preallocator.close()

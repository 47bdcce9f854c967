"""Reading of lines from pipes without losing or duplicating bytes in a crash.

``tee(2)`` copies a pipe into a scratch pipe, whole lines are committed, and one ``readv(2)`` consumes exactly those
bytes. So a kill loses nothing while another process holds the pipe open, and stores nothing twice: before the write, a
slot of the transfers file records the batch, and ``readv``, in the same uninterruptible step, changes the slot's mark,
which the next start checks. Only system calls touch the mark's mapped page: if the file was shortened, they get EFAULT,
but Python would get SIGBUS.

A line longer than a chunk becomes several batches that CONTINUE one record.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import stat
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from stringzilla import count as count_bytes

from wald.daemon.committer import Arena
from wald.errors import Damaged, InvalidInput
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import has_fifo
from wald.files.safe_open import InPlaceFile
from wald.format.batch import Flag, StoredBatch
from wald.format.log_state import FIFO_PEER, STDIN_PEER, UNKNOWN_PEER
from wald.format.transfers import MARK_OFFSET, SLOT_BYTES, Transfer, decode_transfer, encode_transfer
from wald.segments.view import read_view
from wald.settings import Config
from wald.writing.writer import Draft, Route

PAUSE_MAX_SECONDS = 1.0  # between checks of an unfinished line
_TRASH_BYTES = 16 << 10  # fits the first-level cache
_PIPE_SIZES = tuple(1 << shift for shift in range(20, 15, -1))  # 1 MiB is the usual limit for the unprivileged
_NEW_PIPE_MAX_BYTES = 64 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_tee = ctypes.CDLL(None, use_errno=True).tee
_tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_tee.restype = ctypes.c_ssize_t


class Transfers:
    """File that records each pipe's batch in a slot."""

    def __init__(self, path: Path, count: int, disk: Disk) -> None:
        self.count = count
        self._file = InPlaceFile(path, count * SLOT_BYTES, disk)
        self._map = self._map_file()

    def pending(self, slot: int) -> Transfer | None:
        """Return a slot's transfer unless its bytes were consumed."""
        recorded = decode_transfer(os.pread(self._file.descriptor, SLOT_BYTES, slot * SLOT_BYTES))
        return None if recorded is None or recorded[1] else recorded[0]

    def restore(self) -> None:
        if self._file.restore():
            self._map.close()
            self._map = self._map_file()

    def write(self, slot: int, transfer: Transfer) -> None:
        self._file.write(encode_transfer(transfer), slot * SLOT_BYTES)

    def mark(self, slot: int) -> memoryview:
        """Return the mark's byte, which the kernel writes; release it before :meth:`restore`."""
        start = slot * SLOT_BYTES + MARK_OFFSET
        return memoryview(self._map)[start : start + 1]

    def clear(self, slot: int) -> None:
        self._file.write(bytes(SLOT_BYTES), slot * SLOT_BYTES)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def _map_file(self) -> mmap.mmap:
        return mmap.mmap(self._file.descriptor, self.count * SLOT_BYTES)


class Scratch:
    """Pipe and buffer for copying and consuming bytes."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.capacity = _enlarge(self._writer)
        self._trash = memoryview(bytearray(_TRASH_BYTES))

    def peek(self, source: int, buffer: memoryview) -> int | None:
        """Copy bytes without consuming them; return the length, None for an empty pipe, or 0 at its end."""
        length: int = _tee(source, self._writer, len(buffer), os.SPLICE_F_NONBLOCK)
        if length < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR):
                return None
            raise OSError(code, os.strerror(code))
        copied_bytes = 0
        while copied_bytes < length:
            copied_bytes += os.readv(self._reader, [buffer[copied_bytes:length]])
        return length

    def consume(self, source: int, length: int, mark: memoryview) -> int:
        """Consume ``length`` bytes, the first into ``mark``. Return less only if another process reads the pipe."""
        whole, rest = divmod(length - 1, _TRASH_BYTES)
        # A shortened file has no mark, and the next start finds nothing to check.
        for first in (mark, self._trash[:1]):
            try:
                return os.readv(source, [first, *[self._trash] * whole, self._trash[:rest]])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
        return 0

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Relay:
    """Pipe in front of a stdin that is a file."""

    def __init__(self, source: int) -> None:
        self._source = source
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _enlarge(self._writer)
        self._is_open = True

    def refill(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._is_open:
                if os.splice(self._source, self._writer, 1 << 20, flags=os.SPLICE_F_NONBLOCK) == 0:
                    self.close()

    def close(self) -> None:
        if self._is_open:
            os.close(self._writer)
            self._is_open = False


@dataclass(frozen=True, slots=True)
class OpenPipe:
    """Open pipe that has no slot yet."""

    route: str
    descriptor: int
    was_held_open: bool  # another process kept it open while no daemon ran
    is_stored: bool = False  # systemd already stores the descriptor
    is_replaced: bool = False  # another FIFO is at the route's path
    is_stdin: bool = False
    relay: Relay | None = None

    @property
    def file(self) -> tuple[int, int]:
        return file_id(os.fstat(self.descriptor))


class Pipe:
    """Pipe that feeds one route."""

    def __init__(
        self,
        open_pipe: OpenPipe,
        scratch: Scratch,
        transfers: Transfers,
        slot: int,
        record_max_bytes: int,
        open_sequence: int,
    ) -> None:
        self.route = Route.named(open_pipe.route)
        self.peer = STDIN_PEER if open_pipe.is_stdin else FIFO_PEER
        self.descriptor = open_pipe.descriptor
        self.file = open_pipe.file
        self.slot = slot
        self.is_ready = True  # may hold unread bytes
        self.waits_for_line = False  # holds an unfinished line
        self.has_hung_up = False  # no process can write to it
        self.has_ended = False  # hung up, and empty
        self._scratch = scratch
        self._transfers = transfers
        self._record_max_bytes = record_max_bytes
        self._open_sequence = open_sequence
        self._open_bytes = 0
        self._seen_bytes = 0  # of the unfinished line
        self._seen_at = 0.0
        self._is_stalled = False
        self._drain_bytes = 0  # to read at a stop if another process keeps writing
        self._holds_both_ends = not open_pipe.is_stdin
        self._relay = open_pipe.relay
        # Producers fill one half while the other is written to disk.
        self.chunk_bytes = min(_enlarge(open_pipe.descriptor), scratch.capacity) // 2

    @property
    def is_inside_record(self) -> bool:
        """True inside a record, when no other source may write to the route."""
        return self._open_sequence != 0

    @property
    def has_input(self) -> bool:
        return self.is_ready and (self._relay is not None or readable_bytes(self.descriptor) > 0)

    @property
    def unfinished_bytes(self) -> int:
        return self._open_bytes + (readable_bytes(self.descriptor) if self.waits_for_line else 0)

    def collect(self, arena: Arena) -> Draft | None:
        """Copy bytes into ``arena``; return the draft to commit, if any."""
        self.waits_for_line = False
        if self._relay is not None:
            self._relay.refill()
        start = arena.used
        buffer = arena.view[start : start + self.chunk_bytes]
        length = self._scratch.peek(self.descriptor, buffer)
        if not length:
            self.is_ready = False
            if length is None:
                return None
            self.has_hung_up = True
            end_draft = self.close_record()
            self.is_ready, self.has_ended = end_draft is not None, end_draft is None
            return end_draft
        end = arena.buffer.rfind(b"\n", start, start + length) + 1
        size, flags = (end - start, Flag.NONE) if end else self._unfinished_line(length, is_chunk=length == len(buffer))
        if not size:
            return None
        self._is_stalled = False
        self._seen_bytes = 0
        self._drain_bytes -= size
        arena.used = start + size
        payload = arena.view[start : start + size]
        count = int(count_bytes(payload, b"\n"))
        if flags:
            count += 1  # no newline ends the last line
        if self._open_sequence:
            count -= 1
            flags |= Flag.CONTINUES
        continues = self._open_sequence
        return Draft(self.route, [payload], size, count, flags=flags, continues=continues, source=self, peer=self.peer)

    def check_line(self, now: float) -> None:
        """Become ready if the unfinished line has grown or may block writers."""
        if not self.waits_for_line:
            return
        length = readable_bytes(self.descriptor)
        if length != self._seen_bytes:
            self.is_ready = True
        elif (
            now - self._seen_at >= PAUSE_MAX_SECONDS
            and not self._holds_both_ends
            # splice(2) can fill a page of the pipe with a single byte
            and length >= fcntl.fcntl(self.descriptor, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES
        ):
            self.is_ready = self._is_stalled = True

    def before_write(self, draft: Draft, segment: int) -> None:
        if draft.payload:
            first = draft.payload[0][0]
            transfer = Transfer(self.route.name, self.file[1], draft.payload_bytes, segment, draft.position, first)
            self._transfers.write(self.slot, transfer)

    def after_sync(self, draft: Draft) -> str:
        """Consume the durable bytes; return a message if another process has read some."""
        consumed_bytes = 0
        if draft.payload:
            with self._transfers.mark(self.slot) as mark:
                consumed_bytes = self._scratch.consume(self.descriptor, draft.payload_bytes, mark)
        if draft.flags & Flag.CONTINUED:
            self._open_sequence = draft.last_sequence if draft.count else draft.continues
            self._open_bytes += draft.payload_bytes
        else:
            self._open_sequence = self._open_bytes = 0
        # The poller reports the next write to an empty pipe.
        if draft.payload and not (self.has_hung_up or self._relay) and not readable_bytes(self.descriptor):
            self.is_ready = False
        if consumed_bytes == draft.payload_bytes:
            return ""
        details = f"{draft.payload_bytes} bytes were committed, but only {consumed_bytes} were still in the pipe"
        return f"{self.route.name}: another process reads the pipe: {details}"

    def close_record(self) -> Draft | None:
        return end_of_record(self.route, self._open_sequence, self) if self._open_sequence else None

    def close(self) -> None:
        os.close(self.descriptor)
        if self._relay is not None:
            self._relay.close()

    def release_writing_end(self) -> None:
        """Hold only the reading end, which shows if another process can write."""
        if self._holds_both_ends:
            self._reopen(os.O_RDONLY)
        self.is_ready = True
        self._drain_bytes = 2 * self.chunk_bytes

    def hold_writing_end(self) -> None:
        self._reopen(os.O_RDWR)
        self.is_ready = True
        self.has_hung_up = self.has_ended = False

    def prepare_final_drain(self, *, is_replaced: bool) -> None:
        """Stay ready until the pipe is empty or, if it still has a writer, one pipe capacity has been read.

        The next start will not find a replaced pipe, so its unfinished line is read too.
        """
        self.has_hung_up = bool(_poll_events(self.descriptor, select.POLLIN) & select.POLLHUP)
        self._is_stalled = self._is_stalled or is_replaced
        self.is_ready = not self.has_ended and (self.has_hung_up or (self.is_ready and self._drain_bytes > 0))

    def _reopen(self, access: int) -> None:
        """Reopen the pipe under the same descriptor number, which no poller may watch."""
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", access | os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(descriptor, self.descriptor, inheritable=False)
        os.close(descriptor)
        self._holds_both_ends = access == os.O_RDWR

    def _unfinished_line(self, length: int, *, is_chunk: bool) -> tuple[int, Flag]:
        """Return how much of an unfinished line to commit (0 waits for more), and the flag."""
        if is_chunk or self.is_inside_record or self._is_stalled or self._is_full():
            # At the limit, the rest of the line becomes another record.
            is_continued = self._open_bytes + length < self._record_max_bytes
            return length, Flag.CONTINUED if is_continued else Flag.UNTERMINATED
        if self.has_hung_up:
            return length, Flag.UNTERMINATED
        self.is_ready, self.waits_for_line = False, True
        if length != self._seen_bytes:  # blocked writers wake the daemon too
            self._seen_bytes, self._seen_at = length, time.monotonic()
        return 0, Flag.NONE

    def _is_full(self) -> bool:
        """Return True if writers are blocked, which only a writing end shows."""
        return self._holds_both_ends and not _poll_events(self.descriptor, select.POLLOUT) & select.POLLOUT


def end_of_record(route: Route, sequence: int, source: Pipe | None = None) -> Draft:
    """Return an empty draft that ends record ``sequence``."""
    flags = Flag.CONTINUES | Flag.UNTERMINATED
    peer = source.peer if source is not None else UNKNOWN_PEER
    return Draft(route, [], 0, 0, flags=flags, continues=sequence, source=source, peer=peer)


def unfinished_transfers(root: Root, transfers: Transfers, *, log_id: bytes) -> dict[int, tuple[int, int, bytes]]:
    """Return unconsumed transfers by inode of the pipe: slot, length and stored payload.

    Call it before the first write: later, the log may lack recorded positions.
    """
    unconsumed = {}
    for slot in range(transfers.count):
        transfer = transfers.pending(slot)
        if transfer is not None and (payload := _stored_payload(root, transfer, log_id)) is not None:
            unconsumed[transfer.inode] = slot, transfer.payload_bytes, payload
    return unconsumed


def open_fifo(path: Path) -> tuple[int, bool]:
    """Open both ends of a FIFO, so that it never ends; return True if it may hold old bytes.

    It may if another process has it open, or if :func:`_was_enlarged` recognises an old pipe.
    """
    try:
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        writer = None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        if writer is not None:
            os.close(writer)
    return descriptor, _was_enlarged(descriptor) or writer is not None


def adopt_stdin(root: Root, config: Config, route: str) -> OpenPipe:
    """Return stdin as a pipe, without reading or writing."""
    if has_fifo(root, route) or (route in config.routes and config.routes[route].fifo):
        raise InvalidInput(
            f"{root.fifo(route)}: the route has a FIFO; stdin lines would be interleaved with its lines",
            case="stdin-beside-fifo",
            fifo=root.fifo(route),
        )
    if sys.stdin is not None:  # not closed before the start
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            return OpenPipe(route, os.dup(descriptor), _was_enlarged(descriptor), is_stdin=True)
        if stat.S_ISREG(mode):
            relay = Relay(descriptor)
            return OpenPipe(route, relay.reader, was_held_open=False, is_stdin=True, relay=relay)
    raise InvalidInput("stdin is neither a pipe nor a file", case="stdin-is-no-pipe", root=root.path, route=route)


def readable_bytes(descriptor: int) -> int:
    length = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, length)
    return length[0]


def file_id(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _stored_payload(root: Root, transfer: Transfer, log_id: bytes) -> bytes | None:
    with contextlib.suppress(Damaged):
        view = read_view(root, log_id).including_released()
        for segment in view.listing.between(transfer.segment, transfer.segment):
            with contextlib.closing(view.open(segment)) as reader:
                batch = next(reader.batches(transfer.position, None), None)
                recorded = transfer.position, transfer.route
                if isinstance(batch, StoredBatch) and (batch.position, batch.route) == recorded:
                    return bytes(batch.payload)
    return None


def _was_enlarged(descriptor: int) -> bool:
    """Enlarge a pipe; return True if its size shows that the previous run read it.

    A pipe keeps its size while open. One that the previous run could not enlarge counts as new: bytes that a kill left
    in both log and pipe are stored twice. One that this run cannot enlarge counts as old: a new line may continue an
    unfinished record.
    """
    initial_bytes = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    return not initial_bytes <= _NEW_PIPE_MAX_BYTES < _enlarge(descriptor)


def _enlarge(descriptor: int) -> int:
    current_bytes = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    for length in _PIPE_SIZES:
        if length <= current_bytes:
            break
        try:
            return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, length)
        except PermissionError:  # the user's share of pipe memory is used up
            continue
    return current_bytes


def _poll_events(descriptor: int, events: int) -> int:
    poller = select.poll()
    poller.register(descriptor, events)
    ready = poller.poll(0)
    return ready[0][1] if ready else 0

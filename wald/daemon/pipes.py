"""Reading of lines from pipes without losing bytes in a crash.

System calls on pipes: opening and enlarging them, and reading what they hold before it is consumed.

FIFOs and stdin: bytes are read while they stay in their pipe, made durable, and only then taken out of it.

``tee(2)`` copies what a pipe holds into a scratch pipe without consuming it; whole lines of that are committed; then
one ``readv(2)`` consumes exactly those bytes. So there is no partial-line buffer, nothing to save at a stop, and a kill
loses nothing as long as another process holds the pipe open. Nor does a kill store anything twice: before the write a
slot of the transfers file records which batch the bytes go to, and the ``readv`` puts their first byte into that slot
(a mapped page, so it outlives the process) in the same uninterruptible step in which they leave the pipe. The next
start compares.

A line longer than a chunk is taken in pieces: batches that CONTINUE one record.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import select
import stat
import termios
import time
from pathlib import Path
from typing import TextIO

from stringzilla import count as count_bytes

from wald.daemon.committer import Arena
from wald.daemon.transfers import Transfers
from wald.errors import InvalidInput
from wald.format.batch import Flag
from wald.format.log_state import FIFO_PEER, UNKNOWN_PEER
from wald.format.transfers import Transfer
from wald.writing.writer import Draft, Route

_TRASH_BYTES = 16 << 10  # consumed bytes go over and over into this, so it stays in the first-level cache
_SPLICE_NONBLOCK = 2
_PIPE_SIZES = tuple(1 << shift for shift in range(20, 15, -1))  # 1 MiB is the usual limit for the unprivileged
_NEW_PIPE_MAX_BYTES = 64 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_tee = _libc.tee
_tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_tee.restype = ctypes.c_ssize_t


def tee(source: int, target: int, length: int) -> int | None:
    """Copy up to ``length`` bytes that ``source`` holds into ``target``.

    Returns:
        how many; None: it holds nothing now; 0: it holds nothing, and no process has it open for writing.
    """
    copied: int = _tee(source, target, length, _SPLICE_NONBLOCK)
    if copied >= 0:
        return copied
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(code, os.strerror(code))


def enlarge(descriptor: int) -> int:
    """Make a pipe as large as the system allows; returns its size in bytes."""
    present = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    for length in _PIPE_SIZES:
        if length <= present:
            break
        try:
            return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, length)
        except PermissionError:  # this user's pipes have used up their share of memory
            continue
    return present


def was_enlarged(descriptor: int) -> bool:
    """Whether a pipe seems to be one that the last life of the daemon read; enlarges it.

    A pipe lives as long as a process holds it open, and keeps the size that it was given. A FIFO that no process held,
    and any other stdin, begins with the system's size. The size proves nothing where pipes could not be enlarged, then
    or now. A pipe that could not be enlarged then, and can be now, is taken for a new one: an unfinished record ends,
    and what a kill left both in the log and in the pipe is there twice. A pipe that cannot be enlarged now is taken for
    the old one: a new line may continue an unfinished record.
    """
    before = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    return not before <= _NEW_PIPE_MAX_BYTES < enlarge(descriptor)


def held_bytes(descriptor: int) -> int:
    """How many bytes a pipe holds."""
    length = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, length)
    return length[0]


def can_be_full(descriptor: int, held: int) -> bool:
    """Whether a pipe that holds so many bytes may be full: splice(2) fills a page with as little as a byte."""
    return held >= fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES


def poll_events(descriptor: int, events: int) -> int:
    """Which of ``events`` hold for a descriptor now, besides errors and hang-ups."""
    poller = select.poll()
    poller.register(descriptor, events)
    ready = poller.poll(0)
    return ready[0][1] if ready else 0


def file_of(status: os.stat_result) -> tuple[int, int]:
    """What identifies a file: its device and inode."""
    return status.st_dev, status.st_ino


class Scratch:
    """The pipe into which other pipes are copied to be read, and the buffer that consumed bytes go to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.capacity = enlarge(self._writer)
        self._trash = memoryview(bytearray(_TRASH_BYTES))

    def peek(self, source: int, into: memoryview) -> int | None:
        """Copy what ``source`` holds to ``into``, up to its length; returns what :func:`tee` does."""
        length = tee(source, self._writer, len(into))
        done = 0
        while length and done < length:
            done += os.readv(self._reader, [into[done:length]])
        return length

    def consume(self, source: int, length: int, mark: memoryview) -> int:
        """Take ``length`` bytes, all of which are there, out of ``source``; the first lands in ``mark``.

        Returns:
            how many were taken; fewer only if another process reads the pipe.
        """
        whole, rest = divmod(length - 1, _TRASH_BYTES)
        # If the transfers file was shortened, the mark is gone, and so is what it would be compared with.
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
    """A pipe of the daemon's own in front of a stdin that is a file, so that there is one way of reading."""

    def __init__(self, source: int) -> None:
        self._source = source
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        enlarge(self._writer)
        self._open = True

    def refill(self) -> None:
        """Fill the pipe up from the file; close its writing end at the file's end."""
        while self._open:
            try:
                if os.splice(self._source, self._writer, 1 << 20, flags=_SPLICE_NONBLOCK) == 0:
                    self.close()
            except BlockingIOError:
                return

    def close(self) -> None:
        if self._open:
            os.close(self._writer)
            self._open = False


def open_fifo(path: Path) -> tuple[int, bool]:
    """Open a FIFO for reading and writing, so that it does not end when a writer leaves.

    If the FIFO can be opened for writing only, another process has it open for reading. If not, there may be a producer
    that has been writing to the old pipe all along, or one that has just made a new pipe and waits for the daemon;
    :func:`was_enlarged` tells these apart.

    Returns:
        the descriptor, and whether another process held the pipe: its content and an unfinished line can have survived.
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
    return descriptor, was_enlarged(descriptor) or writer is not None


def open_stdin(stdin: TextIO | None, root: Path, route: str) -> tuple[int, bool, Relay | None]:
    """The pipe behind stdin, with a relay in front of it if stdin is a file.

    Returns:
        the descriptor, whether the pipe can have outlived the last life of the daemon, and the relay.

    Raises:
        InvalidInput: stdin is neither a pipe nor a file.
    """
    descriptor = -1 if stdin is None else stdin.fileno()  # None: it was closed
    mode = 0 if stdin is None else os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode):
        return os.dup(descriptor), was_enlarged(descriptor), None
    if stat.S_ISREG(mode):
        relay = Relay(descriptor)
        return relay.reader, False, relay
    raise InvalidInput("stdin is neither a pipe nor a file", case="stdin-is-no-pipe", root=root, route=route)


PAUSE_MAX_SECONDS = 1.0  # between checks of an unfinished line


class Pipe:
    """One pipe that feeds one route.

    Attributes:
        peer: what its batches say of who sent them.
        file: its device and inode.
        slot: the number of its slot in the transfers file.
        ready: whether it may hold something that was not read.
        waits: whether it holds an unfinished line that was read.
        hung_up: whether no process can write to it any more.
        ended: hung up, and everything is in the log.
    """

    def __init__(
        self,
        route: Route,
        descriptor: int,
        scratch: Scratch,
        transfers: Transfers,
        slot: int,
        *,
        record_max_bytes: int,
        open_sequence: int,
        holds_both_ends: bool = True,
        relay: Relay | None = None,
        peer: int = FIFO_PEER,
    ) -> None:
        self.route = route
        self.peer = peer
        self.descriptor = descriptor
        self.file = file_of(os.fstat(descriptor))
        self.slot = slot
        self.ready = True
        self.waits = False
        self.hung_up = False
        self.ended = False
        self._scratch = scratch
        self._transfers = transfers
        self._record_max_bytes = record_max_bytes
        self._open_sequence = open_sequence
        self._open_bytes = 0
        self._seen_bytes = 0
        self._seen_at = 0.0  # on the monotonic clock
        self._stalled = False
        self._left_bytes = 0  # at a stop: what is still taken if another process can go on writing
        self._holds_both_ends = holds_both_ends
        self._relay = relay
        # Half of what it holds: while one half is being written, producers fill the other.
        self.chunk_bytes = min(enlarge(descriptor), scratch.capacity) // 2

    @property
    def inside_record(self) -> bool:
        """Whether a record of this pipe has begun and not ended: nothing else may be written to its route."""
        return self._open_sequence != 0

    @property
    def has_input(self) -> bool:
        """Whether it holds something that was not read; a file behind stdin is assumed to."""
        return self.ready and (self._relay is not None or held_bytes(self.descriptor) > 0)

    @property
    def is_overlooked(self) -> bool:
        """Whether it holds something, and no unfinished line is what the daemon waits for."""
        return not (self.waits or self.ended) and held_bytes(self.descriptor) > 0

    @property
    def unfinished_bytes(self) -> int:
        """Of the line whose end has not come, in the log and in the pipe; 0 if there is none."""
        return self._open_bytes + (held_bytes(self.descriptor) if self.waits else 0)

    def collect(self, arena: Arena) -> Draft | None:
        """What can be committed now, still in the pipe; None if that is nothing, or the turn has no room left."""
        if arena.free < self.chunk_bytes:
            return None  # still ready: its turn is the next one
        self.waits = False
        if self._relay is not None:
            self._relay.refill()
        start = arena.used
        into = arena.view[start : start + self.chunk_bytes]
        length = self._scratch.peek(self.descriptor, into)
        if not length:
            self.ready = False
            return None if length is None else self._end()
        end = arena.buffer.rfind(b"\n", start, start + length) + 1
        taken, flags = (end - start, Flag.NONE) if end else self._unfinished_line(length, full=length == len(into))
        if not taken:
            return None
        self._stalled = False
        self._seen_bytes = 0
        self._left_bytes -= taken
        arena.used = start + taken
        return self._draft(arena.view[start : start + taken], flags)

    def check(self, now: float) -> None:
        """Be ready if more has come to an unfinished line, or if nothing has for long and writers may be blocked."""
        if not self.waits:
            return
        held = held_bytes(self.descriptor)
        if held != self._seen_bytes:
            self.ready = True
        elif (
            now - self._seen_at >= PAUSE_MAX_SECONDS
            and not self._holds_both_ends
            and can_be_full(self.descriptor, held)
        ):
            self.ready = self._stalled = True

    def before_write(self, draft: Draft, segment: int) -> None:
        """Record the place in the log for which the bytes that are still in the pipe are meant."""
        if draft.payload:
            first = draft.payload[0][0]
            transfer = Transfer(self.route.name, self.file[1], draft.payload_bytes, segment, draft.position, first)
            self._transfers.write(self.slot, transfer)

    def after_sync(self, draft: Draft) -> str:
        """Take the bytes, which are in the log, out of the pipe; returns what went wrong, "" if nothing did."""
        taken = self._consume(draft.payload_bytes) if draft.payload else 0
        if draft.flags & Flag.CONTINUED:
            self._open_sequence = draft.last_sequence if draft.count else draft.continues
            self._open_bytes += draft.payload_bytes
        else:
            self._open_sequence = self._open_bytes = 0
        if taken == draft.payload_bytes:
            return ""
        numbers = f"{draft.payload_bytes} bytes were read, {taken} of them were left"
        return f"{self.route.name}: another process reads the pipe: {numbers}"

    def finish_transfer(self, payload: bytes) -> str:
        """Finish the transfer of an earlier life that the slot records.

        Args:
            payload: what the log holds at the recorded place.

        Returns:
            What was done, as a message; "" if there was nothing to do.
        """
        transfer = self._transfers.pending(self.slot)
        if transfer is None:
            return ""
        count = transfer.taken_bytes
        if len(payload) != count:
            return f"{count} bytes were to be written, {len(payload)} are in the log: left in the pipe"
        front = bytearray(count)
        # The scratch pipe may have become smaller than it was, so this may see only the beginning.
        length = self._scratch.peek(self.descriptor, memoryview(front)) or 0
        if length == 0 or front[:length] != payload[:length] or held_bytes(self.descriptor) < count:
            return f"{count} bytes are in the log and the pipe was made anew: nothing to take"
        self._consume(count)
        return f"{count} bytes that are in the log were taken out of the pipe"

    def close_record(self) -> Draft | None:
        """End a record whose rest can never come."""
        return end_of_record(self.route, self._open_sequence, self) if self._open_sequence else None

    def close(self) -> None:
        os.close(self.descriptor)
        if self._relay is not None:
            self._relay.close()

    def release_writing_end(self) -> None:
        """At a stop: hold only the reading end, so that it shows whether another process can still write; be ready."""
        if self._holds_both_ends:
            reader = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(self.descriptor)
            self.descriptor = reader
            self._holds_both_ends = False
        self.ready = True
        self._left_bytes = 2 * self.chunk_bytes

    def hold_writing_end(self) -> int:
        """Hold both ends again, and be ready; returns the descriptor that it had, which is still open."""
        before = self.descriptor
        self.descriptor = os.open(f"/proc/self/fd/{before}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._holds_both_ends = self.ready = True
        self.hung_up = self.ended = False
        return before

    def check_last(self, *, displaced: bool) -> None:
        """At a stop, stay ready until the pipe is empty or, if a process can still write, one capacity of it was read.

        Args:
            displaced: the pipe is no longer at its path. No later start finds it, so unfinished lines are read too.
        """
        self.hung_up = bool(poll_events(self.descriptor, select.POLLIN) & select.POLLHUP)
        self._stalled = self._stalled or displaced
        if self.hung_up:
            self.ready = True
        if self.ended or (not self.hung_up and self._left_bytes <= 0):
            self.ready = False

    def _consume(self, length: int) -> int:
        with self._transfers.mark(self.slot) as mark:
            return self._scratch.consume(self.descriptor, length, mark)

    def _end(self) -> Draft | None:
        """It is empty and no process can write to it: what ends its record, if one is open."""
        self.hung_up = True
        closing = self.close_record()
        self.ready = closing is not None
        self.ended = closing is None
        return closing

    def _unfinished_line(self, length: int, *, full: bool) -> tuple[int, Flag]:
        """How much to take of a line whose end has not come, and as what; nothing while it may still come."""
        if full or self.inside_record or self._stalled or self._is_full():
            return length, self._piece(length)
        if self.hung_up:
            return length, Flag.UNTERMINATED
        self.ready, self.waits = False, True
        if length != self._seen_bytes:  # writers that find no room wake the daemon as well
            self._seen_bytes, self._seen_at = length, time.monotonic()
        return 0, Flag.NONE

    def _piece(self, length: int) -> Flag:
        """A piece of a long line; at the limit the record ends, and the line goes on as another."""
        return Flag.CONTINUED if self._open_bytes + length < self._record_max_bytes else Flag.UNTERMINATED

    def _is_full(self) -> bool:
        """Whether writers are blocked although no newline has come (only a descriptor open for writing can tell)."""
        return self._holds_both_ends and not poll_events(self.descriptor, select.POLLOUT) & select.POLLOUT

    def _draft(self, payload: memoryview, flags: Flag) -> Draft:
        begins = int(count_bytes(payload, b"\n")) if payload else 0
        if flags & (Flag.CONTINUED | Flag.UNTERMINATED):
            begins += 1
        if self._open_sequence:
            begins -= 1
            flags |= Flag.CONTINUES
        return Draft(
            self.route,
            [payload] if payload else [],
            len(payload),
            begins,
            flags=flags,
            continues=self._open_sequence,
            source=self,
            peer=self.peer,
        )


def end_of_record(route: Route, sequence: int, source: Pipe | None = None) -> Draft:
    """The draft that ends the record numbered ``sequence`` without a newline."""
    flags = Flag.CONTINUES | Flag.UNTERMINATED
    peer = source.peer if source is not None else UNKNOWN_PEER
    return Draft(route, [], 0, 0, flags=flags, continues=sequence, source=source, peer=peer)

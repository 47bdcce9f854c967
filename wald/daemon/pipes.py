"""FIFOs and stdin: bytes are looked at in their pipe, made durable, and only then taken out of it.

``tee(2)`` copies what a pipe holds into a scratch pipe without consuming it; whole lines of that are committed; then
one ``readv(2)`` consumes exactly those bytes. So there is no partial-line buffer, nothing to save at a stop, and a kill
loses nothing as long as somebody else holds the pipe. It does not double anything either: before the write a slot of
the transfers file says which batch the bytes go to, and the ``readv`` puts their first byte into that slot (a mapped
page, so it outlives the process) in the same uninterruptible step in which they leave the pipe. The next start reads
that slot.

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

from wald.daemon.transfers import Transfers
from wald.daemon.turn import Arena
from wald.errors import InvalidInput
from wald.format.batch import Flag
from wald.format.transfers import Transfer
from wald.store.writing.writer import Draft, Placed, Route

_TRASH_BYTES = 16 << 10  # consumed bytes go over and over into this, so it stays in the first-level cache
_SPLICE_NONBLOCK = 2
_PIPE_SIZES = tuple(1 << shift for shift in range(20, 15, -1))  # 1 MiB is the usual limit for the unprivileged
_NEW_PIPE_MAX_BYTES = 64 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PAUSE_MAX_SECONDS = 1.0  # between looks at an unfinished line

_libc = ctypes.CDLL(None, use_errno=True)
_tee = _libc.tee
_tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_tee.restype = ctypes.c_ssize_t


def tee(source: int, target: int, length: int) -> int | None:
    """Copy up to ``length`` bytes that ``source`` holds into ``target``; None: nothing yet; 0: and nobody writes."""
    copied: int = _tee(source, target, length, _SPLICE_NONBLOCK)
    if copied >= 0:
        return copied
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(code, os.strerror(code))


def enlarge(descriptor: int) -> int:
    """Make a pipe as large as the system lets us; returns its size in bytes."""
    present = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    for length in _PIPE_SIZES:
        if length <= present:
            break
        try:
            return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, length)
        except PermissionError:  # this user's pipes have used up their share of memory
            continue
    return present


def survived(descriptor: int) -> bool:
    """Whether a pipe seems to be one that the last life of the daemon read; enlarges it.

    A pipe lives as long as somebody holds it, and then has the size that it was given; a FIFO that nobody held, and any
    other stdin, begins with the system's size. That tells nothing where pipes could not be enlarged, then or now. One
    that could not be then is taken for a new one if it can be now: an unfinished record ends, and what a kill left both
    in the log and in the pipe is there twice. One that cannot be now is taken for the old one: a new line may go on an
    unfinished record.
    """
    before = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    return not before <= _NEW_PIPE_MAX_BYTES < enlarge(descriptor)


class Scratch:
    """The pipe that is looked into instead of the real ones, and the buffer that consumed bytes go to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.capacity = enlarge(self._writer)
        self._trash = memoryview(bytearray(_TRASH_BYTES))

    def look(self, source: int, into: memoryview) -> int | None:
        """Copy what ``source`` holds to ``into``, up to its length; None and 0 as :func:`tee`."""
        length = tee(source, self._writer, len(into))
        done = 0
        while length and done < length:
            done += os.readv(self._reader, [into[done:length]])
        return length

    def consume(self, source: int, length: int, mark: memoryview) -> int:
        """Take ``length`` bytes, all of which are there, out of ``source``; the first lands in ``mark``.

        Returns:
            how many were taken; fewer only if somebody else reads the pipe.
        """
        whole, rest = divmod(length - 1, _TRASH_BYTES)
        # The mark is not there where somebody has shortened the transfers file; what it belongs to is gone with it.
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


class Pipe:
    """One pipe that feeds one route.

    Attributes:
        file: its device and inode.
        ready: whether it may hold something that was not looked at.
        waits: whether it holds an unfinished line that was looked at.
        hung_up: whether nobody can write to it any more.
        ended: hung up, and everything is in the log.
        slot: the number of its slot in the transfers file.
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
    ) -> None:
        self.route = route
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
        self._left_bytes = 0  # of a stop: what is still taken if somebody else can write on
        self._holds_both_ends = holds_both_ends
        self._relay = relay
        # Half of what it holds: while one half is being written, producers fill the other.
        self.chunk_bytes = min(enlarge(descriptor), scratch.capacity) // 2

    @property
    def inside_record(self) -> bool:
        """Whether a record of this pipe has begun and not ended: nobody else may write to its route."""
        return self._open_sequence != 0

    @property
    def has_input(self) -> bool:
        """Whether it holds something that was not looked at; a file behind stdin is taken to."""
        return self.ready and (self._relay is not None or held_bytes(self.descriptor) > 0)

    def collect(self, arena: Arena) -> Draft | None:
        """What can be committed now, still in the pipe; None if that is nothing, or the turn has no room left."""
        if arena.free < self.chunk_bytes:
            return None  # still ready: its turn is the next one
        self.waits = False
        if self._relay is not None:
            self._relay.refill()
        start = arena.used
        into = arena.view[start : start + self.chunk_bytes]
        length = self._scratch.look(self.descriptor, into)
        if not length:
            self.ready = False
            if length == 0:
                return self._last_of_all()
            return None
        end = arena.buffer.rfind(b"\n", start, start + length) + 1
        flags = Flag.NONE
        taken = end - start if end else 0
        if not taken:
            if length == len(into) or self.inside_record or self._stalled or self._is_full():
                taken, flags = length, self._piece(length)
            elif self.hung_up:
                taken, flags = length, Flag.UNTERMINATED
            else:
                self.ready, self.waits = False, True
                if length != self._seen_bytes:  # writers that find no room call us as well
                    self._seen_bytes, self._seen_at = length, time.monotonic()
                return None
        self._stalled = False
        self._seen_bytes = 0
        self._left_bytes -= taken
        arena.used = start + taken
        return self._draft(arena.view[start : start + taken], flags)

    def look_again(self, now: float) -> None:
        """Be ready if more has come to an unfinished line, or if nothing has for long and writers may be blocked."""
        if not self.waits:
            return
        held = held_bytes(self.descriptor)
        if held != self._seen_bytes:
            self.ready = True
        elif now - self._seen_at >= PAUSE_MAX_SECONDS and not self._holds_both_ends and self._can_be_full(held):
            self.ready = self._stalled = True

    def announce(self, placed: Placed, segment: int) -> None:
        """Before the write: leave word of where the bytes that are still in the pipe will stand."""
        payload = placed.draft.payload
        if payload:
            transfer = Transfer(
                self.route.name, self.file[1], placed.draft.payload_bytes, segment, placed.position, payload[0][0]
            )
            self._transfers.tell(self.slot, transfer)

    def settle(self, placed: Placed) -> str:
        """After the sync: take the bytes out of the pipe; returns what went wrong, "" if nothing did."""
        draft = placed.draft
        taken = self._consume(draft.payload_bytes) if draft.payload else 0
        if draft.flags & Flag.CONTINUED:
            self._open_sequence = placed.last_sequence if draft.count else draft.continues
            self._open_bytes += draft.payload_bytes
        else:
            self._open_sequence = self._open_bytes = 0
        if taken == draft.payload_bytes:
            return ""
        return (
            f"{self.route.name}: somebody else reads the pipe: {draft.payload_bytes} bytes were seen, {taken} were left"
        )

    def resolve(self, payload: bytes) -> str:
        """Finish the transfer of an earlier life that the slot announces.

        Args:
            payload: what the log holds at the announced place.

        Returns:
            What was done, in words; "" if there was nothing to do.
        """
        told = self._transfers.told(self.slot)
        if told is None or told[1]:
            return ""
        transfer = told[0]
        if len(payload) != transfer.taken_bytes:
            return f"{transfer.taken_bytes} bytes were announced, {len(payload)} are in the log: left in the pipe"
        front = bytearray(len(payload))
        # The scratch pipe may have become smaller than it was, so this may see only the beginning.
        length = self._scratch.look(self.descriptor, memoryview(front)) or 0
        if length == 0 or front[:length] != payload[:length] or held_bytes(self.descriptor) < len(payload):
            return f"{transfer.taken_bytes} bytes are in the log and the pipe was made anew: nothing to take"
        self._consume(transfer.taken_bytes)
        return f"{transfer.taken_bytes} bytes that are in the log were taken out of the pipe"

    def close_record(self) -> Draft | None:
        """End a record whose rest can never come."""
        return end_of_record(self.route, self._open_sequence, self) if self._open_sequence else None

    def close(self) -> None:
        os.close(self.descriptor)
        if self._relay is not None:
            self._relay.close()

    def release_writing_end(self) -> None:
        """At a stop: hold only the reading end, so that it shows whether anybody else can still write; be ready."""
        if self._holds_both_ends:
            reader = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(self.descriptor)
            self.descriptor = reader
            self._holds_both_ends = False
        self.ready = True
        self._left_bytes = 2 * self.chunk_bytes

    def look_last(self) -> None:
        """At a stop: be ready until it is empty, or has given what a pipe holds if somebody else can write on."""
        self.hung_up = bool(_poll(self.descriptor, select.POLLIN) & select.POLLHUP)
        if self.hung_up:
            self.ready = True
        if self.ended or (not self.hung_up and self._left_bytes <= 0):
            self.ready = False

    def _consume(self, length: int) -> int:
        with self._transfers.mark(self.slot) as mark:
            return self._scratch.consume(self.descriptor, length, mark)

    def _last_of_all(self) -> Draft | None:
        self.hung_up = True
        closing = self.close_record()
        self.ready = closing is not None
        self.ended = closing is None
        return closing

    def _piece(self, length: int) -> Flag:
        """A piece of a long line; at the limit the record ends, and the line goes on as another."""
        return Flag.CONTINUED if self._open_bytes + length < self._record_max_bytes else Flag.UNTERMINATED

    def _is_full(self) -> bool:
        """Whether writers are blocked although no newline has come (only a descriptor open for writing can tell)."""
        return self._holds_both_ends and not _poll(self.descriptor, select.POLLOUT) & select.POLLOUT

    def _can_be_full(self, held: int) -> bool:
        """Whether a pipe of which this end cannot tell may be full: splice(2) fills a page with as little as a byte."""
        return held >= fcntl.fcntl(self.descriptor, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES

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
        )


def end_of_record(route: Route, sequence: int, source: Pipe | None = None) -> Draft:
    """What ends the record numbered ``sequence`` without a newline."""
    return Draft(route, [], 0, 0, flags=Flag.CONTINUES | Flag.UNTERMINATED, continues=sequence, source=source)


class Relay:
    """A pipe of our own in front of a stdin that is a file: so that there is one way of reading."""

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
    """Open a FIFO for reading and writing, so that no writer's leaving ends it.

    Who holds a reading end shows in that the FIFO can be opened for writing only. Where nobody does, there may be a
    producer that has been writing to the old pipe all along, or one that has just made a new pipe and waits for us;
    these are told apart by :func:`survived`.

    Returns:
        the descriptor, and whether somebody else held the pipe (its content and an unfinished line can have survived).
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
    return descriptor, survived(descriptor) or writer is not None


def open_stdin(stdin: TextIO | None, *, hint: str) -> tuple[int, bool, Relay | None]:
    """The pipe behind stdin, with a relay in front of it if stdin is a file.

    Args:
        hint: what to type if stdin is neither.

    Returns:
        the descriptor, whether the pipe can have outlived the last life of the daemon, and the relay.

    Raises:
        InvalidInput: stdin is neither a pipe nor a file.
    """
    descriptor = -1 if stdin is None else stdin.fileno()  # None: it was closed
    mode = 0 if stdin is None else os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode):
        return os.dup(descriptor), survived(descriptor), None
    if stat.S_ISREG(mode):
        relay = Relay(descriptor)
        return relay.reader, False, relay
    raise InvalidInput("stdin is neither a pipe nor a file", hint=hint)


def file_of(status: os.stat_result) -> tuple[int, int]:
    """By which a file is told from another."""
    return status.st_dev, status.st_ino


def held_bytes(descriptor: int) -> int:
    """How many bytes a pipe holds."""
    length = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, length)
    return length[0]


def _poll(descriptor: int, events: int) -> int:
    poller = select.poll()
    poller.register(descriptor, events)
    ready = poller.poll(0)
    return ready[0][1] if ready else 0

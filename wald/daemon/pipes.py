"""FIFOs and stdin: bytes are read while they stay in their pipe, made durable, and only then taken out of it.

``tee(2)`` copies what a pipe holds into a scratch pipe without consuming it; whole lines of that are committed; then
one ``readv(2)`` consumes exactly those bytes. So there is no partial-line buffer, nothing to save at a stop, and a kill
loses nothing as long as another process holds the pipe open. Nor does a kill store anything twice: before the write a
slot of the transfers file records which batch the bytes go to, and the ``readv`` puts their first byte into that slot
(a mapped page, so it outlives the process) in the same uninterruptible step in which they leave the pipe. The next
start compares.

A line longer than a chunk is taken in pieces: batches that CONTINUE one record.
"""

from __future__ import annotations

import os
import select
import time

from stringzilla import count as count_bytes

from wald.daemon.pipe_calls import Relay, Scratch, can_be_full, enlarge, file_of, held_bytes, poll_events
from wald.daemon.transfers import Transfers
from wald.daemon.turn import Arena
from wald.format.batch import Flag
from wald.format.peers import FIFO, NOT_KNOWN
from wald.format.transfers import Transfer
from wald.store.writing.drafts import Draft, Route

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
        peer: int = FIFO,
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
    peer = source.peer if source is not None else NOT_KNOWN
    return Draft(route, [], 0, 0, flags=flags, continues=sequence, source=source, peer=peer)

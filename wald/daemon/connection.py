"""Sans-IO state machine of one connection: bytes in; drafts, replies, file parts and a wait out.

Payloads stay where they were received, in the round's arena, until they are durable. Only an unfinished request is
copied, up to 256 KiB; a larger payload is spooled to a file. A spooled request is admitted when its line arrives and
again when its payload is complete: in between, the disk may fill up or the route become busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stringzilla import count as count_bytes

from wald.daemon.backpressure import COMMAND, HELD, NEXT_ROUND, OVERDUE, Backpressure, MustWait, Reason, Wait
from wald.daemon.commands import Routes
from wald.daemon.committer import Arena, CommitRound, Spooling, Ticket
from wald.format.log_state import Peer, stored_producer_id
from wald.format.protocol import (
    LINE_MAX_BYTES,
    Code,
    Command,
    ProtocolError,
    Publish,
    encode_err,
    parse_request,
)
from wald.format.records import BadColumns, decode_columns
from wald.writing.writer import Route

RECEIVE_BYTES = 256 << 10  # per connection and round; a unix socket buffers about as much
COMMAND_RECEIVE_BYTES = 4 << 10  # of commands, which run slowly and are copied while pending
_MEMORY_MAX_BYTES = 8 << 20  # of all unfinished requests; above this, even small payloads are spooled
_SMALL_ROOM_BYTES = 2 * RECEIVE_BYTES  # for a payload spooled only because memory is full
_QUICK = frozenset({"PING", "HEAD"})  # answered in order with records
_QUICK_MAX = 32  # per connection and round
_ANSWERS_MAX = 512
_NEWLINE = ord("\n")
_OK = b"OK %d %d\n"

Answer = bytes | Ticket | Command
"""A reply, or a ticket or quick command that becomes one after the commit."""


class UnfinishedRequests:
    """Memory and disk space of all unfinished requests."""

    def __init__(self, request_max_bytes: int, *, memory_max_bytes: int = _MEMORY_MAX_BYTES) -> None:
        self.request_max_bytes = request_max_bytes
        self._memory_max_bytes = memory_max_bytes
        self.complete: list[Spooling] = []  # files to close after the commit
        self.discarded: list[Spooling] = []  # files to close now
        self.memory_bytes = 0
        self.receive_max_bytes = RECEIVE_BYTES  # from a connection in one read
        self._promised_small_bytes = self._promised_large_bytes = 0  # bytes that spooled payloads may still write

    def add_memory(self, change: int) -> None:
        self.memory_bytes += change
        has_space = self.memory_bytes < self._memory_max_bytes
        self.receive_max_bytes = RECEIVE_BYTES if has_space else COMMAND_RECEIVE_BYTES

    def fits_in_memory(self, payload_bytes: int) -> bool:
        return payload_bytes <= RECEIVE_BYTES and self.memory_bytes + payload_bytes <= self._memory_max_bytes

    def promised_to_others(self, wanted_bytes: int) -> int:
        """Return the promised bytes that a request must leave for others.

        A small request ignores promises to large requests, whose payloads may never arrive.
        """
        large = self._promised_large_bytes if wanted_bytes > _SMALL_ROOM_BYTES else 0
        return self._promised_small_bytes + large

    def reserve(self, request: Publish, route: Route, backpressure: Backpressure) -> Spooling:
        """Promise disk room to a payload, or raise ProtocolError or MustWait."""
        wanted = _room_bytes(request)
        backpressure.require_room(wanted, self.promised_to_others(wanted))
        spooling = Spooling(request, route)
        self._promise(spooling, spooling.promised_bytes)
        return spooling

    def accept(self, spooling: Spooling, part: memoryview) -> None:
        spooling.accept(part)
        self._promise(spooling, -len(part))

    def release(self, spooling: Spooling, *, is_complete: bool) -> None:
        """Withdraw a payload's promise, and queue its file for closing."""
        self._promise(spooling, -spooling.promised_bytes)
        (self.complete if is_complete else self.discarded).append(spooling)

    def _promise(self, spooling: Spooling, change: int) -> None:
        if _room_bytes(spooling.request) > _SMALL_ROOM_BYTES:
            self._promised_large_bytes += change
        else:
            self._promised_small_bytes += change


@dataclass(slots=True, eq=False)
class Connection:
    """State machine of one connection. The owner writes ``spooling.unwritten``, then calls ``receive`` again."""

    user_id: int
    _identify: Callable[[], Peer]  # called for the first record: clients without records cost nothing
    _routes: Routes
    _unfinished: UnfinishedRequests
    unread: bytes = b""  # received but not processed; the next buffer must begin with it
    wait: Wait | None = None  # why nothing may be received
    command: Command | None = None  # runs before anything else, while wait is COMMAND
    answers: list[Answer] = field(default_factory=list)  # of the current round, in order
    receive_bytes: int = COMMAND_RECEIVE_BYTES  # limit on the next read
    is_closing: bool = False  # process nothing more; close after the last reply
    peer: Peer | None = None
    spooling: Spooling | None = None
    _request: Publish | None = None  # its line was processed, its payload was not
    _skip_bytes: int = 0  # rest of a refused payload

    @property
    def payload_missing(self) -> int:
        """Unprocessed bytes of the current request."""
        if self.spooling is not None:
            return self.spooling.missing_bytes
        return self._request.payload_bytes if self._request is not None else 0

    @property
    def is_inside_request(self) -> bool:
        return bool(self.unread or self._request or self._skip_bytes)

    def receive(self, commit_round: CommitRound, backpressure: Backpressure) -> None:
        """Process the arena's bytes up to ``filled``, ``unread`` first; move ``used`` past processed bytes."""
        arena, end, unread_before = commit_round.arena, commit_round.arena.filled, len(self.unread)
        if self.is_closing:
            arena.used = end
        if self._skip_bytes:
            self._skip(self._skip_bytes, arena)
        try:
            self.wait = self._process(commit_round, backpressure)
        except MustWait as reason:
            self.wait = reason.wait
        if arena.used < end or unread_before:
            self.unread = bytes(arena.view[arena.used : end])
            self._unfinished.add_memory(len(self.unread) - unread_before)

    def reply(self, execute: Callable[[Command, int], bytes], refusal: bytes = b"") -> bytes:
        """Return the replies after the commit; a ``refusal`` replaces the replies to records."""
        replies = []
        for answer in self.answers:
            if isinstance(answer, Ticket):
                draft, offset, records = answer
                first = draft.base_sequence + offset
                replies.append(refusal or _OK % (first, first + records - 1))
            elif isinstance(answer, bytes):
                replies.append(answer)
            else:
                replies.append(execute(answer, self.user_id))
        self.answers.clear()
        if self.wait is HELD:
            self.wait = COMMAND if self.command else NEXT_ROUND
        return b"".join(replies)

    def hold(self) -> bool:
        """If the refused round has records of this connection, make it wait and return True."""
        if not any(isinstance(answer, Ticket) for answer in self.answers):
            return False
        self.wait = HELD
        return True

    def end_command(self) -> None:
        self.command = None
        self.wait = NEXT_ROUND if self.unread else None

    def time_out(self) -> bool:
        """Let the next round refuse a request that waits for a busy route; return False for other waits."""
        if self.wait is None or self.wait.reason is not Reason.BUSY:
            return False
        self.wait = OVERDUE
        return True

    def close(self) -> None:
        self.wait = None
        self._unfinished.add_memory(-len(self.unread))
        self.unread = b""
        self._discard_spool()

    def refuse_payload(self, error: ProtocolError) -> None:
        """Refuse the current request and skip its payload."""
        self.answers.append(encode_err(error.code, error.message))
        self._skip_bytes = self.payload_missing
        self._request = None
        self._discard_spool()

    def _process(self, commit_round: CommitRound, backpressure: Backpressure) -> Wait | None:
        """Process requests until one is incomplete (return None) or must wait (return or raise the wait)."""
        arena, answers, end = commit_round.arena, self.answers, commit_round.arena.filled
        quick = 0
        while self._request is None or self._publish(self._request, commit_round, backpressure):
            position = arena.used
            if position == end:
                return None
            if quick == _QUICK_MAX or len(answers) >= _ANSWERS_MAX:
                return NEXT_ROUND
            newline = arena.buffer.find(b"\n", position, min(end, position + LINE_MAX_BYTES))
            if newline < 0:
                if end - position >= LINE_MAX_BYTES:
                    message = f"the request line has no newline within {LINE_MAX_BYTES} bytes"
                    self._refuse_line(ProtocolError(Code.BAD_REQUEST, message, payload_bytes=None), arena)
                return None
            arena.used = newline + 1
            try:
                request = parse_request(bytes(arena.view[position:newline]), self._unfinished.request_max_bytes)
            except ProtocolError as error:
                self._refuse_line(error, arena)
                continue
            if isinstance(request, Publish):
                self._request = request
                continue
            self.receive_bytes = COMMAND_RECEIVE_BYTES
            if request.verb not in _QUICK:
                self.command = request
                return COMMAND
            answers.append(request)
            quick += 1
        return None

    def _publish(self, request: Publish, commit_round: CommitRound, backpressure: Backpressure) -> bool:
        """Add or refuse a request, or raise MustWait; return False if it is incomplete."""
        self.receive_bytes = RECEIVE_BYTES
        arena = commit_round.arena
        try:
            if self.spooling is None:
                route = self._routes.find(request.route, self.user_id)
                if not backpressure.is_open:
                    backpressure.admit(route, is_overdue=self.wait is OVERDUE)
                position = arena.used
                end = position + request.payload_bytes
                if end <= arena.filled:
                    self.answers.append(self._add(request, commit_round, route, arena.view[position:end]))
                    arena.used, self._request = end, None
                    return True
                if self._unfinished.fits_in_memory(request.payload_bytes):
                    return False
                self.spooling = self._unfinished.reserve(request, route, backpressure)
            return self._spool(self.spooling, commit_round, backpressure)
        except ProtocolError as error:
            self.refuse_payload(error)
            self._skip(self._skip_bytes, arena)
            return True

    def _spool(self, spooling: Spooling, commit_round: CommitRound, backpressure: Backpressure) -> bool:
        """Continue :meth:`_publish` with a spooled payload; return False if a part must be written first."""
        request, arena = spooling.request, commit_round.arena
        if spooling.missing_bytes:
            backpressure.require_room()  # others may have used up the room
            position = arena.used
            arena.used = min(arena.filled, position + spooling.missing_bytes)
            if arena.used > position:
                self._unfinished.accept(spooling, arena.view[position : arena.used])
            return False
        route = self._routes.find(request.route, self.user_id)
        backpressure.admit(route, is_overdue=self.wait is OVERDUE)
        self.answers.append(self._add(request, commit_round, route, None, spooling))
        self._request = self.spooling = None
        self._unfinished.release(spooling, is_complete=True)
        return True

    def _add(
        self,
        request: Publish,
        commit_round: CommitRound,
        route: Route,
        payload: memoryview | None,
        spooling: Spooling | None = None,
    ) -> bytes | Ticket:
        """Add a complete request; return a ticket, or the reply to a duplicate. Raise ProtocolError to refuse it."""
        peer = self.peer
        if peer is None:
            peer = self.peer = self._identify()
        if request.columns:
            count = _count_columns((payload or b"") if spooling is None else spooling.columns)
            if spooling is not None:
                spooling.columns = b""  # closes the mapping's descriptor
        elif spooling is not None and spooling.ends_in_newline:
            count = spooling.newlines
        elif payload and payload[-1] == _NEWLINE:
            count = int(count_bytes(payload, b"\n"))
            if not request.producer_id:
                return commit_round.publish_lines(route, payload, count, peer)
        else:
            raise ProtocolError(Code.BAD_LINES, "the payload must end in a newline")
        producer_id = stored_producer_id(self.user_id, request.producer_id)
        result = commit_round.publish(request, producer_id, route, payload, count, peer, spooling)
        return result if isinstance(result, Ticket) else _OK % (result.first, result.last)

    def _refuse_line(self, error: ProtocolError, arena: Arena) -> None:
        self.answers.append(encode_err(error.code, error.message))
        if error.payload_bytes is None:
            self.is_closing, arena.used = True, arena.filled
        else:
            self._skip(error.payload_bytes, arena)

    def _skip(self, length: int, arena: Arena) -> None:
        """Discard ``length`` bytes, including those still to come."""
        skipped = min(length, arena.filled - arena.used)
        arena.used += skipped
        self._skip_bytes = length - skipped

    def _discard_spool(self) -> None:
        if self.spooling is not None:
            self._unfinished.release(self.spooling, is_complete=False)
            self.spooling = None


def _room_bytes(request: Publish) -> int:
    """Return a payload's room in its file and in the log."""
    return 2 * request.payload_bytes


def _count_columns(payload: bytes | memoryview) -> int:
    try:
        count = decode_columns(payload).count
    except BadColumns as error:
        raise ProtocolError(Code.BAD_COLUMNS, str(error)) from None
    if count == 0:
        raise ProtocolError(Code.BAD_COLUMNS, "the payload contains no records")
    return count

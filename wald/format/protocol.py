r"""The text protocol of the socket, as bytes: requests and replies are lines, payloads are raw.

    PUB <route> <bytes> [enc=columns] [pid=<hex> pseq=<n> [seen=<sequence>]]\n<payload>   →  OK <first> <last>\n
    HEAD                                                              →  OK seq=… segment=… …\n
    STAT                                                              →  OK {…}\n
    ROUTE ADD <name> [fifo] [mode=<octal>] [consumers=<group>] | ROUTE RETIRE <name>   →  OK …\n
    CUT | CLOCK STEP | PING                                           →  OK …\n

Anything else gets ``ERR <code> <message>\n``, and the connection goes on if the length of what follows is known.
Replies come in the order of the requests; requests may be pipelined. ``socat - UNIX:ROOT/wald.sock`` speaks it.

A payload of lines must end in a newline; each line is a record. With ``pid`` and ``pseq`` a request may be repeated,
over another connection too: what is already in the log is acknowledged again with its first sequences, and other
content under the same number is refused. Each user has producer ids of their own. A producer that the daemon does not
remember may begin with any number; with ``seen`` only if none of its batches can be behind that sequence.

:class:`RequestReader` cuts the bytes of a connection into requests. It does no input or output of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

LINE_MAX_BYTES = 1024  # a request line; a longer one is not a request
REQUEST_MAX_BYTES = 1 << 29  # a payload; above it a producer has to split
_HEX = re.compile(rb"[0-9A-Fa-f]{1,16}")
_DECIMAL = re.compile(rb"[0-9]{1,20}")


class Code(StrEnum):
    """The word after ERR."""

    BAD_REQUEST = "bad-request"
    BAD_ROUTE = "bad-route"
    NO_ROUTE = "no-route"
    BAD_LENGTH = "bad-length"
    TOO_LARGE = "too-large"
    BAD_LINES = "bad-lines"
    BAD_COLUMNS = "bad-columns"
    UNKNOWN_VERB = "unknown-verb"
    DENIED = "denied"
    GAP = "gap"
    FORGOTTEN = "forgotten"
    CONFLICT = "conflict"
    FULL = "full"
    BUSY = "busy"
    TIMEOUT = "timeout"
    FAILED = "failed"


class ProtocolError(Exception):
    """A request that gets an ERR.

    Attributes:
        payload_bytes: how many bytes of payload to pass over before the next request; None if that cannot be known.
    """

    def __init__(self, code: Code, message: str, *, payload_bytes: int | None = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.payload_bytes = payload_bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """The line of a PUB.

    Attributes:
        seen: the sequence up to which the client knows all batches of its producer; None: it does not say.
    """

    route: bytes
    payload_bytes: int
    columns: bool = False
    producer_id: int = 0
    producer_sequence: int = 0
    seen: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """Any other request."""

    verb: str
    arguments: tuple[str, ...] = ()


_LINES_REMEMBERED = 256  # a producer without an id sends the same line again and again
VERBS = ("HEAD", "STAT", "CUT", "CLOCK", "ROUTE", "PING")


@lru_cache(maxsize=_LINES_REMEMBERED)
def parse_request(line: bytes, request_max_bytes: int = REQUEST_MAX_BYTES) -> Publish | Command:
    """The request in ``line`` (without its newline; a trailing carriage return is passed over).

    Raises:
        ProtocolError: it is none.
    """
    words = line.split()
    if words and words[0] == b"PUB":
        return _parse_publish(words, request_max_bytes)
    verb = words[0].decode("ascii", "replace") if words else ""
    if verb not in VERBS:
        raise ProtocolError(Code.UNKNOWN_VERB, f"{verb[:20]!r} is none of PUB {' '.join(VERBS)}")
    return Command(verb, tuple(word.decode("utf-8", "replace") for word in words[1:]))


class RequestReader:
    """Cuts what a connection sends into requests: bytes in, events out.

    Feed it, take events until there is none, and release the buffer. A PUB is an event as soon as its line is whole,
    however large its payload is. The caller then takes the payload as a whole or in parts, or skips it; the next event
    comes after it. Payloads are views of the buffer that was fed; only what :meth:`release` keeps is copied.

    Attributes:
        kept: what has come of an unfinished request. The next buffer begins with it.
        payload_bytes: how much of the announced payload was not taken yet; None if no payload is announced.
        closed: whether a request was read whose end cannot be known. Nothing can be read after it.
    """

    def __init__(self, request_max_bytes: int = REQUEST_MAX_BYTES) -> None:
        self.leftover = b""
        self.payload_bytes: int | None = None
        self.closed = False
        self._request_max_bytes = request_max_bytes
        self._skip_bytes = 0
        self._buffer: bytes | bytearray = b""
        self._view = memoryview(b"")
        self._position = self._end = 0

    @property
    def unfinished(self) -> bool:
        """Whether a request has begun whose end was not read."""
        return bool(self.leftover or self._skip_bytes) or self.payload_bytes is not None

    @property
    def has_unread(self) -> bool:
        """Whether the buffer holds bytes that were not read yet."""
        return self._position < self._end

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        """Read from ``buffer[start:end]``: what was kept, and what has come since."""
        if buffer is not self._buffer:
            self._buffer, self._view = buffer, memoryview(buffer)
        self._position, self._end = end if self.closed else start, end
        if self._skip_bytes:
            self._skip(self._skip_bytes)

    def next_event(self) -> Publish | Command | ProtocolError | None:
        """The next request, or why it is none; None if it is not whole yet, or if a payload comes before it."""
        position = self._position
        if position == self._end or self.payload_bytes is not None:
            return None
        newline = self._buffer.find(b"\n", position, min(self._end, position + LINE_MAX_BYTES))
        if newline < 0:
            return self._refuse(_no_newline()) if self._end - position >= LINE_MAX_BYTES else None
        self._position = newline + 1
        try:
            event = parse_request(bytes(self._view[position:newline]), self._request_max_bytes)
        except ProtocolError as error:
            return self._refuse(error)
        if type(event) is Publish:
            self.payload_bytes = event.payload_bytes
        return event

    def read_payload(self) -> memoryview | None:
        """The whole payload of the announced request; None if it has not come yet."""
        assert self.payload_bytes is not None
        begin, end = self._position, self._position + self.payload_bytes
        if end > self._end:
            return None
        self._position, self.payload_bytes = end, None
        return self._view[begin:end]

    def read_part(self) -> memoryview:
        """What has come of the payload of the announced request; it may be nothing."""
        assert self.payload_bytes is not None
        begin, end = self._position, min(self._end, self._position + self.payload_bytes)
        self._position = end
        self.payload_bytes = self.payload_bytes - (end - begin) or None
        return self._view[begin:end]

    def skip_payload(self) -> None:
        """Pass over what was not taken of the announced payload, as it comes."""
        length, self.payload_bytes = self.payload_bytes, None
        self._skip(length or 0)

    def release(self) -> int:
        """Keep what was not read, so that the buffer may be reused; returns the position up to which it was read."""
        position, self._position = self._position, self._end
        self.leftover = bytes(self._view[position : self._end]) if position < self._end else b""
        return position

    def _refuse(self, error: ProtocolError) -> ProtocolError:
        if error.payload_bytes is None:
            self.closed, self._position = True, self._end
        else:
            self._skip(error.payload_bytes)
        return error

    def _skip(self, length: int) -> None:
        here = min(length, self._end - self._position)
        self._position += here
        self._skip_bytes = length - here


def _no_newline() -> ProtocolError:
    return ProtocolError(Code.BAD_REQUEST, f"no newline in {LINE_MAX_BYTES} bytes", payload_bytes=None)


def _parse_publish(words: list[bytes], request_max_bytes: int) -> Publish:
    if len(words) < 3 or not words[2].isdigit() or len(words[2]) > 12:
        raise ProtocolError(
            Code.BAD_LENGTH,
            "PUB <route> <bytes> [enc=columns] [pid=<hex> pseq=<n> [seen=<sequence>]]",
            payload_bytes=None,
        )
    payload_bytes = int(words[2])
    if payload_bytes > request_max_bytes:
        raise ProtocolError(
            Code.TOO_LARGE, f"{payload_bytes} bytes; the limit is {request_max_bytes}", payload_bytes=payload_bytes
        )
    try:
        return Publish(words[1], payload_bytes, *_parse_options(words[3:]))
    except (ValueError, KeyError):
        raise ProtocolError(
            Code.BAD_REQUEST,
            "options are enc=lines|columns, pid=<hex, not 0> with pseq=<n>, and with these seen=<sequence>",
            payload_bytes=payload_bytes,
        ) from None


def _parse_options(words: list[bytes]) -> tuple[bool, int, int, int | None]:
    """Whether the payload is columns, the producer's id, the number of its batch, and what it has seen.

    Raises:
        ValueError, KeyError: they are no options.
    """
    options: dict[bytes, bytes] = {}
    for word in words:
        name, _, value = word.partition(b"=")
        options[name] = value
    if len(options) < len(words) or not options.keys() <= {b"enc", b"pid", b"pseq", b"seen"}:
        raise ValueError
    columns = {b"columns": True, b"lines": False}[options.get(b"enc", b"lines")]
    if (b"pid" in options) != (b"pseq" in options):
        raise ValueError
    pid, pseq = options.get(b"pid", b"0"), options.get(b"pseq", b"0")
    if not (_HEX.fullmatch(pid) and _DECIMAL.fullmatch(pseq)):
        raise ValueError
    producer_id, producer_sequence = int(pid, 16), int(pseq)
    if producer_sequence >= 1 << 64 or (b"pid" in options) != (producer_id > 0):
        raise ValueError
    seen = options.get(b"seen")
    if seen is None:
        return columns, producer_id, producer_sequence, None
    if not producer_id or not _DECIMAL.fullmatch(seen) or int(seen) >= 1 << 64:
        raise ValueError
    return columns, producer_id, producer_sequence, int(seen)


def encode_publish(request: Publish) -> bytes:
    """The request line, newline included."""
    line = b"PUB %s %d" % (request.route, request.payload_bytes)
    if request.columns:
        line += b" enc=columns"
    if request.producer_id:
        line += b" pid=%x pseq=%d" % (request.producer_id, request.producer_sequence)
    if request.seen is not None:
        line += b" seen=%d" % request.seen
    return line + b"\n"


def encode_ok(text: str) -> bytes:
    """A positive reply."""
    return f"OK {text}\n".encode()


def encode_err(code: Code, message: str) -> bytes:
    """A negative reply, on one line."""
    return f"ERR {code} {' '.join(message.split())}\n".encode()


def parse_reply(line: bytes) -> str:
    """The text after OK.

    Raises:
        ProtocolError: the reply is an ERR, or no reply at all.
    """
    text = line.decode("utf-8", "replace").rstrip("\n")
    status, _, rest = text.partition(" ")
    if status == "OK":
        return rest
    code, _, message = rest.partition(" ")
    if status != "ERR" or code not in set(Code):
        raise ProtocolError(Code.BAD_REQUEST, f"not a reply: {text[:80]!r}")
    raise ProtocolError(Code(code), message)

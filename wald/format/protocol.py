"""The text protocol of the socket (docs/protocol.md): requests and replies are lines, payloads are raw bytes.

After an ERR, the connection stays open if the payload's length is known. Producer ids are per user.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from wald.format.names import SEQUENCE_MAX

LINE_MAX_BYTES = 1024
REQUEST_MAX_BYTES = 1 << 29  # of a payload; producers split larger payloads
FRAME_MAX_BYTES = 128 << 10  # of whole records in one request; a socket buffers about twice as much
_OPTIONS = re.compile(  # sorted, with a space after each
    rb"(?:enc=(lines|columns) )?(?:pid=(?!0+ )([0-9A-Fa-f]{1,16}) pseq=([0-9]{1,20}) (?:seen=([0-9]{1,20}) )?)?"
)


class Code(StrEnum):
    """Code after ERR."""

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
    """A request that is rejected with ERR."""

    def __init__(self, code: Code, message: str, *, payload_bytes: int | None = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.payload_bytes = payload_bytes  # to skip before the next request; None if unknown


class Publish(NamedTuple):
    """Parsed PUB request."""

    route: bytes
    payload_bytes: int
    columns: bool = False
    producer_id: int = 0
    producer_sequence: int = 0
    seen: int | None = None  # the client knows every batch of its producer up to this sequence


class Command(NamedTuple):
    """Parsed request other than PUB."""

    verb: str
    arguments: tuple[str, ...] = ()


VERBS = ("HEAD", "STAT", "CUT", "CLOCK", "ROUTE", "PING")


@lru_cache(maxsize=256)  # a producer without an id sends the same line repeatedly
def parse_request(line: bytes, request_max_bytes: int = REQUEST_MAX_BYTES) -> Publish | Command:
    """Parse a request line, or raise ProtocolError. A trailing carriage return is ignored."""
    words = line.split()
    if words and words[0] == b"PUB":
        return _parse_publish(words, request_max_bytes)
    verb = words[0].decode("ascii", "replace") if words else ""
    if verb not in VERBS:
        raise ProtocolError(Code.UNKNOWN_VERB, f"{verb[:20]!r} is not one of PUB {' '.join(VERBS)}")
    return Command(verb, tuple(word.decode("utf-8", "replace") for word in words[1:]))


def encode_publish(request: Publish) -> bytes:
    line = b"PUB %s %d" % (request.route, request.payload_bytes)
    if request.columns:
        line += b" enc=columns"
    if request.producer_id:
        line += b" pid=%x pseq=%d" % (request.producer_id, request.producer_sequence)
    if request.seen is not None:
        line += b" seen=%d" % request.seen
    return line + b"\n"


def encode_ok(text: str) -> bytes:
    return f"OK {text}\n".encode()


def encode_err(code: Code, message: str) -> bytes:
    return f"ERR {code} {' '.join(message.split())}\n".encode()


def parse_reply(line: bytes) -> str:
    """Return the text after OK, or raise ProtocolError."""
    text = line.decode("utf-8", "replace").rstrip("\n")
    status, _, rest = text.partition(" ")
    if status == "OK":
        return rest
    code, _, message = rest.partition(" ")
    if status != "ERR" or code not in set(Code):
        raise ProtocolError(Code.BAD_REQUEST, f"{text[:80]!r} is not a reply")
    raise ProtocolError(Code(code), message)


def _parse_publish(words: list[bytes], request_max_bytes: int) -> Publish:
    if len(words) < 3 or not words[2].isdigit() or len(words[2]) > 12:
        raise ProtocolError(
            Code.BAD_LENGTH,
            "PUB <route> <bytes> [enc=columns] [pid=<hex> pseq=<n> [seen=<sequence>]]",
            payload_bytes=None,
        )
    payload_bytes = int(words[2])
    if payload_bytes > request_max_bytes:
        message = f"the payload has {payload_bytes} bytes; the limit is {request_max_bytes}"
        raise ProtocolError(Code.TOO_LARGE, message, payload_bytes=payload_bytes)
    options = _OPTIONS.fullmatch(b"".join(word + b" " for word in sorted(words[3:])))
    if options is None or max(int(options[3] or 0), int(options[4] or 0)) > SEQUENCE_MAX:
        raise ProtocolError(
            Code.BAD_REQUEST,
            "the options are enc=lines|columns, and pid=<hex, not 0> pseq=<n> with an optional seen=<sequence>",
            payload_bytes=payload_bytes,
        )
    columns, producer_id, seen = options[1] == b"columns", int(options[2] or b"0", 16), options[4]
    return Publish(
        words[1], payload_bytes, columns, producer_id, int(options[3] or 0), None if seen is None else int(seen)
    )

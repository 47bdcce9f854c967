"""Bodies of requests as payloads for the daemon: decompressed, divided into records, and never completely in memory.

chunks of the body ─▶ decompressed ─▶ whole lines ─▶ payloads of about 128 KiB

text/plain                 each line is a record
application/x-ndjson       each line is an object, as ``wald append --jsonl`` takes it
application/json           the body is one such object, or an array of them
application/octet-stream   all of it is one record
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import zstandard

from wald.client.payloads import column_payloads, json_payloads
from wald.errors import InvalidInput
from wald.format.protocol import FRAME_MAX_BYTES
from wald_gate.limits import MemoryReservation
from wald_gate.problems import HttpError
from wald_gate.settings import LimitSettings

_BLANK = b" \t\r\n"
_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # only between tokens: a JSON string cannot contain them
_ELEMENT_BYTES = 100  # of memory, while a document is split
_SHORT_BYTES = 16 << 10  # of a document that is split without a thread
_GZIP = 31  # zlib: a gzip header, and a window of 32 KiB
_GZIP_STEP_BYTES = 1 << 10  # of input, which makes 1 MiB at most
_ZSTD_STEP_BYTES = 256  # of input: a block of 4 bytes may stand for 128 KiB, so a step makes 8 MiB at most
_ZSTD_WINDOW_BYTES = 8 << 20  # what RFC 8878 asks decoders to support
_LARGER = "send it in several records; record_max_bytes in [limits] of the gate"
BODY_LARGER = "send it in several requests; body_max_bytes in [limits] of the gate"


Expand = Callable[[bytes], Iterable[bytes]]
"""Decompresses a chunk in parts of bounded size; b"" ends the body. Raises InvalidInput for damage or a truncation."""


def expander(encoding: str) -> Expand:
    """Return a function that decompresses a body; HttpError 415 if the encoding is not known."""
    if encoding not in _ENCODINGS:
        known = ", ".join(filter(None, _ENCODINGS))
        raise HttpError(415, "encoding", f"Content-Encoding {encoding[:40]!r} is not known", hint=f"there are {known}")
    return _ENCODINGS[encoding]()


class TextLines:
    """Divides a text into lines, each of which is a record; the last one may lack its newline.

    With ``bare``, each JSON value of the body is the value of a record. The threads, for long lines, are not those of
    asyncio, in which the gate connects to the daemon.
    """

    columns = False  # the payloads are lines

    def __init__(
        self, limits: LimitSettings, memory: MemoryReservation, threads: Executor, *, bare: bool = False
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._threads = threads
        self._bare = bare
        self._held = bytearray()
        self._searched = 0  # bytes of it, without a newline

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield up to 128 KiB of whole lines at a time, or one longer line. The division depends on the body alone."""
        held, limit = self._held, self._limits.record_max_bytes
        held += part
        if len(held) < FRAME_MAX_BYTES:
            return
        start = 0
        while len(held) - start >= FRAME_MAX_BYTES:
            within = start + FRAME_MAX_BYTES
            end = held.rfind(b"\n", start, within) + 1 or held.find(b"\n", max(self._searched, within)) + 1
            if (end or len(held)) - start > max(limit + 1, FRAME_MAX_BYTES):
                raise too_large("a line", limit, _LARGER)
            if not end:
                break
            yield _checked(bytes(held[start:end]), limit)
            start = end
        del held[:start]
        self._memory.keep(len(held))
        self._searched = len(held)

    async def end(self) -> Iterable[bytes]:
        return self._rest()

    def _rest(self) -> Iterator[bytes]:
        held = bytes(self._held)
        if held:
            yield _checked(held if held.endswith(b"\n") else held + b"\n", self._limits.record_max_bytes)

    async def payloads(self, lines: bytes) -> Iterable[bytes]:
        """Encode a division of the body for the daemon."""
        return (lines,)


class JsonLines(TextLines):
    """Divides lines that are JSON objects, or with ``bare`` values."""

    columns = True
    _number = 1

    async def payloads(self, lines: bytes) -> Iterable[bytes]:
        payloads: Iterable[bytes] = json_payloads(lines, "the body", self._number, None, bare=self._bare)
        self._number += lines.count(b"\n")
        if len(lines) > FRAME_MAX_BYTES:  # a single one; others are answered as far as json releases the GIL
            return await asyncio.get_running_loop().run_in_executor(self._threads, list, payloads)
        return payloads


class JsonDocument(JsonLines):
    """Divides a body that is a JSON object or an array of them, or with ``bare`` of values."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        self._held += part
        if len(self._held) > self._limits.json_max_bytes:
            hint = "Content-Type: application/x-ndjson takes more"
            raise too_large("a JSON document", self._limits.json_max_bytes, hint)
        self._memory.keep(len(self._held))
        return iter(())

    async def end(self) -> Iterable[bytes]:
        document = bytes(self._held)
        self._held.clear()
        self._memory.keep(len(document) + _ELEMENT_BYTES * document.count(b","))  # every few bytes may be a record
        if len(document) > _SHORT_BYTES:
            lines = await asyncio.get_running_loop().run_in_executor(self._threads, _on_lines, document)
        else:
            lines = _on_lines(document)
        return chain(super().feed(lines), self._rest())


def _on_lines(document: bytes) -> bytes:
    """Return the elements of an array, or the document itself, one per line."""
    try:
        if document.lstrip(_BLANK).startswith(b"["):
            found = msgspec.json.decode(document, type=list[msgspec.Raw])
        else:
            found = [msgspec.json.decode(document, type=msgspec.Raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", hint="Content-Type: application/x-ndjson, for lines") from None
    return b"".join(bytes(each).translate(_ON_ONE_LINE) + b"\n" for each in found)


class SingleRecord(TextLines):
    """Takes the whole body as one record."""

    columns = True

    def feed(self, part: bytes) -> Iterator[bytes]:
        self._held += part
        if len(self._held) > self._limits.record_max_bytes:
            raise too_large("the record", self._limits.record_max_bytes, _LARGER)
        self._memory.keep(len(self._held))
        return iter(())

    async def end(self) -> Iterable[bytes]:
        whole = bytes(self._held)
        self._held.clear()  # its memory, before there is a payload of the same size
        return (whole,)

    async def payloads(self, whole: bytes) -> Iterable[bytes]:
        return column_payloads([whole])


BODIES: Mapping[str, type[TextLines]] = {
    "text/plain": TextLines,
    "application/x-ndjson": JsonLines,
    "application/ndjson": JsonLines,
    "application/jsonl": JsonLines,
    "application/json": JsonDocument,
    "application/octet-stream": SingleRecord,
}
"""Classes that divide a body into records, by its media type."""


def _checked(lines: bytes, limit: int) -> bytes:
    """Return the lines, or raise HttpError (413) if one is too long. Each step skips lines of up to that length."""
    start = 0
    while len(lines) - start > limit + 1:
        start = lines.rfind(b"\n", start, start + limit + 1) + 1
        if not start:
            raise too_large("a line", limit, _LARGER)
    return lines


def too_large(what: str, limit: int, hint: str) -> HttpError:
    return HttpError(413, "too-large", f"{what} is larger than {limit} bytes", hint=hint)


def _members(name: str, step_bytes: int, begin: Callable[[], Any], error: type[Exception]) -> Expand:
    """Decompress members of gzip (RFC 1952) or frames of zstd (RFC 8878), several of which may follow each other."""
    member, has_begun = begin(), False

    def expand(chunk: bytes) -> Iterator[bytes]:
        nonlocal member, has_begun
        if not chunk and has_begun:
            raise InvalidInput(f"the {name} body is truncated", hint="send it again")
        for start in range(0, len(chunk), step_bytes):
            step = chunk[start : start + step_bytes]
            while step:
                has_begun = True
                try:
                    part = member.decompress(step)
                except error as reason:
                    raise InvalidInput(f"the body is not {name}: {reason}", hint=f"Content-Encoding: {name}") from None
                step = b""
                if member.eof:
                    step, member, has_begun = member.unused_data, begin(), False
                if part:
                    yield part

    return expand


def _identity() -> Expand:
    return lambda chunk: (chunk,) if chunk else ()


def _zstd() -> Expand:
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)  # of one body: they share its state
    begin = partial(frames.decompressobj, read_across_frames=False)
    return _members("zstd", _ZSTD_STEP_BYTES, begin, zstandard.ZstdError)


_gzip = partial(_members, "gzip", _GZIP_STEP_BYTES, partial(zlib.decompressobj, _GZIP), zlib.error)
_ENCODINGS: Mapping[str, Callable[[], Expand]] = {
    "": _identity,
    "identity": _identity,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
}

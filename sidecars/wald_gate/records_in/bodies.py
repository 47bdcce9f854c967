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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import msgspec
import zstandard

from wald.client.payloads import column_payloads, json_payloads
from wald.errors import InvalidInput
from wald.format.protocol import FRAME_MAX_BYTES
from wald_gate.problems import HttpError

_BLANK = b" \t\r\n"
_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # only between tokens: a JSON string cannot contain them
_ELEMENT_BYTES = 100  # of memory, while a document is split
_GZIP = 31  # zlib: a gzip header, and a window of 32 KiB
_STEP_BYTES = 256 << 10  # of output, of one step of gzip
_ZSTD_STEP_BYTES = 256  # of input: a block of 4 bytes may stand for 128 KiB, so a step makes 8 MiB at most
_ZSTD_WINDOW_BYTES = 8 << 20  # what RFC 8878 asks decoders to support
_LARGER = "send it in several records; record_max_bytes in [limits] of the gate"


class Payload(NamedTuple):
    """Payload of one request to the daemon; ``columns`` is False for lines."""

    data: bytes
    columns: bool


class Sizes(NamedTuple):
    """Limits in bytes, and threads for long lines.

    Attributes:
        body: limit of a decompressed body.
        record: limit of one record.
        document: limit of a body that is one JSON document.
        keep: reserves memory for an unfinished record; raises an error if the gate has no more.
        threads: separate from those of asyncio, in which the gate connects to the daemon.
    """

    body: int
    record: int
    document: int
    keep: Callable[[int], None]
    threads: Executor


Expand = Callable[[bytes], Iterator[bytes]]
"""Decompresses a chunk in parts of bounded size; b"" ends the body. Raises InvalidInput for damage or a truncation."""


async def expanded(chunks: AsyncIterator[bytes], encoding: str, sizes: Sizes) -> AsyncIterator[bytes]:
    """Decompress a body in parts."""
    if encoding not in _ENCODINGS:
        known = ", ".join(filter(None, _ENCODINGS))
        raise HttpError(415, "encoding", f"Content-Encoding {encoding[:40]!r} is not known", hint=f"there are {known}")
    expand = _ENCODINGS[encoding]()
    total = 0
    async for chunk in chunks:
        for part in expand(chunk) if chunk else ():
            total += len(part)
            if total > sizes.body:
                raise _too_large(
                    "the body", sizes.body, "send it in several requests; body_max_bytes in [limits] of the gate"
                )
            yield part
    for part in expand(b""):
        yield part


async def text_payloads(parts: AsyncIterator[bytes], sizes: Sizes) -> AsyncIterator[Payload]:
    """Yield lines, each of which is a record; the last one may lack its newline."""
    async for lines in _lines(parts, sizes):
        yield Payload(lines, columns=False)


async def json_object_payloads(
    parts: AsyncIterator[bytes], sizes: Sizes, *, bare: bool = False
) -> AsyncIterator[Payload]:
    """Yield records from lines that are JSON objects, or with ``bare`` values."""
    number = 1
    async for lines in _lines(parts, sizes):
        payloads: Iterable[bytes] = json_payloads(lines, "the body", number, None, bare=bare)
        if len(lines) > FRAME_MAX_BYTES:  # a single one; others are answered as far as json releases the GIL
            payloads = await asyncio.get_running_loop().run_in_executor(sizes.threads, list, payloads)
        for payload in payloads:
            yield Payload(payload, columns=True)
        number += lines.count(b"\n")


async def json_document_payloads(
    parts: AsyncIterator[bytes], sizes: Sizes, *, bare: bool = False
) -> AsyncIterator[Payload]:
    """Yield records from a body that is a JSON object or an array of them, or with ``bare`` of values."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > sizes.document:
            raise _too_large("a JSON document", sizes.document, "Content-Type: application/x-ndjson takes more")
        sizes.keep(len(body))
    sizes.keep(len(body) + _ELEMENT_BYTES * body.count(b","))  # every few bytes may be a record
    lines = await asyncio.get_running_loop().run_in_executor(sizes.threads, _on_lines, bytes(body))

    async def once() -> AsyncIterator[bytes]:
        yield lines

    async for payload in json_object_payloads(once(), sizes, bare=bare):
        yield payload


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


async def single_payload(parts: AsyncIterator[bytes], sizes: Sizes) -> AsyncIterator[Payload]:
    """Yield the whole body as one record."""
    value = bytearray()
    async for part in parts:
        value += part
        if len(value) > sizes.record:
            raise _too_large("the record", sizes.record, _LARGER)
        sizes.keep(len(value))
    whole = bytes(value)
    value.clear()  # its memory, before there is a payload of the same size
    for payload in column_payloads([whole]):
        yield Payload(payload, columns=True)


BODIES: Mapping[str, Callable[[AsyncIterator[bytes], Sizes], AsyncIterator[Payload]]] = {
    "text/plain": text_payloads,
    "application/x-ndjson": json_object_payloads,
    "application/ndjson": json_object_payloads,
    "application/jsonl": json_object_payloads,
    "application/json": json_document_payloads,
    "application/octet-stream": single_payload,
}
"""Functions that divide a body into records, by its media type."""
BARE_BODIES: Mapping[str, Callable[[AsyncIterator[bytes], Sizes], AsyncIterator[Payload]]] = {
    media_type: partial(cut, bare=True)
    for media_type, cut in BODIES.items()
    if cut in (json_object_payloads, json_document_payloads)
}
"""The same for bodies of JSON values that become the values of records."""


async def _lines(parts: AsyncIterator[bytes], sizes: Sizes) -> AsyncIterator[bytes]:
    """Yield up to 128 KiB of whole lines at a time, or one longer line. The division depends on the body alone."""
    held = bytearray()
    searched = 0
    async for part in parts:
        held += part
        start = 0
        while len(held) - start >= FRAME_MAX_BYTES:
            within = start + FRAME_MAX_BYTES
            end = held.rfind(b"\n", start, within) + 1 or held.find(b"\n", max(searched, within)) + 1
            if (end or len(held)) - start > max(sizes.record + 1, FRAME_MAX_BYTES):
                raise _too_large("a line", sizes.record, _LARGER)
            if not end:
                break
            yield _checked(bytes(held[start:end]), sizes.record)
            start = end
        del held[:start]
        sizes.keep(len(held))
        searched = len(held)
    if held:
        yield _checked(bytes(held) if held.endswith(b"\n") else bytes(held) + b"\n", sizes.record)


def _checked(lines: bytes, limit: int) -> bytes:
    """Return the lines, or raise HttpError (413) if one is too long. Each step skips lines of up to that length."""
    start = 0
    while len(lines) - start > limit + 1:
        start = lines.rfind(b"\n", start, start + limit + 1) + 1
        if not start:
            raise _too_large("a line", limit, _LARGER)
    return lines


def _too_large(what: str, limit: int, hint: str) -> HttpError:
    return HttpError(413, "too-large", f"{what} is larger than {limit} bytes", hint=hint)


def _identity() -> Expand:
    return lambda chunk: iter([chunk] if chunk else [])


def _gzip() -> Expand:
    """Several members may follow each other (RFC 1952)."""
    member = zlib.decompressobj(_GZIP)
    has_begun = False

    def expand(chunk: bytes) -> Iterator[bytes]:
        nonlocal member, has_begun
        if not chunk and has_begun:
            raise InvalidInput("the gzip body is truncated", hint="send it again")
        while chunk:
            has_begun = True
            try:
                part = member.decompress(chunk, _STEP_BYTES)
            except zlib.error as error:
                raise InvalidInput(f"the body is not gzip: {error}", hint="Content-Encoding: gzip") from None
            chunk = member.unconsumed_tail
            if member.eof:
                chunk, member, has_begun = member.unused_data, zlib.decompressobj(_GZIP), False
            if part:
                yield part

    return expand


def _zstd() -> Expand:
    """Several frames may follow each other (RFC 8878)."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = decompressor.decompressobj(read_across_frames=False)
    has_begun = False

    def expand(chunk: bytes) -> Iterator[bytes]:
        nonlocal frame, has_begun
        if not chunk and has_begun:
            raise InvalidInput("the zstd body is truncated", hint="send it again")
        for start in range(0, len(chunk), _ZSTD_STEP_BYTES):
            step = chunk[start : start + _ZSTD_STEP_BYTES]
            while step:
                has_begun = True
                try:
                    part = frame.decompress(step)
                except zstandard.ZstdError as error:
                    raise InvalidInput(f"the body is not zstd: {error}", hint="Content-Encoding: zstd") from None
                step = b""
                if frame.eof:
                    step, frame, has_begun = frame.unused_data, decompressor.decompressobj(), False
                if part:
                    yield part

    return expand


_ENCODINGS: Mapping[str, Callable[[], Expand]] = {
    "": _identity,
    "identity": _identity,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
}

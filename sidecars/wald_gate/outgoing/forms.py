"""The forms in which records go out: lines, JSON objects, events for a browser, an Arrow stream."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from wald.reading.assembler import Batch
from wald_gate.compression import LEVEL
from wald_gate.problems import HttpError

if TYPE_CHECKING:
    import pyarrow as pa

_GZIP = 31  # zlib: a gzip header, and a window of 32 KiB


class Form(Protocol):
    """One response's way to write batches; :meth:`write` is called in order, then :meth:`end`."""

    media_type: str
    heartbeat: bytes
    """What may be sent while nothing comes; b"": nothing may."""

    def write(self, batches: Sequence[Batch]) -> bytes:
        """The records of some batches."""

    def end(self) -> bytes:
        """What stands behind the last record."""


class Raw:
    """The value of each record, and a newline. A heartbeat is an empty line, like a record without a value."""

    media_type = "application/octet-stream"
    heartbeat = b"\n"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return b"".join(batch.raw() for batch in batches)

    def end(self) -> bytes:
        return b""


class Ndjson:
    """A JSON object a line, as ``wald read --jsonl`` writes it, but what is no text in base64."""

    media_type = "application/x-ndjson"
    heartbeat = b"\n"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return "".join(f"{record.to_json(form='base64')}\n" for batch in batches for record in batch.records()).encode()

    def end(self) -> bytes:
        return b""


class Json:
    """A JSON array of the objects of :class:`Ndjson`. A heartbeat is white space between them."""

    media_type = "application/json"
    heartbeat = b"\n"

    def __init__(self) -> None:
        self._before = "["

    def write(self, batches: Sequence[Batch]) -> bytes:
        found = ",\n".join(record.to_json(form="base64") for batch in batches for record in batch.records())
        before, self._before = self._before, ",\n"
        return f"{before}{found}".encode()

    def end(self) -> bytes:
        return b"[]\n" if self._before == "[" else b"]\n"


class Events:
    """Server-Sent Events (HTML, section 9.2): the id is the sequence, so a browser goes on by itself where it was."""

    media_type = "text/event-stream"
    heartbeat = b": nothing new\n"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return "".join(
            f"id: {record.sequence}\ndata: {record.to_json(form='base64')}\n\n"
            for batch in batches
            for record in batch.records()
        ).encode()

    def end(self) -> bytes:
        return b""


class Arrow:
    """A stream of Arrow's IPC format; needs ``wald[arrow]``.

    Raises:
        HttpError: 406, pyarrow is not installed.
    """

    media_type = "application/vnd.apache.arrow.stream"
    heartbeat = b""

    def __init__(self) -> None:
        try:
            import pyarrow as pa
        except ModuleNotFoundError:
            hint = "in a clone of wald, where the gate is: pip install '.[arrow]'"
            raise HttpError(406, "not-acceptable", "the gate has no pyarrow", hint=hint) from None

        from wald.reading.arrow import schema

        self._sink = _Sink()
        self._writer: pa.RecordBatchStreamWriter = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), schema)

    def write(self, batches: Sequence[Batch]) -> bytes:
        from wald.reading.arrow import record_batches

        for each in record_batches(batches):
            self._writer.write_batch(each)
        return self._sink.take()

    def end(self) -> bytes:
        self._writer.close()
        return self._sink.take()


class Gzipped:
    """Another form in gzip. A client can decompress each part when it arrives."""

    heartbeat = b""

    def __init__(self, form: Form) -> None:
        self.media_type = form.media_type
        self._form = form
        self._gzip = zlib.compressobj(LEVEL, wbits=_GZIP)

    def write(self, batches: Sequence[Batch]) -> bytes:
        return self._gzip.compress(self._form.write(batches)) + self._gzip.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._gzip.compress(self._form.end()) + self._gzip.flush()


class _Sink:
    """A file that is only written to, and from which is taken what was written."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


FORMS: Mapping[str, type[Raw | Ndjson | Json | Events | Arrow]] = {
    "raw": Raw,
    "ndjson": Ndjson,
    "json": Json,
    "events": Events,
    "arrow": Arrow,
}
BY_MEDIA_TYPE: Mapping[str, str] = {
    Raw.media_type: "raw",
    "text/plain": "raw",
    Ndjson.media_type: "ndjson",
    Json.media_type: "json",
    Events.media_type: "events",
    Arrow.media_type: "arrow",
}
"""The form that an Accept header asks for."""

"""Requests and responses specific to HTTP; :mod:`wald.status.schema` has those shared with the commands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from wald.format.work import TRIES_MAX
from wald.work import deliveries
from wald.work.group import WORKER_MAX

NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$"
"""Names of routes and groups, as a pattern of JSON Schema."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Printable text, as far as all regex dialects can express it: no control characters."""
WAIT = (
    r"^((\d{1,2}|[12]\d{2})(\.\d{1,9})?|300(\.0{1,9})?) ?s?$|^[0-4](\.\d{1,9})? ?m$|^5(\.0{1,9})? ?m$"
    r"|^(\d{1,5}|[12]\d{5})(\.\d{1,9})? ?ms$|^300000(\.0{1,9})? ?ms$"
)
"""A duration of up to 300 s."""
SEQUENCE_MAX = (1 << 63) - 1
GroupName = Annotated[str, Meta(max_length=127, extra_json_schema={"pattern": NAME})]
WaitTime = Annotated[str, Meta(max_length=20, extra_json_schema={"pattern": WAIT})]


class Shape(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request; unknown fields are errors, so that a misspelt one is noticed."""


class Stored(Struct):
    """The range of durable records; it may include sequences of other producers."""

    first: int
    last: int
    count: int


class Problem(Struct, omit_defaults=True):
    """An error (RFC 9457): a code for programs, a sentence and a hint for people.

    Attributes:
        stored: the durable part of a request that failed later.
        next: the sequence after requested records that were deleted or are unreadable.
    """

    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    stored: Stored | None = None
    next: int | None = None


class Cursor(Struct):
    """Progress of a group on a route."""

    sequence: int
    state: str
    message: str = ""


class Health(Struct, omit_defaults=True):
    """Health of the gate: a status word for programs, and the reason."""

    status: str
    detail: str = ""


class CursorPosition(Shape):
    """Position of a group; 0: nothing is processed, earliest: only deleted records are, end: all records are."""

    sequence: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)] | Literal["earliest", "end"]
    rewind: bool = False


_encoder = msgspec.json.Encoder()


def encoded(shape: Any) -> bytes:
    """Return ``shape`` as JSON; the surrogates of a path that is not UTF-8 are escaped."""
    try:
        return _encoder.encode(shape)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(shape), separators=(",", ":")).encode()


LAST_EVENT_ID: dict[str, Any] = {
    "type": "string",
    "pattern": "^[0-9]{0,19}$",
    "description": "The sequence after which Server-Sent Events continue.",
}


class StoredRecord(Struct, omit_defaults=True):
    """A record as ``wald read --format json`` writes it, with bytes that are not text in base64.

    Times are in nanoseconds since 1970.
    """

    sequence: int
    route: str
    append_time_ns: int
    event_time_ns: int | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | str | None = None
    headers_base64: str | None = None
    terminated: bool = True
    value: str | None = None
    value_base64: str | None = None


class Event(Struct):
    """A Server-Sent Event: a record, with its sequence as id."""

    id: Annotated[str, Meta(pattern="^[0-9]+$")]
    data: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/json"})]


class RouteMade(Struct):
    """A route that now exists."""

    route: str


class Cut(Struct):
    """The active segment; ``cut`` is false if it was empty, so there was nothing to cut."""

    cut: bool
    segment: int


RECORDS_MAX = 10_000
BYTES_MAX = 16 << 20
LEASE_SECONDS_MAX = 12 * 3600
WAIT_SECONDS_MAX = 300

Worker = Annotated[str, Meta(min_length=1, max_length=WORKER_MAX, extra_json_schema={"pattern": PRINTABLE})]
Sequence = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Sequences = Annotated[list[Sequence], Meta(max_length=100_000)]
LeaseSeconds = Annotated[float, Meta(ge=0.001, le=LEASE_SECONDS_MAX)]


class Lease(Shape):
    """A lease of records for a worker; ``done`` are records that it has processed."""

    worker: Worker
    max_records: Annotated[int, Meta(ge=1, le=RECORDS_MAX)] = 100
    max_bytes: Annotated[int, Meta(ge=1, le=BYTES_MAX)] = 1 << 20
    lease_for: LeaseSeconds = 30.0
    wait: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] | WaitTime = 0.0
    done: Sequences = field(default_factory=list)


class Ack(Shape):
    """Records that a worker has processed."""

    worker: Worker
    sequences: Sequences


class Nack(Ack):
    """Records that a worker returns, to be redelivered after a delay; the reason is for a dead letter."""

    delay: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    reason: Annotated[str, Meta(max_length=10_000)] = ""


class Extend(Ack):
    """Records whose lease a worker extends, starting now."""

    lease_for: LeaseSeconds = 30.0


class Release(Shape):
    """Records to release from a worker; without ``sequences``, all of them."""

    worker: Worker
    sequences: Sequences | None = None


class LeasedRecord(Struct, omit_defaults=True):
    """A leased record and the number of its deliveries, with bytes that are not text in base64.

    Times are in nanoseconds since 1970.
    """

    sequence: int
    route: str
    append_time_ns: int
    tries: Annotated[int, Meta(ge=1, le=TRIES_MAX + 1)]
    value: str | None = None
    value_base64: str | None = None
    event_time_ns: int | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | str | None = None
    headers_base64: str | None = None
    terminated: bool = True


class Refusal(Struct, omit_defaults=True):
    """A record that the worker does not hold, and the worker that holds it now, if any."""

    sequence: int
    holder: str = ""


def refusals(refused: Iterable[deliveries.Refusal]) -> list[Refusal]:
    return [Refusal(*each) for each in sorted(refused)]


class Leased(Struct, omit_defaults=True):
    """The leased records (none if none arrived in time) and the rejected ones of ``done``."""

    records: list[LeasedRecord]
    refused: list[Refusal] = field(default_factory=list)


class Settled(Struct):
    """The records for which the request was rejected; for all others it was applied."""

    refused: list[Refusal]


class Released(Struct):
    """The number of released records."""

    released: int


class Removed(Struct):
    """A group that no longer exists."""

    route: str
    group: str


class PendingQuery(Shape):
    """The query of ``pending``; the limit applies to each kind."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000

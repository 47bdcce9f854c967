"""The shapes of what is asked of a work group, and of what is answered; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct, field

from wald.format.work import TRIES_MAX
from wald.work import deliveries
from wald.work.group import WORKER_MAX
from wald_gate.shapes import PRINTABLE, Shape, WaitTime

RECORDS_MAX = 10_000
BYTES_MAX = 16 << 20
LEASE_SECONDS_MAX = 12 * 3600
WAIT_SECONDS_MAX = 300

Consumer = Annotated[str, Meta(min_length=1, max_length=WORKER_MAX, extra_json_schema={"pattern": PRINTABLE})]
Sequence = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Sequences = Annotated[list[Sequence], Meta(max_length=100_000)]
LeaseSeconds = Annotated[float, Meta(ge=0.001, le=LEASE_SECONDS_MAX)]


class Lease(Shape):
    """Records for a consumer, which has them for so long; ``done`` is what it has processed of those before."""

    consumer: Consumer
    max_records: Annotated[int, Meta(ge=1, le=RECORDS_MAX)] = 100
    max_bytes: Annotated[int, Meta(ge=1, le=BYTES_MAX)] = 1 << 20
    lease_for: LeaseSeconds = 30.0
    wait: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] | WaitTime = 0.0
    done: Sequences = field(default_factory=list)


class Ack(Shape):
    """What a consumer has processed."""

    consumer: Consumer
    sequences: Sequences


class Nack(Shape):
    """What a consumer gives back, to be delivered again after a delay; the reason is for a dead letter."""

    consumer: Consumer
    sequences: Sequences
    delay: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    reason: Annotated[str, Meta(max_length=10_000)] = ""


class Extend(Shape):
    """What a consumer needs for longer: for so long from now on."""

    consumer: Consumer
    sequences: Sequences
    lease_for: LeaseSeconds = 30.0


class Release(Shape):
    """What is taken back from a consumer; without ``sequences`` all that it has."""

    consumer: Consumer
    sequences: Sequences | None = None


class LeasedRecord(Struct, omit_defaults=True):
    """A record as ``wald read --format json`` writes it, but what is no text in base64; and how often it was delivered.

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
    """A record for which it did not count, and the consumer that has it by now, if one has."""

    sequence: int
    holder: str = ""


def refusals(refused: Iterable[deliveries.Refusal]) -> list[Refusal]:
    """As they are answered."""
    return [Refusal(*each) for each in sorted(refused)]


class Leased(Struct, omit_defaults=True):
    """What a consumer has got; nothing, if nothing came while it waited. And for which of ``done`` it did not count."""

    records: list[LeasedRecord]
    refused: list[Refusal] = field(default_factory=list)


class Settled(Struct):
    """For which records it did not count; for all others it did, and that is on disk where it says so."""

    refused: list[Refusal]


class Released(Struct):
    """How many records were taken back."""

    released: int


class Removed(Struct):
    """A group that is no longer there."""

    route: str
    group: str


class PendingQuery(Shape):
    """The parameters of ``pending``; ``limit`` is of each kind."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000

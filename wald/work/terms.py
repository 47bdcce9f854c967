"""What a work group goes by, and what it gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from wald.format.records import Record

FOREVER_SECONDS = 1e9
"""A lease for so long has no end."""


class Clock(Protocol):
    """Two clocks, as :mod:`time` has them."""

    def monotonic_ns(self) -> int:
        """Never set; leases are measured by it."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970; it may be set."""


class Delivery(NamedTuple):
    """A record that a worker has got.

    Attributes:
        tries: how often it was delivered, this time included.
    """

    record: Record
    tries: int


class Failure(NamedTuple):
    """Why a record came back the last time.

    Attributes:
        reason: as its worker said; "" if it did not.
        tries: how often it has failed, as its workers count by themselves; 0: they do not.
    """

    reason: str
    tries: int


@dataclass(frozen=True, slots=True)
class Pending:
    """Records that were delivered and are not acknowledged.

    Attributes:
        first, last: sequences, both ends included.
        consumer: the one that has them.
        idle: seconds since they were leased; left: until the lease ends.
        tries: how often the first of them was delivered.
    """

    first: int
    last: int
    consumer: str
    idle: float
    left: float
    tries: int


@dataclass(frozen=True, slots=True)
class Rules:
    """How a group delivers.

    Attributes:
        by_key: whether records of one key are with one worker at a time, in order.
        window: how many sequences may lie between the ack floor and the newest record that was delivered.
        max_tries: give a record up after so many deliveries; None: never.
        dead_letter: the route for records that are given up.
    """

    by_key: bool
    window: int
    max_tries: int | None
    dead_letter: str

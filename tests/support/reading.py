"""A log with segments of all three forms, the times of its commits, and shortcuts for reading."""

from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import TypeVar

from logs import SECOND_NS, START_NS, Built

from wald.format.records import Record
from wald.reading.assembler import Batch

T = TypeVar("T")


def result_of(way: Generator[object, None, T]) -> T:
    """Return the result of a generator."""
    while True:
        try:
            next(way)
        except StopIteration as end:
            result: T = end.value
            return result


def seen(records: object) -> list[tuple[int, str, bytes]]:
    """Return the fields that distinguish records."""
    assert not isinstance(records, list)
    return [(record.sequence, record.route, record.value) for record in records]  # type: ignore[attr-defined]


def numbered(records: Iterator[Record]) -> list[tuple[int, bytes]]:
    """Return sequences and values."""
    return [(record.sequence, record.value) for record in records]


def until_it_waits(follower: Iterator[Batch | int | None]) -> list[tuple[int, bytes]]:
    """Return the records that a follower is given until it waits."""
    batches = takewhile(lambda found: not isinstance(found, int), follower)
    return [pair for batch in batches if isinstance(batch, Batch) for pair in numbered(batch.records())]


def values(built: Built, *args: object, **options: object) -> list[bytes]:
    """Return the values of a read."""
    return [record.value for record in built.log.records(*args, **options)]  # type: ignore[arg-type]


def three_forms(built: Built) -> None:
    """Write records 1 to 6 to a sealed, a cut and the active segment, two in each, on routes a and b."""
    for base in (1, 3, 5):
        built.lines("a", [b"a%d" % base])
        built.lines("b", [b"b%d" % (base + 1)])
        if base < 5:
            built.cut()
        if base == 1:
            built.seal()


def moment(seconds: float) -> datetime:
    """Return the time ``seconds`` after the log began; commits happen at 1, 2, 3, …"""
    return datetime.fromtimestamp(START_NS / SECOND_NS, UTC) + timedelta(seconds=seconds)

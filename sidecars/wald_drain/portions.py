"""Portions: the records that one run of the command gets, in order, as bytes for its stdin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from wald.errors import Damaged
from wald.format.records import Record

PORTION_MAX_BYTES = 8 << 20  # of values, so that a portion of any number of records fits into memory


class StdinFormat(StrEnum):
    """How the command gets records."""

    RAW = "raw"  # each value and a newline
    JSON = "json"  # one object per line, as written by ``wald read --format json``


@dataclass(frozen=True, slots=True)
class Portion:
    """Records of one route, at least one."""

    records: Sequence[Record]

    @property
    def first(self) -> int:
        return self.records[0].sequence

    @property
    def last(self) -> int:
        return self.records[-1].sequence

    @property
    def count(self) -> int:
        return len(self.records)

    def halves(self) -> tuple[Portion, Portion]:
        """Both halves of a portion with at least two records."""
        middle = self.count // 2
        return Portion(self.records[:middle]), Portion(self.records[middle:])

    def encoded(self, form: StdinFormat) -> bytes:
        """The bytes for the command's stdin."""
        if form is StdinFormat.RAW:
            return b"".join(record.value + b"\n" for record in self.records)
        return "".join(record.to_json() + "\n" for record in self.records).encode()


def portions(records: Iterable[Record], *, records_max: int, bytes_max: int = PORTION_MAX_BYTES) -> Iterator[Portion]:
    """All of ``records``, each portion with ``records_max`` of them, or ending with the one that reaches ``bytes_max``.

    Raises:
        Damaged: from ``records``, after the records before the damage were given out.
    """
    taken: list[Record] = []
    taken_bytes = 0
    try:
        for record in records:
            taken.append(record)
            taken_bytes += len(record.value)
            if len(taken) == records_max or taken_bytes >= bytes_max:
                yield Portion(taken)
                taken, taken_bytes = [], 0
    except Damaged:
        if taken:
            yield Portion(taken)
        raise
    if taken:
        yield Portion(taken)

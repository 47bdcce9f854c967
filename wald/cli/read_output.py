"""What ``wald read`` writes of each batch: all of it or what matches, as bytes or as JSON, with times or without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wald.cli.streams import write_stdout
from wald.format.times import utc

if TYPE_CHECKING:
    from wald.format.records import Record
    from wald.reading.assembler import Batch, Senders
    from wald.reading.pattern import Matcher

_WRITTEN_BYTES = 256 << 10  # of JSON, at once


class Output:
    """Writes batches to stdout.

    Args:
        senders: who sent them, for one JSON object for each record; None: its bytes and a newline instead.
        times: whether each record has its append time, readable.
        matcher: which records are written; None: all.
        limit: at most so many records are written; None: no limit.
    """

    def __init__(self, senders: Senders | None, *, times: bool, matcher: Matcher | None, limit: int | None) -> None:
        self._senders, self._times, self._matcher, self._left = senders, times, matcher, limit

    @property
    def full(self) -> bool:
        """Whether no more record is to be written."""
        return self._left == 0

    def write(self, batch: Batch) -> int:
        """Write a batch; returns the last sequence that is done with."""
        if self._matcher is None and self._left is None:
            self._write_all(batch)
            return batch.last_sequence
        found = self._matcher.matching_records(batch) if self._matcher else batch.records()
        records = list(islice(found, self._left))
        self._write_records(batch, records)
        if self._left is not None:
            self._left -= len(records)
        return records[-1].sequence if self.full else batch.last_sequence

    def _write_all(self, batch: Batch) -> None:
        if self._senders is None and not self._times:
            write_stdout(batch.raw())
        elif self._senders is None and not batch.is_columns:
            before = _before(batch.append_time_ns)
            write_stdout(before + bytes(batch.raw())[:-1].replace(b"\n", b"\n" + before) + b"\n")
        else:
            self._write_records(batch, batch.records())

    def _write_records(self, batch: Batch, records: Iterable[Record]) -> None:
        texts = self._lines(batch, records) if self._senders is None else self._objects(batch, records, self._senders)
        parts: list[bytes] = []
        size = 0
        for text in texts:
            parts.append(text)
            size += len(text)
            if size > _WRITTEN_BYTES:
                write_stdout(b"".join(parts))
                parts, size = [], 0
        write_stdout(b"".join(parts))

    def _lines(self, batch: Batch, records: Iterable[Record]) -> Iterator[bytes]:
        before = _before(batch.append_time_ns) if self._times else b""
        for record in records:
            yield before + record.value + b"\n"

    def _objects(self, batch: Batch, records: Iterable[Record], senders: Senders) -> Iterator[bytes]:
        sender = {"sender": senders.of(batch.segment, batch.header).to_json()}
        for record in records:
            yield (with_times(record, sender) if self._times else record.to_json(sender)).encode() + b"\n"


def _before(time_ns: int) -> bytes:
    return f"{utc(time_ns, 9)} ".encode()


def with_times(record: Record, more: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Its object, with ``more`` fields, and with readable times as the first keys."""
    happened = "" if record.event_time_ns is None else f'"event_time": "{utc(record.event_time_ns, 9)}", '
    return f'{{"append_time": "{utc(record.append_time_ns, 9)}", {happened}{record.to_json(more)[1:]}'

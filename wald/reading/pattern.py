"""Search for records that match a pattern.

In a pattern, ``^`` and ``$`` match the ends of a record's value. If every match must contain some string, whole batches
without that string are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import compress, groupby
from operator import not_
from re import _constants, _parser  # type: ignore[attr-defined, unused-ignore]  # no public API parses a pattern
from typing import Any

from stringzilla import count as count_bytes
from stringzilla import find as find_bytes
from stringzilla import translate

from wald.format.records import Record, decode_columns
from wald.reading.assembler import Batch

_LOWER = bytes(range(256)).lower()
_LINES_SEARCHED = 8  # in the time needed to locate one line


class BadPattern(ValueError):
    """Invalid regular expression."""


class Matcher:
    """Finder of records that match a pattern or, with ``invert``, do not. ``ignore_case`` is limited to ASCII."""

    def __init__(self, pattern: bytes, *, fixed: bool = False, ignore_case: bool = False, invert: bool = False) -> None:
        source = re.escape(pattern) if fixed else pattern
        try:
            compiled = re.compile(source, re.IGNORECASE if ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadPattern(str(error)) from error
        self._search = compiled.search
        self._invert = invert
        self._folds = bool(compiled.flags & re.IGNORECASE)
        literal = b"" if invert else _required_literal(source, compiled.flags)
        self._literal = literal.lower() if self._folds else literal
        self._folded = bytearray()

    def matches(self, value: bytes) -> bool:
        return (self._search(value) is None) == self._invert

    def cannot_match(self, data: bytes | memoryview) -> bool:
        """Return True if ``data``, lines or columns, contains no matching record."""
        return bool(self._literal) and find_bytes(self._fold_case(data), self._literal) < 0

    def find_matches(self, batch: Batch) -> list[tuple[int, bytes]]:
        """Return the sequence and value of each match."""
        text = self._fold_case(batch.payload)
        occurrences = count_bytes(text, self._literal) if self._literal else batch.count
        if not occurrences:
            return []
        if batch.is_columns:
            values = decode_columns(batch.payload).values.to_list()[batch.skipped : batch.skipped + batch.count]
            return self._match_values([value or b"" for value in values], batch.first_sequence)
        payload = bytes(batch.payload)
        if occurrences * _LINES_SEARCHED < batch.count:
            return list(self._match_lines(payload, text, batch))
        return self._match_values(payload.split(b"\n", batch.count)[: batch.count], batch.first_sequence)

    def matching_records(self, batch: Batch) -> Iterator[Record]:
        if not batch.is_columns:
            for sequence, value in self.find_matches(batch):
                terminated = batch.terminated or sequence < batch.last_sequence
                yield Record(batch.route, sequence, value, batch.append_time_ns, terminated=terminated)
        elif not self.cannot_match(batch.payload):
            yield from (record for record in batch.records() if self.matches(record.value))

    def _fold_case(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return ``data``, in lower case if case is ignored. The result is valid until the next call."""
        if not self._folds or not self._literal:
            return data
        if len(self._folded) < len(data):
            self._folded = bytearray(len(data))  # reused: new memory takes longer than the translation
        folded = memoryview(self._folded)[: len(data)]
        translate(data, _LOWER, out=folded)
        return folded

    def _match_values(self, values: list[bytes], first: int) -> list[tuple[int, bytes]]:
        matches = map(self._search, values)
        return list(compress(enumerate(values, first), map(not_, matches) if self._invert else matches))

    def _match_lines(self, payload: bytes, text: bytes | memoryview, batch: Batch) -> Iterator[tuple[int, bytes]]:
        at = 0  # start of the next line
        sequence = batch.first_sequence
        while sequence <= batch.last_sequence and (literal_at := find_bytes(text, self._literal, at)) >= 0:
            start = max(at, payload.rfind(b"\n", at, literal_at) + 1)
            sequence += count_bytes(payload, b"\n", at, start)
            end = payload.find(b"\n", literal_at)
            end = len(payload) if end < 0 else end
            if self.matches(value := payload[start:end]):
                yield sequence, value
            sequence, at = sequence + 1, end + 1


def _required_literal(source: bytes, flags: int) -> bytes:
    """Return the longest string known to be in every match; empty if unknown."""
    runs = groupby(_literal_bytes(_parser.parse(source, flags)), key=lambda part: part is not None)
    return max((bytes(part for part in run if part is not None) for _, run in runs), key=len, default=b"")


def _literal_bytes(parsed: Any) -> Iterator[int | None]:  # the parser has no types
    """Yield the bytes adjacent in every match, and None for anything else."""
    for operation, argument in parsed:
        if operation is _constants.LITERAL:
            yield argument
        elif operation is _constants.SUBPATTERN and not any(argument[1:3]):  # without its own flags
            yield from _literal_bytes(argument[3])
        else:
            yield None

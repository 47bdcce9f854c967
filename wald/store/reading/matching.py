"""Which records a pattern is found in: a regular expression of Python on bytes, or a fixed string.

A pattern is looked for in the value of one record after the other, so ``^`` and ``$`` are where a record begins and
ends. Most batches hold no match, and are passed over without a look at each record: a string that every match must
contain is looked for in all of a batch at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import compress, groupby
from operator import not_
from re import _constants, _parser  # type: ignore[attr-defined, unused-ignore]  # nothing public shows what a pattern is made of
from typing import Any

from stringzilla import count as count_bytes
from stringzilla import find as find_bytes
from stringzilla import translate

from wald.format.columns import decode
from wald.format.record import Record
from wald.store.reading.batches import Batch

_LOWER = bytes(range(256)).lower()
_LINES_SEARCHED = 8  # in the time in which a line is found by its place in the batch


class BadPattern(ValueError):
    """A pattern is not a regular expression."""


class Matcher:
    """Finds the records that match ``pattern``, or with ``invert`` those that do not.

    Args:
        fixed: whether the pattern is a string to be found as it is, and no regular expression.
        ignore_case: of the letters of ASCII.

    Raises:
        BadPattern: it is not a regular expression.
    """

    def __init__(self, pattern: bytes, *, fixed: bool = False, ignore_case: bool = False, invert: bool = False) -> None:
        source = re.escape(pattern) if fixed else pattern
        try:
            compiled = re.compile(source, re.IGNORECASE if ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadPattern(str(error)) from error
        self._search = compiled.search
        self._invert = invert
        self._folds = bool(compiled.flags & re.IGNORECASE)
        literal = b"" if invert else _literal(source, compiled.flags)
        self._literal = literal.lower() if self._folds else literal
        self._folded = bytearray()

    def matches(self, value: bytes) -> bool:
        """Whether a record with this value is one to find."""
        return (self._search(value) is None) == self._invert

    def absent(self, data: bytes | memoryview) -> bool:
        """Whether no record that lies in these bytes, as a line or in columns, is one to find."""
        return bool(self._literal) and find_bytes(self._text(data), self._literal) < 0

    def found(self, batch: Batch) -> list[tuple[int, bytes]]:
        """Sequence and value of the records of ``batch`` to find, in order."""
        text = self._text(batch.payload)
        occurrences = count_bytes(text, self._literal) if self._literal else batch.count
        if not occurrences:
            return []
        if batch.is_columns:
            values = decode(batch.payload).values.to_list()[batch.skipped : batch.skipped + batch.count]
            return self._among([value or b"" for value in values], batch.first_sequence)
        payload = bytes(batch.payload)
        if occurrences * _LINES_SEARCHED < batch.count:
            return list(self._lines(payload, text, batch))
        return self._among(payload.split(b"\n", batch.count)[: batch.count], batch.first_sequence)

    def records(self, batch: Batch) -> Iterator[Record]:
        """The records of ``batch`` to find, in order."""
        if not batch.is_columns:
            for sequence, value in self.found(batch):
                ended = batch.terminated or sequence < batch.last_sequence
                yield Record(batch.route, sequence, value, batch.append_time_ns, terminated=ended)
        elif not self.absent(batch.payload):
            yield from (record for record in batch.records() if self.matches(record.value))

    def _text(self, data: bytes | memoryview) -> bytes | memoryview:
        """The bytes in which the literal is looked for, until the next call."""
        if not self._folds or not self._literal:
            return data
        if len(self._folded) < len(data):
            self._folded = bytearray(len(data))  # one for all: new memory takes longer than what is done with it
        folded = memoryview(self._folded)[: len(data)]
        translate(data, _LOWER, out=folded)
        return folded

    def _among(self, values: list[bytes], first: int) -> list[tuple[int, bytes]]:
        """Those of consecutive records to find, without a step of Python for each."""
        matches = map(self._search, values)
        return list(compress(enumerate(values, first), map(not_, matches) if self._invert else matches))

    def _lines(self, payload: bytes, text: bytes | memoryview, batch: Batch) -> Iterator[tuple[int, bytes]]:
        """The lines to find, from one place at which the literal is found in ``text`` to the next."""
        at = 0  # where the line begins that comes next
        sequence = batch.first_sequence
        while sequence <= batch.last_sequence and (found := find_bytes(text, self._literal, at)) >= 0:
            start = max(at, payload.rfind(b"\n", at, found) + 1)
            sequence += count_bytes(payload, b"\n", at, start)
            end = payload.find(b"\n", found)
            end = len(payload) if end < 0 else end
            if self.matches(value := payload[start:end]):
                yield sequence, value
            sequence, at = sequence + 1, end + 1


def _literal(source: bytes, flags: int) -> bytes:
    """The longest string found in what ``source`` matches; empty if none is known."""
    runs = groupby(_parts(_parser.parse(source, flags)), key=lambda part: part is not None)
    return max((bytes(part for part in run if part is not None) for _, run in runs), key=len, default=b"")


def _parts(parsed: Any) -> Iterator[int | None]:  # Any: the parser has no types
    """The bytes that must follow each other; None for anything else."""
    for operation, argument in parsed:
        if operation is _constants.LITERAL:
            yield argument
        elif operation is _constants.SUBPATTERN and not any(argument[1:3]):  # without flags of its own
            yield from _parts(argument[3])
        else:
            yield None

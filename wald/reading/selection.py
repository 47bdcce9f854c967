"""Selection of records: pattern, routes, start, stop.

A pattern matches the value of one record, so ``^`` and ``$`` are its beginning and end. Batches without a string that
every match must contain are skipped as a whole.

Ranges of sequences include both ends everywhere in wald (``first`` and ``last``), so that a printed range can be typed.
A datetime starts at the first record appended then or later, even if it does not exist yet, and stops before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import compress, groupby
from operator import not_
from re import _constants, _parser  # type: ignore[attr-defined, unused-ignore]  # nothing public shows what a pattern is made of
from typing import Any, Literal

from stringzilla import count as count_bytes
from stringzilla import find as find_bytes
from stringzilla import translate

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import DEFAULT_GROUP
from wald.format.records import Record, decode_columns
from wald.format.times import nanoseconds
from wald.reading.assembler import Batch
from wald.retention.cursors import CursorState, read_cursor
from wald.segments.durable_end import lost_head
from wald.segments.seek import end_of, sequence_since, sequence_until
from wald.segments.view import View

_LOWER = bytes(range(256)).lower()
_LINES_SEARCHED = 8  # searched in the time that finding one line by its place in the batch takes


class BadPattern(ValueError):
    """Error for an invalid regular expression."""


class Matcher:
    """Finder of the records that match ``pattern``, or with ``invert`` of the others.

    Raises BadPattern for an invalid regular expression. Case is ignored only of ASCII letters.
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
        return (self._search(value) is None) == self._invert

    def absent(self, data: bytes | memoryview) -> bool:
        """Return True if these bytes contain no matching record, in lines or in columns."""
        return bool(self._literal) and find_bytes(self._text(data), self._literal) < 0

    def found(self, batch: Batch) -> list[tuple[int, bytes]]:
        """Return sequence and value of the matching records."""
        text = self._text(batch.payload)
        occurrences = count_bytes(text, self._literal) if self._literal else batch.count
        if not occurrences:
            return []
        if batch.is_columns:
            values = decode_columns(batch.payload).values.to_list()[batch.skipped : batch.skipped + batch.count]
            return self._among([value or b"" for value in values], batch.first_sequence)
        payload = bytes(batch.payload)
        if occurrences * _LINES_SEARCHED < batch.count:
            return list(self._lines(payload, text, batch))
        return self._among(payload.split(b"\n", batch.count)[: batch.count], batch.first_sequence)

    def records(self, batch: Batch) -> Iterator[Record]:
        if not batch.is_columns:
            for sequence, value in self.found(batch):
                ended = batch.terminated or sequence < batch.last_sequence
                yield Record(batch.route, sequence, value, batch.append_time_ns, terminated=ended)
        elif not self.absent(batch.payload):
            yield from (record for record in batch.records() if self.matches(record.value))

    def _text(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes to search for the literal, valid until the next call."""
        if not self._folds or not self._literal:
            return data
        if len(self._folded) < len(data):
            self._folded = bytearray(len(data))  # reused: new memory takes longer than the translation
        folded = memoryview(self._folded)[: len(data)]
        translate(data, _LOWER, out=folded)
        return folded

    def _among(self, values: list[bytes], first: int) -> list[tuple[int, bytes]]:
        matches = map(self._search, values)
        return list(compress(enumerate(values, first), map(not_, matches) if self._invert else matches))

    def _lines(self, payload: bytes, text: bytes | memoryview, batch: Batch) -> Iterator[tuple[int, bytes]]:
        at = 0  # the beginning of the next line
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
    """Return the longest known string in every match of ``source``; empty if unknown."""
    runs = groupby(_parts(_parser.parse(source, flags)), key=lambda part: part is not None)
    return max((bytes(part for part in run if part is not None) for _, run in runs), key=len, default=b"")


def _parts(parsed: Any) -> Iterator[int | None]:  # Any: the parser has no types
    """Yield bytes that must be adjacent; None for anything else."""
    for operation, argument in parsed:
        if operation is _constants.LITERAL:
            yield argument
        elif operation is _constants.SUBPATTERN and not any(argument[1:3]):  # without its own flags
            yield from _parts(argument[3])
        else:
            yield None


Named = Literal["earliest", "end", "cursor"]
Start = Named | int | datetime
"""Start of reading: the oldest record, after the head, after a group's processed records, a sequence or a time."""

Stop = int | datetime
"""End of reading: this sequence, or before the first record appended at this time or later."""

NO_SEQUENCE = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected records, in numbers.

    Attributes:
        first: the lowest sequence, unless ``floors`` has another for the route.
        last: the highest; a time limit may end the selection earlier.
        from_ns, until_ns: append times, from ≤ t < until.
        floors: of each route with a cursor of ``group``, the sequence after it; routes in ``fresh`` begin at 1.
    """

    routes: frozenset[str] | None
    first: int
    floors: dict[str, int] = field(default_factory=dict)
    last: int = NO_SEQUENCE
    from_ns: int = -(1 << 63)
    until_ns: int = (1 << 63) - 1
    earliest: bool = False
    fresh: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP

    def floor(self, route: str) -> int:
        return self.floors.get(route, self.first)


def select(view: View, route: str | None, start: Start, stop: Stop | None, group: str) -> Selection:
    if route is not None:
        view.root.require_route(route)
    routes = None if route is None else frozenset([route])
    last = _positive(stop) if isinstance(stop, int) else NO_SEQUENCE
    selection = replace(_begin(view, routes, start, group), last=last)
    if isinstance(stop, datetime):
        selection = replace(selection, until_ns=nanoseconds(stop))
    _check_order(view, start, stop)
    return selection


def _check_order(view: View, start: Start, stop: Stop | None) -> None:
    """Refuse a sequence and a time that no record can lie between, now or later."""
    with suppress(Damaged):  # the order is unknown then
        match start, stop:
            case int(), datetime():
                first = sequence_until(view, nanoseconds(stop))
                if first <= start < end_of(view):
                    raise InvalidInput(
                        f"record {start} was appended at {stop.isoformat()} or later: the end is before the start",
                        case="start-appended-after-the-end",
                        first=first,
                    )
            case datetime(), int():
                last = sequence_since(view, nanoseconds(start)) - 1
                if stop <= last:
                    raise InvalidInput(
                        f"record {stop} was appended before {start.isoformat()}: the end is before the start",
                        case="stop-appended-before-the-start",
                        last=last,
                    )


def _begin(view: View, routes: frozenset[str] | None, start: Start, group: str) -> Selection:
    if isinstance(start, datetime):
        time_ns = nanoseconds(start)
        return Selection(routes, sequence_since(view, time_ns), from_ns=time_ns)
    if start == "earliest":
        return Selection(routes, 1, earliest=True)
    if start == "end":
        return Selection(routes, end_of(view))
    if start == "cursor":
        return _after_cursors(view, routes, group)
    if not isinstance(start, int):
        raise InvalidInput(f"invalid start: {start!r}", case="start-unknown")
    end = end_of(view)
    if _positive(start) > end:
        if view.bound.lost:
            raise lost_head(view.root, view.bound)
        path = view.root.path
        what = " ".join(["", *(routes or ())])
        raise NotFound(
            f"{path}: record {start} was never issued; the last one is {end - 1}",
            case="record-not-issued",
            root=path,
            routes=what,
        )
    return Selection(routes, start)


def _after_cursors(view: View, routes: frozenset[str] | None, group: str) -> Selection:
    root, end = view.root, end_of(view)
    floors, fresh = {}, set()
    for name in sorted(routes) if routes is not None else root.route_names():
        cursor = read_cursor(root, name, group, log_id=view.log_id, head_sequence=end - 1)
        if cursor.state is CursorState.VALID:
            floors[name] = cursor.sequence + 1
        elif cursor.state is CursorState.ABSENT:
            floors[name] = 1
            fresh.add(name)
        else:
            raise Damaged(
                f"{cursor.message}; the processed records are unknown",
                case="cursor-unusable",
                root=root.path,
                route=name,
                group=group,
            )
    return Selection(routes, min(floors.values(), default=end), floors, fresh=frozenset(fresh), group=group)


def _positive(sequence: int) -> int:
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", case="sequence-below-one")
    return sequence

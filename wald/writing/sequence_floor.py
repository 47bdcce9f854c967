"""Lower bound for new sequences, above every sequence that a cursor, a work-group journal or a ledger names.

If an older backup of the segments is restored under newer cursors, the cursors would count new records as processed. So
a start skips the sequences up to the cursors and records the skip in ``segments.jsonl``.

Numbers too far beyond the end are ignored: 2^20 records for a cursor that does not name its log, 2^40 otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLines, highest_in_parts
from wald.files.safe_open import open_file, read_regular, read_start
from wald.format.head import CURSOR_MAX_BYTES, BadCursor, decode_cursor
from wald.format.ledger_lines import BadLine, decode_entry
from wald.format.names import WORK_SUFFIX
from wald.format.spans import Spans
from wald.format.work import BadWork, JournalStart, decode_work, last_read

_UNNAMED_LOG_RANGE = 1 << 20
_OUR_LOG_RANGE = 1 << 40
_LAST = re.compile(rb'"last":(\d{1,20})[,}]')
_SEALED = re.compile(rb'"event":"(?:sealed|lost)","base":\d{1,20},"last":(\d{1,20})[,}]')
_START_MAX_BYTES = 1 << 20  # of a journal's first line
_TAIL_BYTES = 256 << 10  # of a journal's end, read first
_DAMAGED_MAX = 1024  # damaged lines
_LINE_MAX_BYTES = 16 << 20  # half a million ranges
_JOURNAL_MAX_BYTES = 64 << 20  # read if that is not enough


@dataclass(slots=True)
class Floor:
    """Highest sequence in use, and the file that names it."""

    last: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)  # about ignored files


def find_floor(root: Root, *, log_id: bytes, next_sequence: int) -> Floor:
    """Find the highest sequence in cursors, journals and the ledgers of deletions and archives.

    Retired routes count too. The ledger of segments is not read: a missing sealed record is damage
    (:func:`last_sealed`).
    """
    floor = Floor(next_sequence - 1)
    for path, sequence, names_log in _named_sequences(root, log_id):
        if sequence <= floor.last:
            continue
        message = f"{path.relative_to(root.path)} is at {sequence}"
        if sequence >= next_sequence + (_OUR_LOG_RANGE if names_log else _UNNAMED_LOG_RANGE):
            floor.warnings.append(f"{message}, too far beyond the last record, {next_sequence - 1}, to be believed")
        else:
            floor.last, floor.reason = sequence, message
    return floor


def _named_sequences(root: Root, log_id: bytes) -> Iterator[tuple[Path, int, bool]]:
    """Yield each cursor, journal and ledger, its sequence, and True unless it is a cursor without a log id."""
    for route in root.route_names():
        try:
            groups, _ = root.cursors(route)
        except OSError:
            continue
        for path in groups.values():
            try:
                lines = decode_cursor(read_start(path, CURSOR_MAX_BYTES + 1))
            except (OSError, Damaged, BadCursor):
                continue  # an unreadable cursor counts as 0
            if lines.log_id in (None, log_id):
                yield path, lines.sequence, lines.log_id is not None
                journal = path.with_suffix(WORK_SUFFIX)
                yield journal, _last_read_by_workers(journal, log_id), True
    for path in (root.ledger / "reclaim.jsonl", root.ledger / "archive.jsonl"):
        yield path, _highest_match(path, _LAST), True


def _last_read_by_workers(journal: Path, log_id: bytes) -> int:
    """Return the last sequence that a work group has read; 0 without a usable journal of this log."""
    try:
        with open_file(journal) as file:
            start, _ = decode_work(file.readline(_START_MAX_BYTES))
            if not isinstance(start, JournalStart) or start.log_id != log_id:
                return 0
            body_start, file_end = file.tell(), file.seek(0, os.SEEK_END)
            length = _TAIL_BYTES
            while True:  # the last relevant line is near the end, except after a snapshot
                file.seek(max(body_start, file_end - length))
                text = file.read(length)
                last = _last_read_in(text)
                # Lines about reads follow the pages of a snapshot, so there are none here.
                if last or length >= min(file_end - body_start, _JOURNAL_MAX_BYTES) or b'{"page": ' in text:
                    return max(last_read(start), last)
                length = min(4 * length, _JOURNAL_MAX_BYTES)
    except (OSError, Damaged, BadWork):
        return 0


def _last_read_in(text: bytes) -> int:
    """Return the last sequence recorded as read, or 0; raise BadWork if too many lines are damaged."""
    end, damaged = len(text), 0
    while (at := text.rfind(b'"in": [', 0, end)) >= 0:  # the last line has the highest sequence
        line_start = text.rfind(b"\n", 0, at) + 1
        data = text[line_start : text.find(b"\n", at, end)]
        with suppress(BadWork):
            if len(data) <= _LINE_MAX_BYTES:
                return last_read(decode_work(data)[0])
        damaged += 1
        if damaged > _DAMAGED_MAX:
            raise BadWork(f"more than {_DAMAGED_MAX} damaged lines")
        end = line_start  # decode a damaged line only once
    return 0


def last_sealed(root: Root, *, next_sequence: int) -> int:
    """Return the highest sealed or lost sequence in the ledger; 0 without one or if it is implausible."""
    sequence = _highest_match(root.ledger / "segments.jsonl", _SEALED, "sealed", "lost")
    return sequence if sequence < next_sequence + _OUR_LOG_RANGE else 0


def is_given_up(root: Root, first: int, last: int) -> bool:
    """Return True if the ledger says that repairs gave up all records from ``first`` to ``last``."""
    lost_spans = Spans()
    with suppress(Damaged):
        for line in LedgerLines(root.ledger / "segments.jsonl").about(first, last):
            if line.is_range("lost"):
                lost_spans.add(line.low, line.high)
    return lost_spans.covers(first, last)


def _highest_match(path: Path, number: re.Pattern[bytes], *events: str) -> int:
    """Return the highest match of ``number`` in intact lines of a ledger, decoding few lines."""
    highest = highest_in_parts(path, *events)
    try:
        data = read_regular(path)
    except (OSError, Damaged):
        return highest
    for sequence, at in sorted(((int(match[1]), match.start()) for match in number.finditer(data)), reverse=True):
        if sequence <= highest:
            break
        with suppress(BadLine):
            decode_entry(data[data.rfind(b"\n", 0, at) + 1 : max(data.find(b"\n", at), 0)])
            return sequence
    return highest

"""The floor for new sequences: above all that a cursor or a ledger of this log says was given out.

Where an older backup of the segments stands beside newer cursors, new records would get numbers that these take for
processed, and would never be delivered. So a start passes over such numbers, and says so in ``segments.jsonl``:

    {"event": "skipped", "base": 11, "last": 45, "why": "routes/a/processed.cursor is at 45", "at": …}

A number is believed only so far: a bare cursor, which says of which log it is as little as who wrote it, 2^20 beyond
the end, anything else 2^40. A cursor that is not believed holds back what RECLAIM might delete, as any does that is
beyond the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from wald.errors import Damaged
from wald.format.cursor import CURSOR_MAX_BYTES, BadCursor, decode_cursor
from wald.format.ledger import BadLine, decode_line
from wald.store.files.directory import Root
from wald.store.files.regular import open_file, read_start

_BARE_MAX = 1 << 20  # records beyond the end that a cursor without a log id is believed
_OURS_MAX = 1 << 40
_LAST = re.compile(rb'"last":(\d{1,20})[,}]')
_SEALED = re.compile(rb'"event":"sealed","base":\d{1,20},"last":(\d{1,20})[,}]')
_CHUNK_BYTES = 1 << 20
_NO_NUMBER = 1 << 80
_OVERLAP_BYTES = 128  # more than what is searched for


@dataclass(slots=True)
class Floor:
    """What a start finds above the end of the log.

    Attributes:
        last: the highest sequence that is believed to have been given out; below the end of the log if none is above.
        why: who says so, in words.
        doubts: who says more than is believed, in words.
    """

    last: int
    why: str = ""
    doubts: list[str] = field(default_factory=list)


def find_floor(root: Root, *, log_id: bytes, next_sequence: int) -> Floor:
    """Ask every cursor of every route, retired or not, and the ledgers of what left the log.

    What was sealed and is not there is another matter, and damage: :func:`last_sealed`.
    """
    floor = Floor(next_sequence - 1)
    for path, sequence, trusted in (*_cursors(root, log_id), *_ledgers(root)):
        if sequence <= floor.last:
            continue
        words = f"{path.relative_to(root.path)} is at {sequence}"
        if sequence >= next_sequence + (_OURS_MAX if trusted else _BARE_MAX):
            floor.doubts.append(
                f"{words}, too far beyond record {next_sequence - 1}, the last there is, to be believed"
            )
        else:
            floor.last, floor.why = sequence, words
    return floor


def _cursors(root: Root, log_id: bytes) -> Iterator[tuple[Path, int, bool]]:
    """What each cursor file of this log says, and whether it says that it is of this log."""
    for route in root.route_names():
        try:
            groups = root.groups(route)
        except OSError:
            continue
        for group in groups:
            path = root.cursor(route, group)
            try:
                lines = decode_cursor(read_start(path, CURSOR_MAX_BYTES + 1))
            except (OSError, Damaged, BadCursor):
                continue  # it pins, whatever it was
            if lines.log_id in (None, log_id):
                yield path, lines.sequence, lines.log_id is not None


def last_sealed(root: Root, *, next_sequence: int) -> int:
    """The last sequence that the ledger says was sealed; 0: it tells of none, or of more than is believed."""
    found = _highest(root.ledger / "segments.jsonl", _SEALED)
    return found if found < next_sequence + _OURS_MAX else 0


def _ledgers(root: Root) -> Iterator[tuple[Path, int, bool]]:
    for name in ("reclaim.jsonl", "archive.jsonl"):
        path = root.ledger / name
        yield path, _highest(path, _LAST), True


def _highest(path: Path, number: re.Pattern[bytes]) -> int:
    """Of the numbers in a ledger; lines are searched, and only the one that has it is decoded: a start has no time."""
    below = _NO_NUMBER
    try:
        with open_file(path) as file:
            while True:
                below, offset = _search(file, number, below)
                if not below or _is_whole(file, offset):
                    return below
    except (OSError, Damaged):
        return 0


def _search(file: BinaryIO, number: re.Pattern[bytes], below: int) -> tuple[int, int]:
    """The highest number below ``below``, and the offset where it stands; 0 if there is none."""
    highest, at, kept = 0, 0, b""
    begin = file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        for match in number.finditer(text := kept + chunk):
            if highest < (found := int(match[1])) < below:
                highest, at = found, begin - len(kept) + match.start()
        begin, kept = begin + len(chunk), text[-_OVERLAP_BYTES:]
    return highest, at


def _is_whole(file: BinaryIO, offset: int) -> bool:
    """Whether the line at ``offset`` is as it was written."""
    begin = file.seek(max(0, offset - _CHUNK_BYTES))
    text = file.read(2 * _CHUNK_BYTES)
    at = offset - begin
    try:
        decode_line(text[text.rfind(b"\n", 0, at) + 1 : max(text.find(b"\n", at), 0)])
    except BadLine:
        return False
    return True

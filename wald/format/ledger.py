"""Ledger lines: JSON objects, each with a checksum, and with the sha256 of the line before it.

``{"event": …, …, "prev": "<64 hex>", "crc": "<8 hex>"}``; written without spaces, each line ended by a newline.
``prev`` is the sha256 of the previous line without its newline, and 64 zeros in the first line: so the line after it
shows that a line was changed, removed or inserted. ``crc`` is the crc32c of everything before ``,"crc"``: so the last
line is covered as well. Lines that were written together have in ``append`` the offset of the first of them, because a
power cut can leave any of their sectors without the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wald.format.checksum import crc32c

GENESIS = "0" * 64
NO_SPAN = (1 << 64, -1)
_END = re.compile(rb',"crc":"([0-9a-f]{8})"}')
_END_BYTES = len(b',"crc":"00000000"}')
_encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # dumps would make one at each call
_LONG_BYTES = 1024  # of a line, from which on it pays to look for lists in it
_LISTS = re.compile(rb'"(routes|dropped)":\[\{[^\]]*\}\]')


class Written(str):
    """JSON text, which goes into a line as it is: that of a thousand routes is made without a dict for each."""

    __slots__ = ()


class BadLine(ValueError):
    """The line is damaged, or it is not the one that follows the line before it.

    Attributes:
        number: which of several lines it is, from 0.
    """

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded ledger.

    Attributes:
        entries: the whole, well-formed lines, in order.
        whole_bytes: where the last whole line ends. A torn line follows it.
        broken: (line number from 1, reason) for each line that is damaged or does not fit the chain.
        tip: the ``prev`` of the next line.
    """

    entries: list[dict[str, Any]]
    whole_bytes: int
    broken: list[tuple[int, str]]
    tip: str


def encode_line(entry: dict[str, Any], prev: str, append: int | None = None) -> bytes:
    """The line of ``entry`` after the line with digest ``prev``.

    Args:
        append: the offset of the first line that is written with this one; None: it is written alone.
    """
    whole = entry | ({"prev": prev} if append is None else {"append": append, "prev": prev})
    if any(isinstance(value, Written) for value in entry.values()):
        text = f"{{{','.join(f'{_json(key)}:{_json(value)}' for key, value in whole.items())}"
    else:
        text = _json(whole)[:-1]
    # A path that is not UTF-8 has surrogates in it; as escapes they are JSON, and come back as they were.
    covered = text.encode(errors="backslashreplace")
    return covered + b',"crc":"%08x"}\n' % crc32c(covered)


def _json(value: object) -> str:
    return value if isinstance(value, Written) else _encoded(value)


def read_out(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with the values themselves where it has JSON text."""
    return {key: json.loads(value) if isinstance(value, Written) else value for key, value in entry.items()}


def digest(line: bytes) -> str:
    """What the line after ``line`` carries as ``prev``."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def decode_ledger(data: bytes, tip: str | None = GENESIS) -> Decoded:
    """Every line of a file of a ledger, the chain checked. Never raises: damage is part of the answer.

    Args:
        tip: the digest of the line before it; None: it is not known.
    """
    whole = data.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    broken: list[tuple[int, str]] = []
    number = 0
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            entry = decode_line(line)
        except BadLine as error:
            broken.append((number, str(error)))
        else:
            entry.pop("append", None)
            prev = entry.pop("prev")
            if prev != tip and tip is not None:
                broken.append((number, "does not follow the line before it"))
            entries.append(entry)
        tip = digest(line)
    if ends_wrongly(data[whole:]):
        broken.append((number + 1, "its newline is damaged"))
    return Decoded(entries, whole, broken, tip or GENESIS)


def span_of(entry: dict[str, Any]) -> tuple[int, int]:
    """The sequences that a line is about: from ``base`` or ``first`` to ``last``, or ``base`` alone; else NO_SPAN."""
    low = entry.get("base", entry.get("first"))
    high = entry.get("last", low)
    if isinstance(low, int) and isinstance(high, int) and low <= high:
        return low, high
    return NO_SPAN


def decode_line(line: bytes) -> dict[str, Any]:
    """One line without its newline; ``prev`` is still in it, and ``append`` if it has that.

    Raises:
        BadLine: it is not as it was written.
    """
    end = _END.fullmatch(line, max(0, len(line) - _END_BYTES))
    if end is None:
        raise BadLine("not a ledger line")
    if int(end[1], 16) != crc32c(line[: end.start()]):
        raise BadLine("its checksum is wrong")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not a ledger line") from None
    if not isinstance(entry, dict) or "prev" not in entry:
        raise BadLine("not a ledger line")
    del entry["crc"]
    return entry


def decode_lines(lines: Sequence[bytes], *, listed: bool = True) -> list[dict[str, Any]]:
    """As :func:`decode_line` for each of them, at once, which takes half the time.

    Args:
        listed: whether their lists of routes are wanted; long ones are left empty otherwise, which is much faster.

    Raises:
        BadLine: one is not as it was written.
    """
    try:
        return _decode_whole(lines, listed=listed)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return list(_decode_each(lines))  # one is damaged; or a name in a list that is left out has brackets in it


def _decode_whole(lines: Sequence[bytes], *, listed: bool) -> list[dict[str, Any]]:
    """Them all; any of several errors if that cannot be."""
    for line in lines:
        if not line.endswith(b',"crc":"%08x"}' % crc32c(line[:-_END_BYTES])):
            raise ValueError("damaged")
    text = b"[%s]" % b",".join(lines)
    if not listed and len(text) > _LONG_BYTES * len(lines):
        text = _LISTS.sub(rb'"\1":[]', text)
    entries: list[dict[str, Any]] = json.loads(text)
    for entry, line in zip(entries, lines, strict=True):
        if entry.pop("crc") != line[-10:-2].decode() or "prev" not in entry:
            raise ValueError("not ledger lines")
    return entries


def _decode_each(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        try:
            yield decode_line(line)
        except BadLine as error:
            raise BadLine(str(error), number) from None


def ends_wrongly(rest: bytes) -> bool:
    """Whether what follows the last newline is a whole line and more: its newline is damaged, and it is not torn."""
    end = _END.search(rest)
    return end is not None and end.end() < len(rest) and int(end[1], 16) == crc32c(rest[: end.start()])

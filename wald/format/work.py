"""The journal of a work group: lines of JSON, each with a checksum.

The first line identifies the group. A page is a snapshot of some records. Every other line is a :class:`Commit`. A
crash can leave an unreadable line, unless the ``synced`` of a later line covers it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from wald.format.ledger_lines import decode_line, encode_line

PAGE_RECORDS = 128
TRIES_MAX = 254
_VERSION = 1
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DONE = 255  # in JournalPage.tries
_TRIES_TO_TEXT = bytes(
    ord(".") if tries == _DONE else ord(_DIGITS[tries] if tries < len(_DIGITS) else "+") for tries in range(256)
)
_TEXT_TO_TRIES = bytes(_DONE if chr(letter) == "." else max(0, _DIGITS.find(chr(letter))) for letter in range(256))
_PAGE_TEXT = re.compile(rf"[.+0-9A-Za-z]{{{PAGE_RECORDS}}}")

Pairs = list[tuple[int, int]]


class BadWork(ValueError):
    """The line is not a valid line of a journal."""


@dataclass(frozen=True, slots=True)
class JournalStart:
    """First line of a journal."""

    log_id: bytes
    route: str
    group: str
    floor: int  # all records up to it are done
    end: int  # first sequence not yet read

    @property
    def owner(self) -> tuple[bytes, str, str]:
        return self.log_id, self.route, self.group


@dataclass(frozen=True, slots=True)
class JournalPage:
    """Snapshot of :data:`PAGE_RECORDS` records."""

    first: int
    tries: bytes  # deliveries of each record; 255 if it is done
    due: Pairs = field(default_factory=list)  # (sequence, time) of each delayed record


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A record that the owner writes to ``route`` as a dead letter and then marks as done."""

    sequence: int
    tries: int
    reason: str
    at_ns: int
    route: str
    after: int  # durable head at ``at_ns``; the dead letter, if written, follows it


class WorkerLease(NamedTuple):
    """Records leased to a worker."""

    worker: str
    until_ns: int
    runs: Pairs


class FailureReason(NamedTuple):
    """Reason that a worker gave when it last returned records."""

    reason: str  # "" keeps the previous reason
    tries: int  # failures that the workers counted, never decreasing; 0 if they do not count
    runs: Pairs


@dataclass(slots=True)
class Commit:
    """Changes that the owner commits together, applied in field order."""

    done: Pairs = field(default_factory=list)
    extended: list[WorkerLease] = field(default_factory=list)
    returned: Pairs = field(default_factory=list)  # records whose lease ended without success
    reasons: list[FailureReason] = field(default_factory=list)
    read: Pairs = field(default_factory=list)  # records read from the log
    due: Pairs = field(default_factory=list)  # as in JournalPage
    leased: list[WorkerLease] = field(default_factory=list)  # records delivered
    dead: list[DeadRecord] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.done, self.extended, self.returned, self.reasons, self.read, self.due, self.leased, self.dead))


JournalLine = JournalStart | JournalPage | Commit
_PAIR_FIELDS = (("done", "done"), ("back", "returned"), ("in", "read"), ("due", "due"))  # JSON key, attribute of Commit
_RUN_FIELDS = (("out", "leased", WorkerLease), ("longer", "extended", WorkerLease), ("why", "reasons", FailureReason))


def encode_work(line: JournalLine, synced: int) -> bytes:
    """Encode a line of a journal with ``synced`` bytes on disk."""
    fields: dict[str, Any]
    match line:
        case JournalStart():
            fields = {"work": _VERSION, "log": line.log_id.hex(), "route": line.route, "group": line.group}
            fields |= {"floor": line.floor, "end": line.end}
        case JournalPage():
            fields = {"page": line.first, "records": line.tries.translate(_TRIES_TO_TEXT).decode()}
            extra: Pairs = []
            if max(line.tries.translate(None, bytes([_DONE])), default=0) >= len(_DIGITS):
                extra = [(line.first + n, tries) for n, tries in enumerate(line.tries) if len(_DIGITS) <= tries < _DONE]
            fields |= {name: _flatten(pairs) for name, pairs in (("more", extra), ("due", line.due)) if pairs}
        case Commit():
            fields = {name: _flatten(pairs) for name, attribute in _PAIR_FIELDS if (pairs := getattr(line, attribute))}
            for name, attribute, _ in _RUN_FIELDS:
                if entries := getattr(line, attribute):
                    fields[name] = [[text, number, *_flatten(runs)] for text, number, runs in entries]
            if line.dead:
                fields["dead"] = [asdict(dead) for dead in line.dead]
    return encode_line({**fields, "synced": synced})


def decode_work(data: bytes) -> tuple[JournalLine, int]:
    """Decode a line, given without its newline, and its ``synced``, or raise BadWork."""
    fields = decode_line(data)
    if fields is None:
        raise BadWork("the line has no valid checksum")
    try:
        synced = int(fields.pop("synced"))
        if "work" in fields:
            if fields["work"] != _VERSION:
                raise BadWork(f"the journal has version {fields['work']}; this program reads version {_VERSION}")
            log_id = bytes.fromhex(fields["log"])
            floor, end = int(fields["floor"]), int(fields["end"])
            return JournalStart(log_id, str(fields["route"]), str(fields["group"]), floor, end), synced
        if "page" in fields:
            return _decode_page(fields), synced
        lists: dict[str, Any] = {attribute: _unflatten(fields.pop(name, [])) for name, attribute in _PAIR_FIELDS}
        for name, attribute, kind in _RUN_FIELDS:
            entries = fields.pop(name, [])
            lists[attribute] = [kind(str(text), int(number), _unflatten(runs)) for text, number, *runs in entries]
        lists["dead"] = [DeadRecord(**dead) for dead in fields.pop("dead", [])]
        if fields:
            raise BadWork(f"the line has unknown fields: {', '.join(fields)}")
        return Commit(**lists), synced
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadWork(f"the line was not written by wald ({error})") from error


def last_read(line: JournalLine) -> int:
    """Return the last sequence read from the log; 0 if unknown."""
    if isinstance(line, JournalStart):
        return line.end - 1
    return line.read[-1][1] if isinstance(line, Commit) and line.read else 0


def is_done(journal: Iterable[bytes], start: JournalStart, sequence: int) -> bool:
    """Return True if the journal belongs to ``start``'s group and a record is done. Stop reading at a damaged line."""
    done = False
    for data in journal:
        try:
            line, _ = decode_work(data)
        except BadWork:
            break
        match line:
            case JournalStart():
                if (line.log_id, line.route, line.group) != (start.log_id, start.route, start.group):
                    return False
                done = sequence < line.end  # a later page may show that it is not
            case JournalPage() if line.first <= sequence < line.first + PAGE_RECORDS:
                done = line.tries[sequence - line.first] == _DONE
            case Commit():
                if any(first <= sequence <= last for first, last in line.read):
                    done = False
                if any(first <= sequence <= last for first, last in line.done):
                    done = True
    return done


def _decode_page(fields: Mapping[str, Any]) -> JournalPage:
    first, text = int(fields["page"]), fields["records"]
    if _PAGE_TEXT.fullmatch(text) is None or first % PAGE_RECORDS:
        raise BadWork(f"page {first} does not contain {PAGE_RECORDS} records")
    tries = bytearray(text.encode().translate(_TEXT_TO_TRIES))
    for sequence, number in _unflatten(fields.get("more", [])):
        tries[sequence - first] = number
    return JournalPage(first, bytes(tries), _unflatten(fields.get("due", [])))


def _flatten(pairs: Pairs) -> list[int]:
    return [number for pair in pairs for number in pair]


def _unflatten(flat: list[int]) -> Pairs:
    if len(flat) % 2 or not all(isinstance(number, int) for number in flat):
        raise BadWork("the ranges are not pairs of numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))

"""The journal of a work group: lines of JSON, each with a checksum.

The first line identifies the group. A page is a snapshot of some records; every other line is one :class:`Commit`. A
crash can leave an unreadable line, but not if the ``synced`` of a later line covers that line.
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
_DONE = 255  # in Page.tries
_TEXT_OF = bytes(
    ord(".") if tries == _DONE else ord(_DIGITS[tries] if tries < len(_DIGITS) else "+") for tries in range(256)
)
_TRIES_OF = bytes(_DONE if chr(letter) == "." else max(0, _DIGITS.find(chr(letter))) for letter in range(256))
_RECORDS = re.compile(rf"[.+0-9A-Za-z]{{{PAGE_RECORDS}}}")

Pairs = list[tuple[int, int]]


class BadWork(ValueError):
    """Not a valid line of a journal."""


@dataclass(frozen=True, slots=True)
class Start:
    """First line of a journal."""

    log_id: bytes
    route: str
    group: str
    floor: int  # every record up to it is done
    end: int  # the first sequence not read yet


@dataclass(frozen=True, slots=True)
class Page:
    """Snapshot of :data:`PAGE_RECORDS` records."""

    first: int
    tries: bytes  # deliveries of each record; 255 if it is done
    due: Pairs = field(default_factory=list)  # (sequence, time) of each delayed record


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A record that is written to ``route`` as a dead letter, and then is done."""

    sequence: int
    tries: int
    reason: str
    at_ns: int
    route: str
    after: int  # durable head at that time; the dead letter, if written, follows it


class WorkerLease(NamedTuple):
    """Records leased to a worker."""

    worker: str
    until_ns: int
    runs: Pairs


class FailureReason(NamedTuple):
    """Reason that a worker gave when it last returned records."""

    reason: str  # "" leaves the previous reason unchanged
    tries: int  # failures counted by the workers, never decreasing; 0 if they do not count
    runs: Pairs


@dataclass(slots=True)
class Commit:
    """Changes that the owner commits together, applied in the order of the fields."""

    done: Pairs = field(default_factory=list)
    extended: list[WorkerLease] = field(default_factory=list)
    returned: Pairs = field(default_factory=list)  # records whose lease ended without success
    reasons: list[FailureReason] = field(default_factory=list)
    read: Pairs = field(default_factory=list)  # records read from the log
    due: Pairs = field(default_factory=list)  # as in Page
    leased: list[WorkerLease] = field(default_factory=list)  # records delivered
    dead: list[DeadRecord] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.done, self.extended, self.returned, self.reasons, self.read, self.due, self.leased, self.dead))


Line = Start | Page | Commit
_RANGES = (("done", "done"), ("back", "returned"), ("in", "read"), ("due", "due"))  # JSON key, attribute of Commit
_RUNS = (("out", "leased", WorkerLease), ("longer", "extended", WorkerLease), ("why", "reasons", FailureReason))


def encode_work(line: Line, synced: int) -> bytes:
    """Encode a line of a journal of which ``synced`` bytes are on disk."""
    fields: dict[str, Any]
    match line:
        case Start():
            fields = {"work": _VERSION, "log": line.log_id.hex(), "route": line.route, "group": line.group}
            fields |= {"floor": line.floor, "end": line.end}
        case Page():
            fields = {"page": line.first, "records": line.tries.translate(_TEXT_OF).decode()}
            more: Pairs = []
            if max(line.tries.translate(None, bytes([_DONE])), default=0) >= len(_DIGITS):
                more = [(line.first + n, tries) for n, tries in enumerate(line.tries) if len(_DIGITS) <= tries < _DONE]
            fields |= {name: _flat(pairs) for name, pairs in (("more", more), ("due", line.due)) if pairs}
        case Commit():
            fields = {name: _flat(pairs) for name, attribute in _RANGES if (pairs := getattr(line, attribute))}
            for name, attribute, _ in _RUNS:
                if entries := getattr(line, attribute):
                    fields[name] = [[text, number, *_flat(runs)] for text, number, runs in entries]
            if line.dead:
                fields["dead"] = [asdict(dead) for dead in line.dead]
    return encode_line({**fields, "synced": synced})


def decode_work(data: bytes) -> tuple[Line, int]:
    """Decode a line, given without its newline, and its ``synced``, or raise BadWork."""
    fields = decode_line(data)
    if fields is None:
        raise BadWork("not a line with a valid checksum")
    try:
        synced = int(fields.pop("synced"))
        if "work" in fields:
            if fields["work"] != _VERSION:
                raise BadWork(f"the journal has version {fields['work']}; this program reads version {_VERSION}")
            log_id = bytes.fromhex(fields["log"])
            floor, end = int(fields["floor"]), int(fields["end"])
            return Start(log_id, str(fields["route"]), str(fields["group"]), floor, end), synced
        if "page" in fields:
            return _page(fields), synced
        lists: dict[str, Any] = {attribute: _pairs(fields.pop(name, [])) for name, attribute in _RANGES}
        for name, attribute, kind in _RUNS:
            entries = fields.pop(name, [])
            lists[attribute] = [kind(str(text), int(number), _pairs(runs)) for text, number, *runs in entries]
        lists["dead"] = [DeadRecord(**dead) for dead in fields.pop("dead", [])]
        if fields:
            raise BadWork(f"unknown fields: {', '.join(fields)}")
        return Commit(**lists), synced
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadWork(f"not a line that wald writes ({error})") from error


def last_read(line: Line) -> int:
    """Return the last sequence read from the log; 0 if unknown."""
    if isinstance(line, Start):
        return line.end - 1
    return line.read[-1][1] if isinstance(line, Commit) and line.read else 0


def is_done(journal: Iterable[bytes], owner: Start, sequence: int) -> bool:
    """Return True if the journal is that of ``owner`` and shows the record as done. Reading ends at a damaged line."""
    done = False
    for data in journal:
        try:
            line, _ = decode_work(data)
        except BadWork:
            break
        match line:
            case Start():
                if (line.log_id, line.route, line.group) != (owner.log_id, owner.route, owner.group):
                    return False
                done = sequence < line.end  # unless a later page shows it open
            case Page() if line.first <= sequence < line.first + PAGE_RECORDS:
                done = line.tries[sequence - line.first] == _DONE
            case Commit():
                if any(first <= sequence <= last for first, last in line.read):
                    done = False
                if any(first <= sequence <= last for first, last in line.done):
                    done = True
    return done


def _page(fields: Mapping[str, Any]) -> Page:
    first, text = int(fields["page"]), fields["records"]
    if _RECORDS.fullmatch(text) is None or first % PAGE_RECORDS:
        raise BadWork(f"page {first} does not describe {PAGE_RECORDS} records")
    tries = bytearray(text.encode().translate(_TRIES_OF))
    for sequence, number in _pairs(fields.get("more", [])):
        tries[sequence - first] = number
    return Page(first, bytes(tries), _pairs(fields.get("due", [])))


def _flat(pairs: Pairs) -> list[int]:
    return [number for pair in pairs for number in pair]


def _pairs(flat: list[int]) -> Pairs:
    if len(flat) % 2 or not all(isinstance(number, int) for number in flat):
        raise BadWork("ranges must be pairs of numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))

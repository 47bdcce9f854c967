"""The journal of a work group, ``routes/R/cursors/G.work``: lines of JSON, each with a checksum.

    {"work": 1, "log": "<32 hex>", "route": "R", "group": "G", "floor": 250, "end": 450, "synced": 0, "crc": "…"}
    {"page": 256, "records": "..1.0…", "more": [[300, 70]], "due": [258, 1700000000000000000], "crc": "…"}
    {"in": [400, 449], "out": [["worker-1", 1700000000000000000, 300, 309]], "synced": 4096, "crc": "…"}
    {"done": [300, 301], "back": [302, 302], "due": [302, 1700000000000000000], "why": [["exit 1", 3, 302, 302]], …}

The first line identifies the group. A ``page`` is a snapshot of 128 records, written when the file is rewritten: ``.``
for a record that is done or belongs to another route, otherwise its number of deliveries as a base-62 digit
(``0-9A-Za-z``); ``more`` lists records with more deliveries. Every other line is one :class:`Commit`. Ranges are
flat lists of first and last sequences; times are ns since 1970.

``synced`` is the number of bytes of the file known to be on disk when the line was written, so an unreadable line is
the result of a crash unless a later line says that it was on disk. The file ends in blank lines, which are overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """The bytes are not a line of a work group's journal."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first line.

    Attributes:
        floor: every record up to it is done.
        end: the first sequence that was not read yet.
    """

    log_id: bytes
    route: str
    group: str
    floor: int
    end: int


@dataclass(frozen=True, slots=True)
class Page:
    """Snapshot of the :data:`PAGE_RECORDS` records starting at ``first``.

    Attributes:
        tries: number of deliveries of each record; 255 if it is done.
        due: (sequence, time) of each delayed record.
    """

    first: int
    tries: bytes
    due: Pairs = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A record given up after ``tries`` deliveries: it becomes a dead letter in ``route``, then it is done.

    Attributes:
        after: the durable head at that time; the dead letter, if it was written, has a higher sequence.
    """

    sequence: int
    tries: int
    reason: str
    at_ns: int
    route: str
    after: int


@dataclass(slots=True)  # not frozen: creating one takes a third of the time, and each lease creates one
class WorkerLease:
    """Ranges of records leased to a worker until a time."""

    worker: str
    until_ns: int
    runs: Pairs


@dataclass(frozen=True, slots=True)
class FailureReason:
    """The worker's reason for the last return of ranges of records.

    Attributes:
        reason: "" leaves the previous reason unchanged.
        tries: failures counted by the workers themselves, which never decrease; 0 if they do not count.
    """

    reason: str
    tries: int
    runs: Pairs


@dataclass(slots=True)
class Commit:
    """The changes of one commit of the owner, applied in the order of the attributes.

    Attributes:
        extended: leases that were extended.
        returned: records whose lease ended without success.
        reasons: failure reasons of returned records.
        read: records read from the log.
        due: (sequence, time) of each record that was delayed.
        leased: records delivered once more.
        dead: records that are being given up.
    """

    done: Pairs = field(default_factory=list)
    extended: list[WorkerLease] = field(default_factory=list)
    returned: Pairs = field(default_factory=list)
    reasons: list[FailureReason] = field(default_factory=list)
    read: Pairs = field(default_factory=list)
    due: Pairs = field(default_factory=list)
    leased: list[WorkerLease] = field(default_factory=list)
    dead: list[DeadRecord] = field(default_factory=list)

    def __bool__(self) -> bool:
        settled = self.done or self.extended or self.returned or self.reasons
        return bool(settled or self.read or self.due or self.leased or self.dead)


Line = Start | Page | Commit
_RANGES = (("done", "done"), ("back", "returned"), ("in", "read"), ("due", "due"))  # JSON key, attribute of Commit
_LEASES = (("out", "leased"), ("longer", "extended"))


def encode_work(line: Line, synced: int) -> bytes:
    """Encode one line; ``synced`` is the number of bytes of the file that are on disk."""
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
            for name, attribute in _LEASES:
                if leases := getattr(line, attribute):
                    fields[name] = [[each.worker, each.until_ns, *_flat(each.runs)] for each in leases]
            if line.reasons:
                fields["why"] = [[each.reason, each.tries, *_flat(each.runs)] for each in line.reasons]
            if line.dead:
                fields["dead"] = [asdict(dead) for dead in line.dead]
    return encode_line({**fields, "synced": synced})


def decode_work(data: bytes) -> tuple[Line, int]:
    """Decode a line without its newline; return it and its ``synced``."""
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
        lists |= {attribute: [_lease(*each) for each in fields.pop(name, [])] for name, attribute in _LEASES}
        lists["reasons"] = [_reason(*each) for each in fields.pop("why", [])]
        lists["dead"] = [DeadRecord(**dead) for dead in fields.pop("dead", [])]
        if fields:
            raise BadWork(f"unknown fields: {', '.join(fields)}")
        return Commit(**lists), synced
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadWork(f"not a line that wald writes ({error})") from error


def last_read(line: Line) -> int:
    """Return the last sequence read from the log, as far as ``line`` shows; 0 if it does not."""
    if isinstance(line, Start):
        return line.end - 1
    return line.read[-1][1] if isinstance(line, Commit) and line.read else 0


def is_done(journal: Iterable[bytes], owner: Start, sequence: int) -> bool:
    """Return True if a record of the journal's route is done.

    Args:
        journal: lines, read up to the first that is damaged.
        owner: the log, route and group to which the journal must belong.
    """
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


def _lease(worker: str, until_ns: int, *runs: int) -> WorkerLease:
    return WorkerLease(str(worker), int(until_ns), _pairs(list(runs)))


def _reason(reason: str, tries: int, *runs: int) -> FailureReason:
    return FailureReason(str(reason), int(tries), _pairs(list(runs)))


def _flat(pairs: Pairs) -> list[int]:
    return [number for pair in pairs for number in pair]


def _pairs(flat: list[int]) -> Pairs:
    if len(flat) % 2 or not all(isinstance(number, int) for number in flat):
        raise BadWork("ranges must be pairs of numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))

"""The journal of a work group, ``routes/R/cursors/G.work``: lines of JSON, each with a checksum.

    {"work": 1, "log": "<32 hex>", "route": "R", "group": "G", "floor": 250, "end": 450,
     "synced": 0, "crc": "…"}
    {"page": 256, "records": "..1.0…", "more": [[300, 70]], "due": [258, 1700000000000000000], "crc": "…"}
    {"in": [400, 449], "out": [["worker-1", 1700000000000000000, 300, 309]], "synced": 4096, "crc": "…"}
    {"done": [300, 301], "back": [302, 302], "due": [302, 1700000000000000000], "why": [["exit 1", 3, 302, 302]], …}

The first line says whose journal it is, up to where everything is done, and from where on nothing was read yet. The
lines ``page`` are what was known when the file was last written anew: 128 records each, ``.`` for one that is done (or
is not of this route), else how often it was delivered, as a digit to base 62 (``0-9A-Za-z``); ``more`` has those that
were delivered more often. Each other line is a commit, what has happened to all consumers in one turn of the owner,
carried out in this order: the records that are done, those that are leased for longer, those that have come back, those
that were read, those that wait until a time, and those that were delivered once more. Leases say to which consumer, and
until when, in ns since 1970. Ranges are pairs of their first and last sequence, all in one list. ``dead``
names records that are being given up.

``synced`` is how many bytes of the file were known to be on disk when the line was written. So a line that cannot be
read is one that a crash has torn only if no later line says that it was on disk. Behind the last line are blank ones,
which lines are written over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wald.format.ledger_lines import decode_line, encode_line

VERSION = 1
PAGE = 128
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DONE = 255  # of the tries in memory, those of a record that is done
TRIES_MAX = 254
_TEXT_OF = bytes(
    ord(".") if tries == _DONE else ord(_DIGITS[tries] if tries < len(_DIGITS) else "+") for tries in range(256)
)
_TRIES_OF = bytes(_DONE if chr(letter) == "." else max(0, _DIGITS.find(chr(letter))) for letter in range(256))
_RECORDS = re.compile(rf"[.+0-9A-Za-z]{{{PAGE}}}")

Pairs = list[tuple[int, int]]


class BadWork(ValueError):
    """The bytes are not a line of the journal of a work group."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first line: whose journal it is.

    Attributes:
        floor: everything up to it is done.
        end: the first sequence that was not taken in.
    """

    log_id: bytes
    route: str
    group: str
    floor: int
    end: int


@dataclass(frozen=True, slots=True)
class Page:
    """What was known of the :data:`PAGE` records from ``first`` on.

    Attributes:
        tries: of each record how often it was delivered, or 255 if it is done.
        due: sequence and time, in ns since 1970, of those that wait.
    """

    first: int
    tries: bytes
    due: Pairs = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dead:
    """A record that is given up: it is to become a dead letter, and done after that.

    Attributes:
        tries, reason, at_ns: how often it was delivered, why it is given up, and when that was decided.
        route: of dead letters.
        after: up to where the log was durable then; so the dead letter, if there is one, lies behind it.
    """

    sequence: int
    tries: int
    reason: str
    at_ns: int
    route: str
    after: int


@dataclass(slots=True)  # not frozen, as that takes thrice as long to make, and each lease makes one
class Held:
    """Records that a consumer has.

    Attributes:
        until_ns: when its lease of them ends, in ns since 1970.
        runs: first and last of each range.
    """

    to: str
    until_ns: int
    runs: Pairs


@dataclass(frozen=True, slots=True)
class Why:
    """Why records came back the last time, as the one said who gave them back.

    Attributes:
        reason: "": as before.
        tries: how often each has failed, as its workers count by themselves; 0: they do not. It never goes down.
    """

    reason: str
    tries: int
    runs: Pairs


@dataclass(slots=True)
class Commit:
    """What has happened since the line before; carried out in the order of the attributes, ranges with both ends.

    Attributes:
        done: records that are done.
        longer: records that are leased for longer.
        back: records that came back.
        why: the last reasons of records that came back.
        taken_in: records that were read.
        due: sequence and time, in ns since 1970, of those that wait.
        out: records that were delivered once more.
        dead: those that are being given up.
    """

    done: Pairs = field(default_factory=list)
    longer: list[Held] = field(default_factory=list)
    back: Pairs = field(default_factory=list)
    why: list[Why] = field(default_factory=list)
    taken_in: Pairs = field(default_factory=list)
    due: Pairs = field(default_factory=list)
    out: list[Held] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return bool(
            self.done or self.longer or self.back or self.why or self.taken_in or self.due or self.out or self.dead
        )


Line = Start | Page | Commit


def last_read(line: Line) -> int:
    """The last sequence that was read by then, as far as a line says; 0: it does not."""
    if isinstance(line, Start):
        return line.end - 1
    return line.taken_in[-1][1] if isinstance(line, Commit) and line.taken_in else 0


def is_done(journal: Iterable[bytes], owner: Start, sequence: int) -> bool:
    """Return True if a journal says that a record of its route is done.

    Args:
        journal: its lines, which count up to the first one that is not whole.
        owner: the log, route and group to which it must belong.
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
                done = sequence < line.end  # unless a page follows that shows it open
            case Page() if line.first <= sequence < line.first + PAGE:
                done = line.tries[sequence - line.first] == _DONE
            case Commit():
                if any(first <= sequence <= last for first, last in line.taken_in):
                    done = False
                if any(first <= sequence <= last for first, last in line.done):
                    done = True
    return done


_LISTS = (("done", "done"), ("back", "back"), ("in", "taken_in"), ("due", "due"))
_HELD = ("out", "longer")


def encode_work(line: Line, synced: int) -> bytes:
    """One line.

    Args:
        synced: how many bytes of the file are on disk.
    """
    fields: dict[str, Any]
    match line:
        case Start():
            fields = {"work": VERSION, "log": line.log_id.hex(), "route": line.route, "group": line.group}
            fields |= {"floor": line.floor, "end": line.end}
        case Page():
            fields = {"page": line.first, "records": line.tries.translate(_TEXT_OF).decode()}
            more = _often(line) if max(line.tries.translate(None, bytes([_DONE])), default=0) >= len(_DIGITS) else []
            fields |= {name: _flat(pairs) for name, pairs in (("more", more), ("due", line.due)) if pairs}
        case Commit():
            fields = {name: _flat(pairs) for name, attribute in _LISTS if (pairs := getattr(line, attribute))}
            for name in _HELD:
                if held := getattr(line, name):
                    fields[name] = [[each.to, each.until_ns, *_flat(each.runs)] for each in held]
            if line.why:
                fields["why"] = [[each.reason, each.tries, *_flat(each.runs)] for each in line.why]
            if line.dead:
                fields["dead"] = [asdict(dead) for dead in line.dead]
    return encode_line({**fields, "synced": synced})


def decode_work(data: bytes) -> tuple[Line, int]:
    """A line without its newline, and how many bytes were on disk by then.

    Raises:
        BadWork: it is half-written, damaged, or of a later version.
    """
    fields = decode_line(data)
    if fields is None:
        raise BadWork("not a line with a checksum that fits")
    try:
        synced = int(fields.pop("synced"))
        if "work" in fields:
            if fields["work"] != VERSION:
                raise BadWork(f"version {fields['work']} of the journal, and this program knows {VERSION}")
            log_id = bytes.fromhex(fields["log"])
            floor, end = int(fields["floor"]), int(fields["end"])
            return Start(log_id, str(fields["route"]), str(fields["group"]), floor, end), synced
        if "page" in fields:
            return _page(fields), synced
        lists: dict[str, Any] = {attribute: _pairs(fields.pop(name, [])) for name, attribute in _LISTS}
        lists |= {name: [_held(*each) for each in fields.pop(name, [])] for name in _HELD}
        lists["why"] = [_why(*each) for each in fields.pop("why", [])]
        lists["dead"] = [Dead(**dead) for dead in fields.pop("dead", [])]
        if fields:
            raise BadWork(f"unknown fields: {', '.join(fields)}")
        return Commit(**lists), synced
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadWork(f"not what wald writes ({error})") from error


def _often(page: Page) -> Pairs:
    """The records of a page that were delivered more often than a digit says, and how often."""
    return [(page.first + at, tries) for at, tries in enumerate(page.tries) if len(_DIGITS) <= tries < _DONE]


def _page(fields: Mapping[str, Any]) -> Page:
    first, text = int(fields["page"]), fields["records"]
    if _RECORDS.fullmatch(text) is None or first % PAGE:
        raise BadWork(f"page {first} does not describe {PAGE} records")
    tries = bytearray(text.encode().translate(_TRIES_OF))
    for sequence, number in _pairs(fields.get("more", [])):
        tries[sequence - first] = number
    return Page(first, bytes(tries), _pairs(fields.get("due", [])))


def _held(to: str, until_ns: int, *runs: int) -> Held:
    return Held(str(to), int(until_ns), _pairs(list(runs)))


def _why(reason: str, tries: int, *runs: int) -> Why:
    return Why(str(reason), int(tries), _pairs(list(runs)))


def _flat(pairs: Pairs) -> list[int]:
    return [number for pair in pairs for number in pair]


def _pairs(flat: list[int]) -> Pairs:
    if len(flat) % 2 or not all(isinstance(number, int) for number in flat):
        raise BadWork("a list of ranges that is no list of pairs of numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))

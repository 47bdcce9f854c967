"""A sealed part of a ledger: its lines in zstd frames, and an index in a skippable frame, which is the last.

    frames        one zstd frame for about 256 KiB of whole lines, each with its content size and checksum (RFC 8878)
    index frame   u32 0x184D2A58, u32 content length, content
    content       JSON, u32 length of the JSON, u32 crc32c of the JSON, 8 bytes WALDLIX1

    JSON          {"line", "lines", "prev", "tip", "frames", "clock", "seen", "reclaimed", "kept", "archived", "before"}
      line        the number of its first line in the ledger, from 1; lines: how many it has
      prev, tip   the digests of the line before it and of its last line
      frames      [[stored bytes, raw bytes, lines, low, high, earliest, latest, prev, clock], …]: the lowest and the
                  highest sequence that a line is about (low > high: none is), the times "at" of its lines, the digest
                  of the line before it, and the clock there
      clock       [ns that have certainly passed since the ledger began, boot, boottime] at the end of the part
      seen        [[through, ns of the clock], …] of the lines "seen"
      reclaimed   [[first, last], …]: what its lines say to be reclaimed and do not take back
      kept        [base, …]: the deletions of earlier parts, too, that its lines take back
      archived    {route: [[first, last], …]}: between these sequences no record of the route is missing in the bundles
      before      [[line, lines, low, high, earliest, latest, prev, tip, clock], …] of all earlier parts; only every
                  64th part has it, so that the others need not be opened to know what they are about

The index says nothing that the lines do not say: where it is damaged it is made again from them.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wald.format.checksum import crc32c
from wald.format.sealed import SKIPPABLE

INDEX_FRAME_MAGIC = 0x184D2A58
_MAGIC = b"WALDLIX1"
_FOOTER = struct.Struct("<II8s")
FOOTER_BYTES = _FOOTER.size
assert FOOTER_BYTES == 16

Clock = tuple[int, str, int]
"""Nanoseconds that have certainly passed, and the moment by which that was last known: boot and time since it."""
CLOCK_ZERO: Clock = (0, "", 0)
Run = tuple[int, int]


class BadPart(ValueError):
    """The index of the part is damaged, or the file is not a part of a ledger."""


class PartFrame(NamedTuple):
    """One zstd frame of whole lines; attributes as above."""

    stored_bytes: int
    raw_bytes: int
    lines: int
    low: int
    high: int
    earliest_ns: int
    latest_ns: int
    prev: str
    clock: Clock


class PartSummary(NamedTuple):
    """What is known of a part without its index; attributes as above, of all its frames."""

    line: int
    lines: int
    low: int
    high: int
    earliest_ns: int
    latest_ns: int
    prev: str
    tip: str
    clock: Clock


@dataclass(slots=True)
class PartIndex:
    """What is known of a part without its lines; attributes as above."""

    line: int
    lines: int
    prev: str
    tip: str
    frames: list[PartFrame]
    clock: Clock = CLOCK_ZERO
    seen: list[Run] = field(default_factory=list)
    reclaimed: list[Run] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    archived: dict[str, list[Run]] = field(default_factory=dict)
    before: list[PartSummary] = field(default_factory=list)

    def summary(self) -> PartSummary:
        """The part in the catalog of a later one."""
        lows, highs = [frame.low for frame in self.frames], [frame.high for frame in self.frames]
        earliest_ns = min(frame.earliest_ns for frame in self.frames)
        latest_ns = max(frame.latest_ns for frame in self.frames)
        about = min(lows), max(highs), earliest_ns, latest_ns
        return PartSummary(self.line, self.lines, *about, self.prev, self.tip, self.clock)


def encode_index(index: PartIndex) -> bytes:
    """The index frame."""
    content: dict[str, Any] = {name: getattr(index, name) for name in PartIndex.__dataclass_fields__}
    if not index.before:
        del content["before"]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    return SKIPPABLE.pack(INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer


def index_bytes(footer: bytes) -> int:
    """How long the index frame is, by the last bytes of the file.

    Raises:
        BadPart: they are not those of an index frame.
    """
    if len(footer) != FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise BadPart("no index ends here")
    return SKIPPABLE.size + int(_FOOTER.unpack(footer)[0]) + FOOTER_BYTES


def decode_index(frame: bytes) -> PartIndex:
    """The inverse of :func:`encode_index`.

    Raises:
        BadPart: it is not as it was written.
    """
    magic, length = SKIPPABLE.unpack_from(frame)
    text = frame[SKIPPABLE.size : -FOOTER_BYTES]
    known, checksum, _ = _FOOTER.unpack(frame[-FOOTER_BYTES:])
    if magic != INDEX_FRAME_MAGIC or length != len(frame) - SKIPPABLE.size or known != len(text):
        raise BadPart("the index frame has another length")
    if checksum != crc32c(text):
        raise BadPart("the checksum of the index is wrong")
    try:
        return _index(json.loads(text))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadPart("the index is not one of a ledger's part") from error


def _index(found: dict[str, Any]) -> PartIndex:
    return PartIndex(
        line=found["line"],
        lines=found["lines"],
        prev=found["prev"],
        tip=found["tip"],
        frames=[PartFrame._make([*each[:-1], _clock(*each[-1])]) for each in found["frames"]],
        clock=_clock(*found["clock"]),
        seen=_runs(found["seen"]),
        reclaimed=_runs(found["reclaimed"]),
        kept=found["kept"],
        archived={route: _runs(runs) for route, runs in found["archived"].items()},
        before=[PartSummary._make([*each[:-1], _clock(*each[-1])]) for each in found.get("before", ())],
    )


def _clock(elapsed_ns: int, boot: str, boottime_ns: int) -> Clock:
    return elapsed_ns, sys.intern(boot), boottime_ns  # of a boot there are thousands


def _runs(found: list[list[int]]) -> list[Run]:
    return [(first, last) for first, last in found]

"""Long ledgers, written by wald's own writer.

Each segment holds records of two routes. It was sealed, the records of one of them were archived, and it was deleted;
the ledgers have a line each for that. One segment comes after the other in the same time, up to now. Run as a program:

    ledgerdata LEDGER LINES NOW_NS     NOW_NS: when the last line was written
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald.files.uptime import boot_id

ROUTES = ("access", "audit")
"""The records of the first one are archived."""
RECORDS = 250
"""In a segment; the last ten are of the other route."""
_OF_FIRST = 240
_SEGMENT_NS = 3600 * 10**9 * 3 // 13_000  # so that three ledgers have 13,000 lines of the last hour
_BOOT_SEGMENTS = 3_000_000  # a month

Entry = dict[str, Any]


def write(path: Path, entries: int, now_ns: int) -> None:
    """Write the ledger whose current file is ``path``."""
    make, moments, disk = LINES[path.name], _Moments(entries, now_ns), _Unsynced()
    ledger = Ledger(path, disk)
    for number in range(entries):
        ledger.append(make(number, moments))
        ledger.cut()
    ledger.close()


class _Unsynced(Disk):
    """A disk that leaves syncing to the kernel, because a crash during a benchmark costs nothing."""

    def sync(self, descriptor: int) -> None: ...
    def sync_directory(self, path: Path) -> None: ...


class _Moments:
    """When each segment was sealed."""

    def __init__(self, segments: int, now_ns: int) -> None:
        self._first_ns = now_ns - segments * _SEGMENT_NS
        self._segments = segments

    def at(self, number: int) -> Entry:
        """The members of a line; the last boot is this one."""
        later = (self._segments - 1 - number) // _BOOT_SEGMENTS
        boot = str(uuid.UUID(int=later)) if later else boot_id()
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        since_ns = (self._segments - 1 - number) % _BOOT_SEGMENTS * _SEGMENT_NS
        boottime_ns = max(0, now_ns - since_ns) if not later else _BOOT_SEGMENTS * _SEGMENT_NS - since_ns
        return {"at": self._first_ns + number * _SEGMENT_NS, "boot": boot, "boottime": boottime_ns}


def _digest(number: int) -> str:
    """As hard to compress as a real one."""
    return sha256(b"%d" % number).hexdigest()


def _sealed(number: int, moments: _Moments) -> Entry:
    base, bytes_ = RECORDS * number + 1, 64 << 20
    routes = [
        [ROUTES[0], _OF_FIRST, base, base + _OF_FIRST - 1, bytes_ - (1 << 20)],
        [ROUTES[1], RECORDS - _OF_FIRST, base + _OF_FIRST, base + RECORDS - 1, 1 << 19],
    ]
    moment = moments.at(number)
    return {
        "event": "sealed",
        "base": base,
        "last": base + RECORDS - 1,
        "raw_bytes": bytes_ + number % 1000,
        "bytes": (bytes_ + number % 1000) // 8,
        "sha256": _digest(number),
        "routes": routes,
        "epoch": 1,
        **moment,
        "earliest": moment["at"] - 2 * _SEGMENT_NS,
        "latest": moment["at"] - _SEGMENT_NS,
    }


def _reclaimed(number: int, moments: _Moments) -> Entry:
    base = RECORDS * number + 1
    last, last_of_first = base + RECORDS - 1, base + _OF_FIRST - 1
    routes = [
        {"route": ROUTES[0], "count": _OF_FIRST, "first": base, "last": last_of_first, "cursors": {"archived": last}},
        {
            "route": ROUTES[1],
            "count": RECORDS - _OF_FIRST,
            "first": last_of_first + 1,
            "last": last,
            "cursors": {"processed": last},
        },
    ]
    moment = moments.at(number)
    return {
        "event": "reclaimed",
        "base": base,
        "last": last,
        "at": moment.pop("at"),
        "rule": "read",
        "bytes": ((64 << 20) + number % 1000) // 8,
        "sha256": _digest(number),
        "routes": routes,
        **moment,
    }


def _archived(number: int, moments: _Moments) -> Entry:
    base = RECORDS * number + 1
    last = base + _OF_FIRST - 1
    bag = f"{ROUTES[0]}/{base:020}-{last:020}"
    name = f"{ROUTES[0]}-{base:020}"
    return {
        "event": "archived",
        "route": ROUTES[0],
        "group": "archived",
        "dest": "/srv/archive",
        "bag": bag,
        "bundle": f"{name}.tar.zst",
        "path": f"{bag}/data/{name}.tar.zst",
        "first": base,
        "last": last,
        "after": base - 1 - (RECORDS - _OF_FIRST if number else 0),
        "count": _OF_FIRST,
        "runs": [RECORDS - _OF_FIRST if number else 0, _OF_FIRST],
        "parts": [[base, f"{name}/records-00001.ndjson"]],
        "sha256": _digest(-number),
        "at": moments.at(number)["at"],
    }


LINES: dict[str, Callable[[int, _Moments], Entry]] = {
    "segments.jsonl": _sealed,
    "reclaim.jsonl": _reclaimed,
    "archive.jsonl": _archived,
}
"""The line about a segment by its number, for each ledger."""

if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

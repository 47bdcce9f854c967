"""A pass of ``wald-reclaim`` in this process, on a disk that a test has chosen."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import Died
from logs import BOOT, Built, Unsynced

from wald.checking.audit_report import DeletionAudit
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.files.uptime import Moment
from wald.format.names import Kind
from wald_reclaim.apply import Deleter
from wald_reclaim.passes import Pass, Report, Settings
from wald_reclaim.policy import Limits, RouteLimits
from wald_reclaim.survey import Survey

ANYTHING_READ = Limits()
EXPIRE = RouteLimits(expire=True)


@dataclass
class Reclaimer:
    """One process, which keeps its caches between passes."""

    root: Root
    disk: Disk
    limits: Limits = ANYTHING_READ
    grace_ns: int = 0
    boot: str = BOOT
    stop: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    verify: bool = False
    shrink_pinned: bool = False

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.root.ledger / "reclaim.jsonl", self.disk, owner="wald-reclaim")
        self.now = Moment(self.boot, 0)
        log_id = read_identity(self.root).log_id
        self.survey = Survey(
            self.root, self.limits, log_id=log_id, verify=self.verify, clock=self.clock, moment=lambda: self.now
        )

    def deleter(self) -> Deleter:
        return Deleter(self.root, self.disk, self.ledger, self.survey)

    def look(self, *, now_ns: int, ahead_ns: int = 0) -> None:
        """Make a pass at ``now_ns`` by the wall clock, which is ``ahead_ns`` ahead of the monotonic clock."""
        self.now = Moment(self.boot, now_ns - ahead_ns)
        settings = Settings(self.limits, self.grace_ns, self.verify, self.shrink_pinned)
        one_pass = Pass(self.deleter(), settings, self.stop)
        report = Report(as_json=True, is_dry_run=False, watching=False, write=lambda _: None, warn=_warn)
        one_pass.run(report, now_ns=now_ns)


def _warn(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def reclaim(
    built: Built,
    limits: Limits = ANYTHING_READ,
    *,
    root: Root | None = None,
    disk: Disk | None = None,
    grace_ns: int = 0,
    shrink_pinned: bool = False,
) -> None:
    """Make a pass in a fresh instance without caches; ``root`` is a copy of the log."""
    root, disk = root or built.root, disk or built.disk
    reclaimer = Reclaimer(root, disk, limits, grace_ns, built.boot, shrink_pinned=shrink_pinned)
    try:
        reclaimer.look(now_ns=built.now_ns, ahead_ns=built.ahead_ns)
    finally:
        reclaimer.ledger.close()


class DyingAfterShrink(Unsynced):
    """Disk on which the process dies as soon as the shrunk form of a segment has its name."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name.endswith(".shrunk.tmp"):
            raise Died


def four_segments(path: Path, *, read: int = 0) -> Built:
    """Build sealed segments 1, 3, 5 and 7, each with a record of route a and one of route b; 9 is active."""
    built = Built(path)
    for _ in range(4):
        built.lines("a", [b"x"])
        built.lines("b", [b"y"])
        built.cut()
        built.seal()
    for route in "ab" if read else "":
        built.log.set_cursor(route, read)
    return built


def archived(built: Built, route: str, last: int, *, first: int = 1, after: int | None = None) -> None:
    """Write the ledger line of a bundle."""
    line = {"event": "archived", "route": route, "first": first, "last": last, "bundle": f"{route}{last}"}
    archive = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    archive.append(line | {"after": first - 1 if after is None else after})
    archive.close()


def bases(root: Root, kind: Kind = Kind.SEALED) -> list[int]:
    """Return the base sequences of the segments of one kind."""
    listing = list_segments(root)
    return [s.base_sequence for s in (*listing.segments, *listing.released) if s.kind is kind]


def ledger(root: Path) -> list[dict[str, Any]]:
    """Return the lines of reclaim.jsonl, whose chain must be intact."""
    decoded = read_ledger(root / "ledger/reclaim.jsonl")
    assert decoded.broken_lines == []
    return decoded.entries


def rulings(root: Root) -> dict[int, tuple[str, ...]]:
    """Return the objections of ``wald history`` to each deletion."""
    story = DeletionAudit(root)
    return {event.ruling.base: event.ruling.errors for event in story.events() if event.ruling is not None}


def pinned_hole(built: Built) -> None:
    """Have records 4 to 6 of route a reclaimed behind a segment that route b pins; groups of a begin at record 1."""
    built.lines("b", [b"pins"])
    built.lines("a", [b"2", b"3"])
    for lines in ([b"4", b"5", b"6"], [b"7", b"8"], [b"9"]):
        built.cut()
        built.lines("a", lines)
    built.seal()
    built.log.set_cursor("a", 6, "old")
    built.log.set_cursor("b", 0, "g")
    reclaim(built)
    assert bases(built.root) == [1, 7], bases(built.root)

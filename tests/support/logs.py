"""Real logs for tests, built with the parts of the daemon, one step at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import wald
from wald.files.disk import Disk
from wald.files.identity import create_root, read_identity
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.files.routes import add_route
from wald.files.uptime import Moment
from wald.format.batch import Encoding, Flag
from wald.format.head import HEAD_BYTES, Head, encode_head
from wald.format.ledger_lines import Entry
from wald.format.names import Kind, segment_name
from wald.format.records import encode_columns
from wald.format.segment import pack_version
from wald.log import Log
from wald.segments.sealed_file import SealedFile
from wald.segments.view import View, read_view
from wald.writing.recovery import recover
from wald.writing.sealing import remove_temporaries, seal
from wald.writing.writer import Draft, Route, Writer

START_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000
BOOT = "first boot"
WEB = Route.named("web")


class Unsynced(Disk):
    """A fast disk that skips syncs, for tests in which the machine does not fail."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class Built:
    """A log that a test appends to; each commit advances the clock by a second and moves the head.

    A second instance on the same path is a restart, in any state of the first one.
    """

    def __init__(
        self,
        path: Path,
        *,
        segment_max_bytes: int = 1 << 20,
        disk: Disk | None = None,
        epoch: int = 1,
        now_ns: int = START_NS,
        sync_commits: bool = True,
    ) -> None:
        self.disk = disk or Unsynced()
        self.root = create_root(path, self.disk, now="2026-11-21T10:00:00Z")
        self.log_id = read_identity(self.root).log_id
        self.now_ns = now_ns
        self.boot = BOOT
        self.ahead_ns = 0
        remove_temporaries(self.root, self.disk)
        recovered = recover(self.root, self.disk, log_id=self.log_id, epoch=epoch, now_ns=now_ns)
        self.report = recovered.report
        self.ledger = Ledger(self.root.ledger / "segments.jsonl", self.disk)
        self.writer = Writer(
            self.root,
            self.disk,
            recovered.state,
            log_id=self.log_id,
            epoch=epoch,
            segment_max_bytes=segment_max_bytes,
            now_ns=self.now_ns,
            carry=recovered.carry,
            sync_commits=sync_commits,
            version=pack_version(wald.__version__),
        )
        self.publish()

    @property
    def log(self) -> Log:
        return Log(self.root.path)

    @property
    def view(self) -> View:
        return read_view(self.root, self.log_id)

    @property
    def last(self) -> int:
        return self.writer.state.next_sequence - 1

    def lines(self, route: str, lines: Sequence[bytes], *, publish: bool = True, cut: bool = False) -> int:
        """Append one batch of lines; return the first sequence."""
        first = self.append(route, b"".join(line + b"\n" for line in lines), len(lines), publish=publish)
        if cut:
            self.cut()
        return first

    def columns(
        self,
        route: str,
        values: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        times_ns: Sequence[int] | None = None,
        headers: Sequence[bytes | None] | None = None,
    ) -> int:
        """Append one batch of columns; return the first sequence."""
        payload = encode_columns(values, keys=keys, times_ns=times_ns, headers=headers)
        return self.append(route, payload, len(values), encoding=Encoding.COLUMNS)

    def piece(self, route: str, payload: bytes, *, begins: bool, ends: bool) -> int:
        """Append a piece of a long record; without a newline at its end, ``ends`` leaves it unterminated."""
        open_records = self.writer.state.open_records
        flags = Flag.NONE if begins else Flag.CONTINUES
        newlines = payload.count(b"\n")
        if not ends:
            flags |= Flag.CONTINUED
        elif not payload.endswith(b"\n"):
            flags |= Flag.UNTERMINATED
        tail = bool(flags & (Flag.CONTINUED | Flag.UNTERMINATED))
        continues = 0 if begins else open_records[route]
        return self.append(route, payload, newlines + tail - (not begins), flags=flags, continues=continues)

    def append(
        self,
        route: str,
        payload: bytes,
        count: int,
        *,
        encoding: int = Encoding.LINES,
        flags: int = 0,
        continues: int = 0,
        publish: bool = True,
    ) -> int:
        if not (self.root.routes / route).is_dir():
            add_route(self.root, self.disk, route)
        self.now_ns += SECOND_NS
        draft = Draft(Route.named(route), [payload], len(payload), count, encoding, flags, continues)
        self.writer.commit(self.writer.place([draft]), now_ns=self.now_ns)
        if publish:
            self.publish()
        return draft.base_sequence

    def publish(self) -> None:
        """Move the head to the last commit, in place like the daemon."""
        writer = self.writer
        head = Head(self.last, writer.base_sequence, writer.position, writer.epoch, writer.state.append_time_ns)
        descriptor = os.open(self.root.head, os.O_RDWR | os.O_CREAT, 0o640)
        os.pwrite(descriptor, encode_head(head), 0)
        os.close(descriptor)
        assert self.root.head.stat().st_size == HEAD_BYTES

    def cut(self, *, seal: bool = False) -> None:
        self.writer.cut(now_ns=self.now_ns)
        self.publish()
        if seal:
            self.seal()

    def crash(self) -> None:
        """Simulate SIGKILL: close descriptors and do nothing else."""
        os.close(self.writer._descriptor)
        if self.writer._index is not None:
            self.writer._index.close()
        self.ledger.close()

    def restart(self) -> Built:
        """Kill the daemon and start the next one."""
        self.crash()
        return Built(self.root.path, epoch=self.writer.epoch + 1, now_ns=self.now_ns)

    def seal(self, *, keep: int = 0) -> None:
        """Seal every complete segment except the newest ``keep``."""
        segments = list_segments(self.root).segments
        cut = [s for s in segments if s.kind is Kind.RAW and s.base_sequence < self.writer.base_sequence]
        for segment in cut[: len(cut) - keep]:
            seal(self.root, segment, self.disk, self.ledger, now=lambda: self.now_ns, moment=self.moment)

    def moment(self) -> Moment:
        """Return a moment of the monotonic clock; the wall clock is ``ahead_ns`` ahead."""
        return Moment(self.boot, self.now_ns - self.ahead_ns)

    def path(self, base: int, kind: Kind) -> Path:
        return self.root.segments / segment_name(base, kind)

    def reclaim(self, base: int, *, keep: bool = False, named: bool = False) -> None:
        """Delete a sealed segment as RECLAIM does: ledger, rename, and (unless ``keep``) unlink."""
        following = min(s.base_sequence for s in list_segments(self.root).segments if s.base_sequence > base)
        entry: Entry = {"event": "reclaimed", "base": base, "last": following - 1, "at": self.now_ns}
        if named:
            with SealedFile(self.path(base, Kind.SEALED)) as sealed:
                held = [
                    dict(zip(("route", "count", "first", "last"), each, strict=False)) for each in sealed.index.routes
                ]
            entry["routes"] = held
        write_entries(self.root.ledger / "reclaim.jsonl", entry)
        self.path(base, Kind.SEALED).rename(self.path(base, Kind.RELEASED))
        if not keep:
            self.path(base, Kind.RELEASED).unlink()


def write_entries(path: Path, *entries: Entry) -> None:
    """Append to a ledger at once, as its owner does."""
    ledger = Ledger(path, Unsynced())
    ledger.append(*entries)
    ledger.close()


def two_routes(path: Path, segments: int) -> Built:
    """Build a log of sealed segments, each with five records of route a and one of b, and an active one."""
    built = Built(path)
    for _ in range(segments):
        built.lines("a", [b"x"] * 5)
        built.lines("b", [b"y"])
        built.cut()
    built.seal()
    return built


def draft(payload: bytes, *, producer: tuple[int, int] = (0, 0), route: Route = WEB) -> Draft:
    """Return a batch of lines."""
    count = payload.count(b"\n")
    return Draft(route, [payload], len(payload), count, producer_id=producer[0], producer_sequence=producer[1])


def commit(built: Built, drafts: list[Draft], *, publish: bool = True) -> None:
    """Append drafts in one write."""
    built.writer.commit(built.writer.place(drafts), now_ns=built.now_ns)
    if publish:
        built.publish()

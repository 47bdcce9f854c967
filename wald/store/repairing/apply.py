"""Carrying a plan out, in steps of which each can be repeated.

Whatever is replaced or removed gets a second name in ``quarantine/`` first, then its line in the ledger. After that
one rename replaces it, or one unlink removes it. A repair that was killed is finished by the next one: it finds the
old file in its place, or the new one. The parts of a segment get their names newest first, so that what is in front of
a part that is there is all that is left to be done.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wald.errors import Damaged
from wald.format.head import Head, encode_head
from wald.format.names import SEQUENCE_MAX, Kind
from wald.format.sealed import SealedIndex
from wald.format.tables import RouteEntry
from wald.store.files.directory import TEMPORARY, Root
from wald.store.files.disk import Disk
from wald.store.files.identity import encode_identity
from wald.store.files.ledger_write import Ledger
from wald.store.files.leftovers import remove_abandoned
from wald.store.files.listing import Listing, Segment, list_segments
from wald.store.files.regular import open_file
from wald.store.files.uptime import Moment
from wald.store.repairing.facts import Facts, SegmentFacts, dropped_lasts
from wald.store.repairing.ledgers import begin_again
from wald.store.repairing.loss import records_lost, routes_lost
from wald.store.repairing.plan import Act, Deed
from wald.store.repairing.rewrite import Made, Source, remake
from wald.store.retention.history import History
from wald.store.segments.compression import SealedFile
from wald.store.segments.indexes import remove_index
from wald.store.segments.raw import RawFile, SegmentEnd
from wald.store.writing.lock import require_own_files
from wald.store.writing.replay import state_after, state_before
from wald.store.writing.sealer import sealed_entry

Entry = dict[str, Any]
"""A line of a ledger; ``Any``: it is JSON."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Carries out acts. The caller holds the locks.

    Args:
        epoch: of the lock.
        now: the time for the ledger, ns since 1970.
        moment: the time by a clock that cannot be set.
    """

    root: Root
    disk: Disk
    epoch: int
    now: Callable[[], int]
    moment: Callable[[], Moment]

    def carry_out(self, act: Act, facts: Facts) -> None:
        """
        Raises:
            Damaged: what was made does not read back.
            OSError: a step failed. The next repair finishes it.
        """
        match act.deed:
            case Deed.LEDGER:
                begin_again(self.root, self.disk, act.path, now_ns=self.now())
            case Deed.IDENTITY:
                self._identify(act)
            case Deed.REMOVE:
                self._remove_temporary(act.path)
            case Deed.RENAME:
                assert act.target is not None
                self._rename(act.path, act.target)
            case Deed.PUT_BACK:
                self._put_back(act.path, facts.put_back[act.path])
            case Deed.CLEAR:
                self.keep(act.path)
                self._remove(act.path)
            case Deed.SET_ASIDE:
                self._set_aside(act)
            case Deed.REMAKE:
                self._remake(act, facts)
            case Deed.GIVE_UP:
                self._record(*self._losses(act, ""))
            case Deed.RECORD:
                assert act.facts is not None
                self._record(self._sealed(act.facts.segment.path))
            case Deed.HEAD:
                self._head(facts)

    def _identify(self, act: Act) -> None:
        assert act.identity is not None
        log_id = uuid.UUID(bytes=act.identity.log_id)
        kept = {"kept": self.keep(act.path)} if os.path.lexists(act.path) else {}
        self._record({"event": "identified", "log": log_id.hex, "why": act.reason} | kept | self._when())
        self.disk.replace(act.path, encode_identity(log_id, now=act.identity.created))

    def _remove_temporary(self, path: Path) -> None:
        if path.parent in (self.root.segments, self.root.quarantine, self.root.recovery):
            self.disk.unlink(path)  # the locks that the caller holds keep others from making files there
        else:
            with suppress(FileNotFoundError):
                remove_abandoned(path, self.disk)
        self.disk.sync_directory(path.parent)

    def _rename(self, path: Path, target: Path) -> None:
        """Give a segment another name, which no file has; the hints beside both are another segment's."""
        for each in (path, target):
            if each.name.endswith(Kind.RAW.value):
                remove_index(each.with_name(each.name + ".idx"), self.disk)
        self.disk.rename_to_free(path, target)
        self.disk.sync_directory(path.parent)

    def _put_back(self, path: Path, whole: Path) -> None:
        if path.exists():
            self.keep(path)
        self.disk.rename(whole, path)
        self.disk.sync_directory(path.parent)

    def _set_aside(self, act: Act) -> None:
        kept = self.keep(act.path)
        self._record(*self._losses(act, kept), self._repaired(act, kept))
        self._remove(act.path)

    def _remake(self, act: Act, facts: Facts) -> None:
        assert act.facts is not None
        old = act.facts.segment
        kept = self.keep(act.path)
        twin = act.facts.twin
        if twin is not None:
            self.keep(twin)
        older, dropped = self._older(old), facts.history.dropped_lasts
        before = state_before(self.root, old, older, facts.log_id, [], dropped)
        made = remake(self.root, self.disk, _source(act, act.facts, facts, History(self.root)), before)
        self._record(
            *self._losses(act, kept),
            self._repaired(act, kept),
            *(self._sealed_line(each.index, each.path) for each in made if each.index is not None),
        )
        self._put_in_place(old, made)
        if twin is not None:
            self._remove(twin)
        if not act.loses and not self._is_named(kept, act.facts.base):
            self._forget(self.root.path / kept)

    def _older(self, segment: Segment) -> Listing:
        there = list_segments(self.root).segments
        return Listing(tuple(each for each in there if each.base_sequence < segment.base_sequence))

    def _put_in_place(self, old: Segment, made: list[Made]) -> None:
        kind = old.kind.form
        for each in reversed(made):
            self.disk.rename(each.path, self.root.segment(each.base_sequence, kind))
            # Not before the rename: the old segment may have lost its header, and the index has the salt.
            remove_index(self.root.segment(each.base_sequence, Kind.INDEX), self.disk)
            self.disk.sync_directory(self.root.segments)
        if not any(each.base_sequence == old.base_sequence for each in made):
            self._remove(old.path)

    def _remove(self, path: Path) -> None:
        """Remove a file that has a second name in ``quarantine/``; of a raw segment the sparse index, too."""
        if path.name.endswith(Kind.RAW.value):
            remove_index(path.with_name(path.name + ".idx"), self.disk)
        self.disk.unlink(path)
        self.disk.sync_directory(path.parent)

    def keep(self, path: Path) -> str:
        """Give a file a second name in ``quarantine/``, or copy it there; returns the name, as a path in the root."""
        target = self.root.quarantine / f"{path.name}.{_digest(path)[:16]}"
        if not target.exists():
            try:
                self.disk.link(path, target)
            except OSError:  # the file system has no links
                self._copy(path, target)
            self.disk.sync_directory(self.root.quarantine)
        return os.fspath(target.relative_to(self.root.path))

    def _copy(self, path: Path, target: Path) -> None:
        temporary = target.with_name(target.name + TEMPORARY)
        temporary.unlink(missing_ok=True)
        descriptor = self.disk.create(temporary)
        try:
            with open_file(path) as file:
                self.disk.copy(descriptor, file.fileno(), os.fstat(file.fileno()).st_size, 0)
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)
        self.disk.rename(temporary, target)

    def _is_named(self, kept: str, base: int) -> bool:
        """Whether the ledger says of records of a segment that what is left of them is in ``kept``."""
        return any(loss.kept == kept for loss in History(self.root).losses(base, SEQUENCE_MAX))

    def _forget(self, kept: Path) -> None:
        """Remove the old file of a segment that was made again without a loss."""
        with suppress(FileNotFoundError):
            self.disk.unlink(kept)
            self.disk.sync_directory(self.root.quarantine)

    def _record(self, *entries: Entry) -> None:
        """Write lines into the ledger; they are on disk when this returns."""
        with closing(Ledger(self.root.ledger / "segments.jsonl", self.disk)) as ledger:
            ledger.append(*entries)

    def _losses(self, act: Act, kept: str) -> Iterator[Entry]:
        """A line for each span of records that is given up; none for what a killed repair has recorded."""
        history, left = History(self.root), act.lost_records
        for first, last in act.lost:
            if not any(history.unexplained(first, last)):
                continue
            broken = act.broken.get(first) if first == last else None  # its other pieces stay, and those of others
            reason = act.reason if broken is None else "a piece of it is lost"
            entry: Entry = {"event": "lost", "base": first, "last": last, "why": reason}
            records = min(left, records_lost([(first, last)], act.facts, history))
            left -= records  # by the ledger alone, each span is counted as if it had all that is lost of the segment
            if records < last - first + 1:
                entry["records"] = records
            if kept:
                entry["kept"] = kept
            if broken is not None:
                routes: list[RouteEntry] | None = [RouteEntry(broken, 1, first, last, 0)]
            else:
                routes = routes_lost((first, last), act.facts.segment if act.facts is not None else None, history)
            if routes is not None:
                entry["routes"] = [list(route) for route in routes]
            yield entry | self._when()

    def _repaired(self, act: Act, kept: str) -> Entry:
        assert act.facts is not None
        facts = act.facts
        last = max((span[1] for span in facts.spans), default=facts.base - 1)
        entry = {"event": "repaired", "base": facts.base, "last": last, "why": act.reason, "deed": act.deed.value}
        return entry | {"kept": kept, "lossless": not act.loses, "epoch": self.epoch} | self._when()

    def _sealed(self, path: Path) -> Entry:
        with SealedFile(path) as sealed:
            return self._sealed_line(sealed.index, path)

    def _sealed_line(self, index: SealedIndex, path: Path) -> Entry:
        return {"event": "sealed"} | sealed_entry(index, path.stat().st_size, self.moment(), self.now())

    def _when(self) -> Entry:
        return {"at": self.now()} | self.moment().as_entry()

    def _head(self, facts: Facts) -> None:
        """The head, at the end of the newest segment; its sequence never goes down."""
        segments = list_segments(self.root).segments
        if not segments:
            return  # its sequence is still right, and no segment is left to stand in
        newest = segments[-1]
        state = state_after(Listing((newest,)), facts.log_id, [])
        last = max(facts.last, state.next_sequence - 1)
        require_own_files(self.root)
        head = Head(last, newest.base_sequence, self._end(newest), self.epoch, state.append_time_ns)
        self.disk.replace(self.root.head, encode_head(head))

    def _end(self, segment: Segment) -> int:
        """Where its batches end. What was whole and not synced is synced now: readers see it from now on."""
        if segment.kind.form is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return sealed.index.raw_bytes
        descriptor = self.disk.open(segment.path)
        try:
            self.disk.sync(descriptor)
            return next(found.offset for found in RawFile(descriptor).scan() if isinstance(found, SegmentEnd))
        finally:
            self.disk.close(descriptor)


def _source(act: Act, found: SegmentFacts, facts: Facts, history: History) -> Source:
    def broken(sequence: int) -> bool:
        lost = sequence in act.broken
        # A repair that was killed, or an earlier one, may have left out its beginning.
        return lost or (not any(each.holds(sequence) for each in facts.segments) and history.is_given_up(sequence))

    survey = found.survey
    following = [each.base for each in facts.segments if each.base > found.base and not each.problem]
    return Source(
        found.segment,
        facts.log_id,
        found.durable,
        min(following, default=1 << 64),
        broken,
        whole=survey is not None and not survey.reason and not any(found.holds(each) for each in act.broken),
        cut=found.cut,
        dropped=dropped_lasts(found.segment, history),
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except (OSError, Damaged):  # bytes that the disk does not give; the name is only to be the same each time
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()

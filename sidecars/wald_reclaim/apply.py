"""Deletion and shrinking of segments, in steps that the next pass finishes or undoes.

    complete    the ledger's line, synced; then the name ``.released``
    released    after the grace period the name ``.deleting``; the cursors are read again before and after that, in the
                same run and in each later one
    deleting    unlinked

    sealed               the shrunk form in a temporary file, synced, read back and compared with the old one
    sealed + temporary   the ledger's line, synced; then the second name ``.whole`` for the old form
    + whole              the temporary file gets the segment's name; the cursors are read again
    shrunk + whole       the old form gets its name back if a cursor needs it, otherwise its second name is removed

A process that sets a cursor writes it first and then reads the names. So either this code reads the cursor after
changing the name, and gives the old form its name back, or that process sees the new name. The sealer does the same:
it creates its temporary file first, and then opens the raw segment by its old name.

At each step of a shrink one complete form has the segment's name. A line about an unfinished shrink has a digest that
matches no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import SHRUNK_SUFFIX, Root
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.format.ledger_lines import Entry
from wald.format.names import WHOLE_SUFFIX, Kind, parse_segment_name
from wald.format.sealed_index import BadSealed
from wald.hints import command_line
from wald.retention.blockers import CursorSnapshot, read_cursor_snapshot, sealed_index
from wald.segments.index_builder import remove_index
from wald.segments.reader import require_matching_name
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Shrinkage, check_shrunk, compare_shrunk, shrink_segment
from wald_reclaim.evidence import SEALED_SINCE, shared_entry, shrunk_entry
from wald_reclaim.policy import Floors, Verdict
from wald_reclaim.survey import Decision, Survey

# Recorded with one sync of the ledger, and renamed with one of the directory:
_RELEASED_AT_ONCE = 128
_DELETED_AT_ONCE = 2048  # the cursors are read once for all of them, which is slow if there are thousands
_BYTES_AT_ONCE = 1 << 20  # of their lists of routes, which limits the memory for segments with a thousand routes
_SHRINK_AGAIN_SECONDS = 600.0  # before a segment is examined again, because there may be thousands


@dataclass(frozen=True, slots=True)
class Deleter:
    """Deletes segments; the only code that does."""

    root: Root
    disk: Disk
    ledger: Ledger
    survey: Survey
    # raises an error if the root has another log or an older copy; called before each change
    require_continuity: Callable[[], None] = lambda: None

    def record(self, *entries: Entry) -> None:
        """Write lines into the ledger; they are durable when this returns."""
        self.require_continuity()  # the open ledger belongs to the log that was here when it was opened
        self.ledger.append(*entries)
        self.ledger.cut()
        for entry in entries:
            self.survey.record(entry)

    def release(self, decisions: Iterable[Decision], *, now_ns: int) -> Iterator[Decision]:
        """Rename the segments to delete; yield each decision once it has been applied or revised.

        :meth:`delete` must confirm them.
        """
        for group in _groups(decisions):
            self.require_continuity()
            if entries := self._entries(group):
                self.record(*entries)
            withdrawn: list[Entry] = []
            for number, decision in enumerate(group):
                if not decision.verdict.is_deletion:
                    continue
                segment = decision.segment
                try:
                    self._rename(segment, segment.kind.released)
                except FileExistsError:
                    message = self._name_exists(segment, segment.kind.released)
                    group[number] = replace(decision, verdict=Verdict.UNREADABLE, message=message)
                    withdrawn.append(self.survey.kept(segment, Verdict.UNREADABLE.value, now_ns))
                except FileNotFoundError:
                    sealed = self.root.segment(segment.base_sequence, Kind.SEALED)
                    if segment.kind is not Kind.RAW or not sealed.exists():
                        raise
                    # The next pass decides about the sealed form, and withdraws the line if this process is killed.
                    group[number] = replace(decision, verdict=Verdict.SEALING)
                    withdrawn.append(self.survey.kept(segment, SEALED_SINCE, now_ns))
            if any(decision.verdict.is_deletion for decision in group):
                self.disk.sync_directory(self.root.segments)
            if withdrawn:
                self.record(*withdrawn)
            yield from group

    def delete(self, released: Sequence[Segment], due: Sequence[Segment], *, now_ns: int) -> Iterator[Decision]:
        """Unlink the segments whose grace period is over; yield the decision about each released one.

        A segment without a line in the ledger (which was lost, or the file was renamed by hand) gets one first.
        """
        due_bases = {segment.base_sequence for segment in due}
        for start in range(0, len(released), _DELETED_AT_ONCE):
            self.require_continuity()
            segments = []
            for segment in released[start : start + _DELETED_AT_ONCE]:
                with suppress(FileExistsError):  # retried until the other file is gone
                    is_due = segment.base_sequence in due_bases
                    segments.append(self._rename(segment, segment.kind.deleting) if is_due else segment)
            decisions = self._restore(self.survey.confirm(segments, now_ns=now_ns))
            deletions = [decision for decision in decisions if decision.verdict.is_deletion]
            if entries := self._entries(deletions):
                self.record(*entries)
            for segment in (decision.segment for decision in deletions):
                if segment.kind is segment.kind.deleting:
                    if segment.kind.form is Kind.RAW:
                        remove_index(self.root.segment(segment.base_sequence, Kind.INDEX), self.disk)
                    self.disk.unlink(segment.path)
                    self.survey.forget_deleted(segment)
            if due_bases:
                self.disk.sync_directory(self.root.segments)
            yield from decisions

    def _entries(self, group: Sequence[Decision]) -> list[Entry]:
        """Return the lines about a group; first those that withdraw earlier lines, and the shared line."""
        withdrawals = [decision.withdrawal for decision in group if decision.withdrawal is not None]
        lines = [(decision.entry, decision.evidence) for decision in group if decision.entry is not None]
        sharing = [(entry, evidence) for entry, evidence in lines if evidence is not None]
        if not sharing:
            return [*withdrawals, *(entry for entry, _ in lines)]
        shared = shared_entry([entry for entry, _ in sharing], [evidence for _, evidence in sharing])
        reference = {"evidence": shared["base"]}
        return [*withdrawals, shared, *(entry if evidence is None else entry | reference for entry, evidence in lines)]

    def _rename(self, segment: Segment, kind: Kind) -> Segment:
        """Rename the segment to the name of another state; raise FileExistsError if another file has that name."""
        path = self.root.segment(segment.base_sequence, kind)
        if path != segment.path:
            self.disk.rename_to_free(segment.path, path)
        return Segment(segment.base_sequence, kind, path)

    def _restore(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Restore the names of segments that stay, and record that; messages use the restored names."""
        restored = []
        entries = []
        for decision in decisions:
            segment = decision.segment
            if decision.verdict.is_deletion or decision.keeps_name:
                restored.append(decision)
                continue
            try:
                old = self._rename(segment, segment.kind.form)
            except FileExistsError:
                message = self._name_exists(segment, segment.kind.form)
                restored.append(replace(decision, message=message, keeps_name=True))
                continue
            restored.append(replace(decision, message=decision.message.replace(str(segment.path), str(old.path))))
            entries += [decision.entry] if decision.entry is not None else []
        if any(not decision.verdict.is_deletion for decision in restored):
            # Before the line: as long as the old name is not durable, a released name must be confirmed again.
            self.disk.sync_directory(self.root.segments)
        if entries:
            self.record(*entries)
        return restored

    def _name_exists(self, segment: Segment, kind: Kind) -> str:
        path = self.root.segment(segment.base_sequence, kind)
        return str(_with_repair_hint(f"{segment.path}: not renamed: {path.name} already exists", self.root))


def _with_repair_hint(message: str, root: Root) -> Damaged:
    return Damaged(message, hint=f"{command_line(root.path, 'repair --dry-run')} shows what can be done")


def _groups(decisions: Iterable[Decision]) -> Iterator[list[Decision]]:
    """Group decisions for one sync; decisions in a group that share a line rest on the same cursors."""
    group: list[Decision] = []
    size, cursors = 0, None
    for decision in decisions:
        own = decision.evidence.cursors if decision.evidence is not None else cursors
        if cursors is not None and own is not cursors:
            yield group
            group, size = [], 0
        cursors = own
        group.append(decision)
        size += len(decision.entry.get("routes", "")) if decision.entry else 0
        if len(group) == _RELEASED_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield group
            group, size, cursors = [], 0, None
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class ShrunkSegment:
    """Segment that was shrunk, or in a dry run would be."""

    segment: Segment
    bytes: int
    was_bytes: int
    records: int = 0  # number of dropped records; 0 if unknown
    is_restored: bool = False  # a cursor was moved back in the meantime, so that the old form got its name back


class Shrinker:
    """Shrinks segments; the only code that does."""

    def __init__(self, deleter: Deleter, *, require_archived: bool = False) -> None:
        self._root, self._disk, self._survey = deleter.root, deleter.disk, deleter.survey
        self._record = deleter.record
        self._require_archived = require_archived
        self._examined_at: dict[int, float] = {}

    def finish(self) -> list[Damaged]:
        """Finish or undo shrinks that an interrupted process began."""
        problems: list[Damaged] = []
        names = [
            entry.name
            for entry in os.scandir(self._root.segments)
            if entry.name.endswith((SHRUNK_SUFFIX, WHOLE_SUFFIX))
        ]
        for name in names:
            found = parse_segment_name(name.removesuffix(WHOLE_SUFFIX))
            if name.endswith(SHRUNK_SUFFIX):
                self._disk.unlink(self._root.segments / name)
            elif found is not None and found.kind is Kind.SEALED:
                path = self._root.segment(found.base_sequence, Kind.SEALED)
                segment = Segment(found.base_sequence, Kind.SEALED, path)
                try:
                    require_matching_name(segment._replace(path=_whole(segment)), self._survey.log_id)
                    if self._survey.history.deletion_of(segment.base_sequence) is not None:
                        self._disk.unlink(_whole(segment))  # the segment was deleted in the meantime
                    else:
                        self._settle(segment, self._replaces_whole)
                except (Damaged, BadSealed) as error:
                    problems.append(_with_repair_hint(f"{_whole(segment)}: not removed: {error}", self._root))
        return problems

    def shrink(self, segment: Segment, *, now_ns: int) -> ShrunkSegment | None:
        """Shrink a segment; return None if that frees too little."""
        now = self._survey.clock()
        if now - self._examined_at.get(segment.base_sequence, -_SHRINK_AGAIN_SECONDS) < _SHRINK_AGAIN_SECONDS:
            return None
        self._examined_at[segment.base_sequence] = now
        temporary = segment.path.with_name(segment.path.name + SHRUNK_SUFFIX)
        try:
            with SealedFile(segment.path) as source:
                cursors = self._cursors()
                floors = Floors.of(
                    source.index, cursors, self._survey.history.all_archived if self._require_archived else None
                )
                if source.index.damage or not floors.freed_bytes(source.index, source.stored_bytes):
                    return None
                shrinkage = self._write(source, temporary, floors)
                was_bytes = source.stored_bytes
                entry = shrunk_entry(segment, shrinkage, source.index, was_bytes, cursors, now_ns)
                self._record(self._survey.stamped(entry))
                self._disk.link(segment.path, _whole(segment))
                self._survey.forget_file(segment)
                self._disk.rename(temporary, segment.path)
                is_shrunk = self._settle(segment, self._has_all_needed)
        except OSError:
            del self._examined_at[segment.base_sequence]
            raise
        except BadSealed as error:
            hint = f"wald inspect --content {segment.path} shows what it holds"
            raise Damaged(f"{segment.path}: {error}", hint=hint) from error
        finally:
            with suppress(FileNotFoundError):
                self._disk.unlink(temporary)
        records = sum(each.count for each in shrinkage.dropped)
        stored_bytes = shrinkage.stored_bytes if is_shrunk else was_bytes
        return ShrunkSegment(segment, stored_bytes, was_bytes, records, is_restored=not is_shrunk)

    def _write(self, source: SealedFile, temporary: Path, floors: Floors) -> Shrinkage:
        target = self._disk.create(temporary)
        try:
            shrinkage = shrink_segment(source, target, self._disk, floors.keeps)
            self._disk.sync(target)
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)  # read it back from the disk, not from the cache
        finally:
            self._disk.close(target)
        with SealedFile(temporary) as written:
            check_shrunk(source, written, shrinkage, floors.keeps)
        return shrinkage

    def _settle(self, segment: Segment, is_enough: Callable[[Segment], bool]) -> bool:
        """Remove the ``.whole`` name of the old form if the new form ``is_enough``; otherwise restore the old form."""
        self._disk.sync_directory(self._root.segments)  # before the cursors are read, and the old form is removed
        if is_enough(segment):
            self._disk.unlink(_whole(segment))
            return True
        self._survey.forget_file(segment)
        self._disk.rename(_whole(segment), segment.path)
        if _whole(segment).exists():  # both are names of one file, and rename(2) does nothing then
            self._disk.unlink(_whole(segment))
        self._disk.sync_directory(self._root.segments)
        return False

    def _has_all_needed(self, segment: Segment) -> bool:
        """Return True if no group needs a record dropped from a form that was just read back."""
        shrunk, cursors = sealed_index(segment, self._survey.log_id).shrunk, self._cursors()
        return shrunk is not None and all(entry.last <= cursors.floor(entry.route) for entry in shrunk.routes)

    def _replaces_whole(self, segment: Segment) -> bool:
        """Return True if the form left by an interrupted process has every batch of the old form that a group needs.

        It may have been damaged, rebuilt by a repair or replaced by another file, so its index alone proves nothing.
        """
        with suppress(FileNotFoundError):
            require_matching_name(segment, self._survey.log_id)
        with SealedFile(_whole(segment)) as source:
            floors = Floors.of(source.index, self._cursors(), None)
            try:
                shrunk = SealedFile(segment.path)
            except (FileNotFoundError, BadSealed, Damaged):
                shrunk = None
            if shrunk is not None:
                with shrunk:
                    try:
                        compare_shrunk(source, shrunk, floors.keeps)
                        return True
                    except (BadSealed, Damaged):
                        if not shrunk.damage():
                            compare_shrunk(shrunk, source, floors.keeps)
            for _, error in source.damage():
                raise error
            return False

    def _cursors(self) -> CursorSnapshot:
        return read_cursor_snapshot(self._root, log_id=self._survey.log_id)


def _whole(segment: Segment) -> Path:
    return segment.path.with_name(segment.path.name + WHOLE_SUFFIX)


def estimate_shrinks(
    root: Root, survey: Survey, segments: Iterable[Segment], *, require_archived: bool
) -> Iterator[ShrunkSegment]:
    cursors = read_cursor_snapshot(root, log_id=survey.log_id)
    all_archived = survey.history.all_archived if require_archived else None
    for segment in segments:
        with suppress(Damaged, BadSealed, FileNotFoundError):
            index, stored_bytes = sealed_index(segment, survey.log_id), segment.path.stat().st_size
            freed = Floors.of(index, cursors, all_archived).freed_bytes(index, stored_bytes)
            if freed and not index.damage:
                yield ShrunkSegment(segment, stored_bytes - freed, stored_bytes)

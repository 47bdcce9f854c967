"""Shrinking, in steps of which a later pass finishes or undoes each.

    sealed                 the new form in a temporary file, synced, read back and compared with the old one
    sealed + temporary     the ledger's line, synced; then the second name ``.whole`` for the old form
    + whole                the temporary file gets the segment's name; the cursors are read again
    shrunk + whole       the old form gets its name back if a cursor needs it by then, else its second name is removed

A process that sets a cursor writes it first and looks at the segments afterwards. So either the cursor is read here
after the name has changed, or that process sees what was dropped. At each step the segment's name is that of one form
with all that the groups need, and the old form is not removed before the new one has been read back and its name is
durable. A line about a shrink that did not happen gives a digest that no file has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from wald.errors import Damaged
from wald.files import uptime
from wald.files.disk import Disk
from wald.files.layout import SHRUNK_SUFFIX, Root
from wald.files.listing import Segment
from wald.files.uptime import Moment
from wald.format.ledger_lines import Entry
from wald.format.names import WHOLE_SUFFIX, Kind, parse_segment_name
from wald.format.sealed_index import BadSealed
from wald.hints import command_line
from wald.log import Log
from wald.retention.blockers import CursorSnapshot, read_cursor_snapshot, sealed_index
from wald.retention.history import History
from wald.segments.reader import require_matching_name
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Shrinkage, check_shrunk, compare_shrunk, shrink_segment
from wald_reclaim.entries import shrunk_entry
from wald_reclaim.floors import Floors, floors_of

_AGAIN_SECONDS = 600.0  # a segment is looked at again after so long, as there may be thousands


@dataclass(frozen=True, slots=True)
class ShrunkSegment:
    """One segment that was shrunk, or would be.

    Attributes:
        bytes: of the file by then; ``was_bytes``: before.
        records: how many were dropped; 0: it is not known yet.
        taken_back: whether a cursor was moved back meanwhile, so that the old form got its name back.
    """

    segment: Segment
    bytes: int
    was_bytes: int
    records: int = 0
    taken_back: bool = False


@dataclass(slots=True)
class Shrinker:
    """Shrinks the segments of ``root`` for one process; the only code that does.

    Args:
        record: writes a line into the ledger; it is on disk when that returns.
        changed: called with a segment before its name becomes that of another file.
        require_archived: whether records stay until they are in a bundle.
    """

    root: Root
    disk: Disk
    log_id: bytes
    record: Callable[[Entry], None]
    changed: Callable[[Segment], None]
    require_archived: bool = False
    clock: Callable[[], float] = time.monotonic
    moment: Callable[[], Moment] = uptime.now
    _history: History = field(init=False)
    _looked_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._history = History(self.root)

    def finish(self) -> list[Damaged]:
        """Finish or undo what an interrupted process has left.

        Returns:
            what is wrong with each segment of which both forms stay, because neither may replace the other.

        Raises:
            OSError: a step failed; the next call tries again.
        """
        troubles: list[Damaged] = []
        names = [
            entry.name for entry in os.scandir(self.root.segments) if entry.name.endswith((SHRUNK_SUFFIX, WHOLE_SUFFIX))
        ]
        for name in names:
            found = parse_segment_name(name.removesuffix(WHOLE_SUFFIX))
            if name.endswith(SHRUNK_SUFFIX):
                self.disk.unlink(self.root.segments / name)
            elif found is not None and found.kind is Kind.SEALED:
                segment = Segment(found.base_sequence, Kind.SEALED, self.root.segment(found.base_sequence, Kind.SEALED))
                try:
                    require_matching_name(segment._replace(path=self.root.segments / name), self.log_id)
                    if self._history.deletion_of(segment.base_sequence) is not None:
                        self.disk.unlink(self.root.segments / name)  # the segment was reclaimed in the meantime
                    else:
                        self._settle(segment, self._compares)
                except (Damaged, BadSealed) as error:
                    troubles.append(self._left(segment, error))
        return troubles

    def _left(self, segment: Segment, error: Exception) -> Damaged:
        hint = command_line(self.root.path, "repair --dry-run")
        return Damaged(f"{segment.path}{WHOLE_SUFFIX}: it stays: {error}", hint=f"{hint} shows what can be done")

    def shrink(self, segment: Segment, *, now_ns: int) -> ShrunkSegment | None:
        """Shrink a segment, if it pays; None if it does not.

        Raises:
            Damaged: it is not all there, or the new form does not read back. It stays as it was.
            OSError: a step failed.
        """
        now = self.clock()
        if now - self._looked_at.get(segment.base_sequence, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return None
        self._looked_at[segment.base_sequence] = now
        try:
            with SealedFile(segment.path) as source:
                claims = self._claims()
                floors = floors_of(source.index, claims, self._history if self.require_archived else None)
                if source.index.damage or not floors.freed_bytes(source.index, source.stored_bytes):
                    return None
                shrinking = self._make(source, segment, floors)
                entry = shrunk_entry(segment, shrinking, source.index, source.stored_bytes, claims, now_ns)
                return self._put(segment, shrinking, entry | self.moment().as_entry(), source.stored_bytes)
        except OSError:
            del self._looked_at[segment.base_sequence]
            raise
        except BadSealed as error:
            hint = f"wald inspect --content {segment.path} shows what it holds"
            raise Damaged(f"{segment.path}: {error}", hint=hint) from error
        finally:
            with suppress(FileNotFoundError):
                self.disk.unlink(segment.path.with_name(segment.path.name + SHRUNK_SUFFIX))

    def _make(self, source: SealedFile, segment: Segment, floors: Floors) -> Shrinkage:
        """Write the new form into a temporary file, sync it and read it back."""
        temporary = segment.path.with_name(segment.path.name + SHRUNK_SUFFIX)
        target = self.disk.create(temporary)
        try:
            shrinking = shrink_segment(source, target, self.disk, floors.keeps)
            self.disk.sync(target)
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)  # it is to be read back from the disk
        finally:
            self.disk.close(target)
        with SealedFile(temporary) as made:
            check_shrunk(source, made, shrinking, floors.keeps)
        return shrinking

    def _put(self, segment: Segment, shrinking: Shrinkage, entry: Entry, was_bytes: int) -> ShrunkSegment:
        """Give the new form the name of the segment."""
        self.record(entry)
        temporary = segment.path.with_name(segment.path.name + SHRUNK_SUFFIX)
        self.disk.link(segment.path, segment.path.with_name(segment.path.name + WHOLE_SUFFIX))
        self.changed(segment)
        self.disk.rename(temporary, segment.path)
        records = sum(each.count for each in shrinking.dropped)
        if self._settle(segment, self._is_unneeded):
            return ShrunkSegment(segment, shrinking.stored_bytes, was_bytes, records)
        return ShrunkSegment(segment, was_bytes, was_bytes, records, taken_back=True)

    def _settle(self, segment: Segment, is_enough: Callable[[Segment], bool]) -> bool:
        """Remove the second name of the old form; or give it its name back, if a cursor needs what was dropped.

        Args:
            is_enough: whether the file with the segment's name has all that the groups need.

        Returns:
            whether the segment is shrunk.
        """
        whole = segment.path.with_name(segment.path.name + WHOLE_SUFFIX)
        self.disk.sync_directory(self.root.segments)  # before the cursors are read, and before the old form goes
        if is_enough(segment):
            self.disk.unlink(whole)
            return True
        self.changed(segment)
        self.disk.rename(whole, segment.path)
        if whole.exists():  # both are names of one file, and rename(2) does nothing then
            self.disk.unlink(whole)
        self.disk.sync_directory(self.root.segments)
        return False

    def _is_unneeded(self, segment: Segment) -> bool:
        """Whether no group needs what was dropped of a form that was read back a moment ago."""
        shrunk, claims = sealed_index(segment, self.log_id).shrunk, self._claims()
        return shrunk is not None and all(entry.last <= claims.floor(entry.route) for entry in shrunk.routes)

    def _compares(self, segment: Segment) -> bool:
        """Return True if the form that another process left has every batch of the old form that a group needs.

        It may have been damaged, rebuilt by a repair or replaced by another file, so its index alone proves nothing.

        Raises:
            Damaged: it lacks a batch, and the old form must not replace it either.
        """
        with suppress(FileNotFoundError):
            require_matching_name(segment, self.log_id)
        with SealedFile(segment.path.with_name(segment.path.name + WHOLE_SUFFIX)) as source:
            claims = self._claims()
            floors = Floors({entry.route: claims.floor(entry.route) for entry in source.index.routes})
            try:
                made = SealedFile(segment.path)
            except (FileNotFoundError, BadSealed, Damaged):
                made = None
            if made is not None:
                with made:
                    try:
                        compare_shrunk(source, made, floors.keeps)
                        return True
                    except (BadSealed, Damaged):
                        if not made.damage():
                            compare_shrunk(made, source, floors.keeps)
            for _, error in source.damage():
                raise error
            return False

    def _claims(self) -> CursorSnapshot:
        return read_cursor_snapshot(self.root, log_id=self.log_id)


def worth(log: Log, segments: Iterable[Segment], *, require_archived: bool) -> Iterator[ShrunkSegment]:
    """Those that would be shrunk, with about how many bytes they would have."""
    log_id = log.identity.log_id
    claims, history = read_cursor_snapshot(log.root, log_id=log_id), History(log.root)
    for segment in segments:
        with suppress(Damaged, BadSealed, FileNotFoundError):
            index, stored_bytes = sealed_index(segment, log_id), segment.path.stat().st_size
            floors = floors_of(index, claims, history if require_archived else None)
            if (freed := floors.freed_bytes(index, stored_bytes)) and not index.damage:
                yield ShrunkSegment(segment, stored_bytes - freed, stored_bytes)

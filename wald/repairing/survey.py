"""Survey of a damaged log: the facts for a repair plan. Nothing is changed.

If ``log.json`` is lost, damaged or from another log, the identity comes from files that contain the log id: segments,
sparse indexes, and cursors of the log's owner. Cursors of other users are not trusted. If two files disagree, there is
no repair.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import zstandard

from wald.checking.checker import Checked, Finding, Level, SegmentToCheck, check
from wald.checking.verifier import Verification
from wald.errors import Damaged, NotFound, WaldError
from wald.files.disk import Disk
from wald.files.identity import Identity, read_identity, require_no_links
from wald.files.layout import TEMPORARY, Root
from wald.files.listing import Listing, Segment, list_segments
from wald.files.locks import leftovers
from wald.files.safe_open import open_file, read_regular
from wald.format.head import BadCursor, Head, decode_cursor
from wald.format.names import CURSOR_SUFFIX, WHOLE_SUFFIX, Kind, parse_segment_name, segment_name
from wald.format.segment import (
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SPARSE_MAGIC,
    BadHeader,
    SegmentHeader,
    decode_segment_header,
)
from wald.format.spans import Span
from wald.format.times import utc
from wald.repairing.rescue import Survey, survey
from wald.retention.history import History
from wald.segments.durable_end import readable_head
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.reader import Misplaced, identify, require_named
from wald.segments.salvage import index_salvaged
from wald.segments.sealed_file import SealedFile
from wald.writing.recovery import state_after


@dataclass(frozen=True, slots=True)
class LostIdentity:
    """New contents of ``log.json``, with the reason."""

    identity: Identity
    reason: str


@dataclass(frozen=True, slots=True)
class _Witness:
    """File that contains a log id, with its creation time if it has one."""

    path: Path
    log_id: bytes
    created_ns: int | None = None


def lost_identity(root: Root) -> LostIdentity | None:
    """Return the identity to write into ``log.json``; None if the current one agrees with the files.

    Raises:
        NotFound: there is no log.
        UnsupportedFormat: a newer wald wrote it.
        Damaged: no file contains the log id, or files disagree.
    """
    require_no_links(root)
    own, wrong = None, "it is missing"
    failure: WaldError | None = None
    try:
        own = read_identity(root)
    except NotFound as error:
        if root.unfinished_identity.exists():
            raise
        failure = error
    except Damaged as error:
        wrong, failure = error.message.removeprefix(f"{root.identity}: "), error
    found = list(_witnesses(root))
    named = {each.log_id for each in found}
    if own is not None and (own.log_id in named or not any(each.path.parent == root.segments for each in found)):
        return None
    if not found:
        assert failure is not None, "the identity was not read"
        raise failure
    if len(named) > 1 or (own is not None and not _is_of(root, found)):
        raise _disagree(root, own, found)
    if own is not None:
        wrong = f"it is of log {own.log_id.hex()}"
    (log_id,) = named
    files = f"{len(found)} file{'s say' if len(found) > 1 else ' says'}"
    return LostIdentity(Identity(log_id, _created(root, found)), f"{wrong}; {files} that this is log {log_id.hex()}")


def _disagree(root: Root, own: Identity | None, found: list[_Witness]) -> Damaged:
    said = [f"{root.identity.name} says {own.log_id.hex()}"] if own is not None else []
    for log_id in dict.fromkeys(each.log_id for each in found):
        first, *others = (os.path.relpath(each.path, root.path) for each in found if each.log_id == log_id)
        more = f" and {len(others)} more say" if others else " says"
        said.append(f"{first}{more} {log_id.hex()}")
    return Damaged(
        f"{root.path}: the identity of the log is uncertain: {'; '.join(said)}",
        case="identity-uncertain",
        root=root.path,
    )


def _witnesses(root: Root) -> Iterator[_Witness]:
    """Yield the readable files that contain a log id: segments by name, then cursors."""
    if root.segments.is_dir():
        for name in sorted(os.listdir(root.segments)):
            parsed = parse_segment_name(name.removesuffix(WHOLE_SUFFIX))
            path = root.segments / name
            if parsed is not None:
                with suppress(Damaged, OSError, zstandard.ZstdError, BadHeader):
                    yield _of_segment(path, parsed.kind)
    for route in root.route_names():
        directory = root.cursor_directory(route)
        for path in sorted(directory.glob(f"*{CURSOR_SUFFIX}")):
            with suppress(Damaged, OSError, BadCursor):
                status = path.lstat()
                if status.st_uid not in (0, directory.stat().st_uid) or status.st_nlink > 1:
                    continue  # another user may have written it
                log_id = decode_cursor(read_regular(path)).log_id
                if log_id is not None:
                    yield _Witness(path, log_id)


def _of_segment(path: Path, kind: Kind) -> _Witness:
    """Return the witness for a segment or a sparse index.

    Raises:
        Damaged, OSError, zstandard.ZstdError, BadHeader: it contains no readable log id.
    """
    if kind is Kind.INDEX or kind.form is Kind.RAW:
        with open_file(path) as file:
            header = decode_segment_header(
                file.read(SEGMENT_HEADER.size), SPARSE_MAGIC if kind is Kind.INDEX else SEGMENT_MAGIC
            )
        return _Witness(path, header.log_id, header.created_at_ns)
    try:
        header = _sealed_header(path)
    except (zstandard.ZstdError, BadHeader):
        with SealedFile(path) as sealed:
            return _Witness(path, sealed.index.log_id)
    return _Witness(path, header.log_id, header.created_at_ns)


def _sealed_header(path: Path) -> SegmentHeader:
    """Return the segment header at the start of the first frame of a sealed segment."""
    with open_file(path) as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return decode_segment_header(stream.read(SEGMENT_HEADER.size))


def _is_of(root: Root, found: list[_Witness]) -> bool:
    """True if the head belongs to the segments: it is at the end of a batch of one of them."""
    head = readable_head(root)
    if head is None:
        return False
    for kind in (Kind.RAW, Kind.SEALED):
        path = root.segment(head.segment, kind)
        if any(each.path == path for each in found):
            return _ends_at(Segment(head.segment, kind, path), head.position, head.sequence + 1)
    return False


def _ends_at(segment: Segment, position: int, sequence: int) -> bool:
    """Whether a batch ends at a position in a segment, and the next record is ``sequence``."""
    with suppress(Damaged, OSError):
        if segment.kind is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return (sealed.index.raw_bytes, sealed.index.next_sequence) == (position, sequence)
        with open_file(segment.path) as file:
            for met in RawFile(file.fileno(), limit=position).scan():
                if isinstance(met, ScannedBatch) and met.end == position:
                    return met.header.end_sequence == sequence
    return False


def _created(root: Root, found: list[_Witness]) -> str:
    """When the oldest thing was made that is left of the log: a segment, or the report of a start; "": not known."""
    times = [each.created_ns for each in found if each.created_ns is not None]
    for path in root.recovery.glob("*.json"):
        with suppress(Damaged, OSError, ValueError, TypeError, KeyError, RecursionError):
            times.append(int(json.loads(read_regular(path))["at_ns"]))
    return utc(min(times), 3) if times else ""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Facts about one segment.

    Attributes:
        segment: its identity from its contents; its path may have another name.
        spans: sequences of its intact records.
        problem: description of the damage, or "".
        survey: contents of a damaged segment.
        changed: intact, but different from what was sealed according to the ledger.
        twin: raw form next to a sealed one.
        twin_spans: sequences in the twin, if that is intact.
        foreign: belongs to another log.
        recorded: a ledger line lists its contents.
        durable: position of the head, if the head is in it.
        cut: position at which a raw segment was cut; 0 if unknown.
        dropped: dropped sequences in the index of a damaged segment; None if unreadable.
        stray: after the head and without intact batches, so that it never contained a record.
        open_records: route → record that is open at its end, if the next segment is missing.
    """

    segment: Segment
    spans: tuple[Span, ...] = ()
    problem: str = ""
    survey: Survey | None = None
    changed: bool = False
    twin: Path | None = None
    twin_spans: tuple[Span, ...] | None = None
    foreign: bool = False
    recorded: bool = True
    durable: int | None = None
    cut: int = 0
    dropped: tuple[Span, ...] | None = None
    stray: bool = False
    open_records: Mapping[str, int] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return self.segment.base_sequence

    def holds(self, sequence: int) -> bool:
        """True if an intact record with this sequence begins in the segment."""
        return any(first <= sequence <= last for first, last in self.spans)

    @property
    def misnamed(self) -> bool:
        name = segment_name(self.base, self.segment.kind)
        return self.segment.path.name not in (name, name + WHOLE_SUFFIX)

    @property
    def whole(self) -> bool:
        """True if the segment belongs to this log and is readable, under any name."""
        return not self.foreign and self.survey is None


@dataclass(frozen=True, slots=True)
class LogSurvey:
    """Facts about a log.

    Attributes:
        root: the log; in a dry run with the ledgers that the repair would write.
        last: last sequence known to be assigned.
        leftovers: temporary files of killed programs.
        put_back: lost or damaged segment → its original from before an interrupted shrinking.
        unneeded: such originals that are damaged themselves.
        findings: errors of ``wald verify``.
    """

    root: Root
    log_id: bytes
    segments: tuple[SegmentFacts, ...]
    head: Head | None
    history: History
    last: int
    leftovers: tuple[Path, ...]
    findings: tuple[Finding, ...]
    put_back: Mapping[Path, Path] = field(default_factory=dict)
    unneeded: tuple[Path, ...] = ()


def examine(root: Root) -> LogSurvey:
    """Return the facts about a log.

    Raises:
        Damaged: its identity or the directory of its segments is lost.
    """
    return _Examination(root).facts()


@dataclass
class _Examination:
    root: Root
    checked: dict[Path, Checked] = field(default_factory=dict)
    misplaced: list[Segment] = field(default_factory=list)

    def facts(self) -> LogSurvey:
        root = self.root
        self.log_id = read_identity(root).log_id
        self.listing = list_segments(root)
        self.head = readable_head(root)
        verification = self.verification = Verification(root)
        self.history = verification.history
        findings = tuple(each for each in verification.findings(self._check) if each.level is Level.ERROR)
        put_back, unneeded = self._interrupted()
        self.listing = self.listing.including(self._unlisted(list_segments(root)))
        segments = [self._segment(number) for number in range(len(self.listing.segments))]
        segments.sort(key=lambda each: each.base)
        ends = [span[1] for each in segments for span in each.spans]
        last = max([*ends, self.head.sequence if self.head else 0, self.history.last_sealed()], default=0)
        segments = [self._before_a_hole(each, segments[number + 1 :], last) for number, each in enumerate(segments)]
        return LogSurvey(
            root,
            self.log_id,
            tuple(segments),
            self.head,
            self.history,
            last,
            tuple(_leftovers(root)),
            findings,
            put_back,
            unneeded,
        )

    def _check(self, target: SegmentToCheck) -> Checked:
        found = self.checked[target.segment.path] = check(target)
        return found

    def _interrupted(self) -> tuple[dict[Path, Path], tuple[Path, ...]]:
        """Return originals left by an interrupted shrinking: those to put back, also in the listing, and damaged ones.

        If both forms are intact, wald-reclaim decides by the cursors.
        """
        put_back: dict[Path, Path] = {}
        unneeded: list[Path] = []
        listed = {each.base_sequence: each for each in self.listing.segments}
        for name in sorted(entry.name for entry in os.scandir(self.root.segments) if entry.name.endswith(WHOLE_SUFFIX)):
            found, path = parse_segment_name(name.removesuffix(WHOLE_SUFFIX)), self.root.segments / name
            if found is None or found.kind is not Kind.SEALED:
                continue
            segment = Segment(found.base_sequence, Kind.SEALED, path)
            if self._is_misplaced(segment):
                self.misplaced.append(segment)
            elif self._is_bad(check(replace(self.verification.target(segment), open_ended=True))):
                unneeded.append(path)
            elif self._is_bad(self.checked.get(path.with_name(str(found)))):
                put_back[path.with_name(str(found))] = path
                listed[segment.base_sequence] = segment
        self.listing = Listing(tuple(listed[base] for base in sorted(listed)))
        return put_back, tuple(unneeded)

    def _unlisted(self, there: Listing) -> Iterator[Segment]:
        """Yield the segments that readers do not find under their present names.

        A sealed segment with the name of another one hides the raw form of that one, and is hidden by leftovers of an
        interrupted shrinking of it. A file with the name of a reclaimed segment is not reclaimed if no ledger line
        exists or if it is another segment.
        """
        yield from self.misplaced
        for segment in there.segments:
            raw, hidden = segment.path.with_suffix(""), segment not in self.listing.segments
            if segment.kind is Kind.SEALED and (hidden or raw.exists()) and self._is_misplaced(segment):
                if hidden:
                    yield segment
                if raw.exists():
                    yield Segment(segment.base_sequence, Kind.RAW, raw)
        readable = {segment.base_sequence for segment in there.segments}
        for segment in there.released:
            base = segment.base_sequence
            unexplained = base not in readable and any(self.history.unexplained(base, base))
            if unexplained or self._is_misplaced(segment):
                yield replace(segment, kind=segment.kind.form)

    def _is_misplaced(self, segment: Segment) -> bool:
        with suppress(OSError):
            try:
                require_named(segment, self.log_id)
            except Misplaced:
                return True
        return False

    def _is_bad(self, checked: Checked | None) -> bool:
        return checked is None or any(each.level is Level.ERROR for each in checked.findings)

    def _segment(self, number: int) -> SegmentFacts:
        listed = self.listing.segments[number]
        twin = listed.path.with_suffix("") if listed.kind is Kind.SEALED else None
        found = SegmentFacts(listed, twin=twin if twin is not None and twin.exists() else None)
        claimed = _claimed(listed)
        if claimed is not None and claimed[0] != self.log_id:
            return replace(found, foreign=True, problem=f"it belongs to log {claimed[0].hex()}")
        segment = listed if claimed is None else claimed[1]
        if segment != listed:
            problem = f"it is segment {segment.base_sequence} under another name"
            if segment.base_sequence == listed.base_sequence:
                problem = "its name is that of another form"
            found = replace(found, segment=segment, problem=problem, twin=None)
        elif found.misnamed:
            problem = "its name is that of a reclaimed segment, and the ledger has no line about that"
            found = replace(found, problem=problem)
        return self._content(found, number)

    def _content(self, found: SegmentFacts, number: int) -> SegmentFacts:
        segment, head = found.segment, self.head
        durable = head.position if head is not None and head.segment == segment.base_sequence else None
        durable = durable if segment.kind is Kind.RAW else None
        sealed = self.history.sealed(segment.base_sequence)
        recorded = sealed is not None and sealed["base"] == segment.base_sequence
        target = replace(self.verification.target(segment), durable=durable, open_ended=True)
        known = None if found.misnamed else self.checked.get(segment.path)
        checked = known or check(target)
        found = replace(found, durable=durable, cut=target.end, recorded=recorded or segment.kind is Kind.RAW)
        wrong = [each.message for each in checked.findings if each.level is Level.ERROR]
        if not wrong:
            last = checked.after.next_sequence - 1
            spans = ((segment.base_sequence, last),) if last >= segment.base_sequence else ()  # even if all are dropped
            return replace(found, spans=spans, recorded=found.recorded or not spans)
        digests = frozenset[str]() if target.sha256 is None else frozenset({target.sha256, *target.relieved})
        return self._damaged(replace(found, problem=found.problem or wrong[0]), number, digests)

    def _damaged(self, found: SegmentFacts, number: int, digests: frozenset[str]) -> SegmentFacts:
        segment = found.segment
        older = Listing(self.listing.segments[:number])
        before = state_after(older, self.log_id, [], self.history.last_dropped).open_records
        # An unreadable segment breaks every record that was open before it.
        met = Survey(broken={at: route for route, at in before.items()}, reason=found.problem)
        with suppress(Damaged, OSError):
            lasts = last_dropped(segment, self.history)
            end = self._end(number)
            met = survey(segment, self.log_id, before, dropped=lasts, durable=found.durable, end=end, cut=found.cut)
        stray = self.head is not None and segment.base_sequence > self.head.segment and not (met.spans or met.pieces)
        if stray:
            met.broken.clear()
        twin_spans = self._twin(found)
        changed = not met.reason and bool(digests) and self._digest(segment) not in digests
        dropped = _dropped(segment)
        return replace(
            found,
            spans=tuple(met.spans),
            survey=met,
            changed=changed,
            twin_spans=twin_spans,
            dropped=dropped,
            stray=stray,
        )

    def _end(self, number: int) -> int:
        """Return the base of the next intact segment, which may be a part of this one after a killed repair."""
        for following in self.listing.segments[number + 1 :]:
            checked = self.checked.get(following.path)
            if checked is not None and not any(each.level is Level.ERROR for each in checked.findings):
                return following.base_sequence
        return 1 << 64

    def _twin(self, found: SegmentFacts) -> tuple[Span, ...] | None:
        if found.twin is None:
            return None
        checked = check(SegmentToCheck(Segment(found.base, Kind.RAW, found.twin), self.log_id))
        if any(each.level is Level.ERROR for each in checked.findings):
            return None
        return ((found.base, checked.after.next_sequence - 1),)

    def _digest(self, segment: Segment) -> str:
        error = Damaged(str(segment.path))
        return index_salvaged(segment, self.log_id, error).sha256.hex() if segment.kind is Kind.SEALED else ""

    def _before_a_hole(self, found: SegmentFacts, behind: list[SegmentFacts], last: int) -> SegmentFacts:
        """Add the records that are open at the end, if the next records are missing."""
        behind = [each for each in behind if not (each.foreign or each.stray)]
        end = found.spans[-1][1] + 1 if found.spans else found.base
        following = behind[0].base - 1 if behind else last
        if found.foreign or end > following or not any(self.history.unexplained(end, following)):
            return found
        if found.survey is not None:
            return replace(found, open_records=found.survey.open_records)
        state = state_after(Listing((found.segment,)), self.log_id, [], self.history.last_dropped)
        return replace(found, open_records=state.open_records)


def _claimed(segment: Segment) -> tuple[bytes, Segment] | None:
    """Return the log id and the segment that a file identifies; None if it identifies neither."""
    with suppress(Damaged, OSError):
        form, header = identify(segment.path) or (segment.kind.form, None)
        if header is not None:
            return header.log_id, Segment(header.base_sequence, form, segment.path)
    return None


def _dropped(segment: Segment) -> tuple[Span, ...] | None:
    try:
        with SealedFile(segment.path) as sealed:
            return () if sealed.index.shrunk is None else tuple(sealed.index.shrunk.ranges)
    except (Damaged, OSError):
        return None


def last_dropped(segment: Segment, history: History) -> Mapping[str, int] | None:
    """Return route → last dropped sequence, from the index or the ledger; None if neither has it."""
    with suppress(Damaged, OSError), SealedFile(segment.path) as sealed:
        if sealed.index.shrunk is not None and sealed.index.shrunk.is_complete:
            return sealed.index.shrunk.lasts
    return history.last_dropped(segment.base_sequence)


def _leftovers(root: Root) -> Iterator[Path]:
    for directory in (root.segments, root.quarantine, root.recovery):
        if directory.is_dir():
            names = sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(TEMPORARY))
            yield from (directory / name for name in names)
    yield from leftovers(Root(root.path), Disk())  # the ledgers of a dry run are elsewhere

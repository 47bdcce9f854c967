"""Survey of a damaged log: the facts for a repair plan. It changes nothing.

If ``log.json`` is lost, damaged or from another log, the identity comes from files with the log id: segments, sparse
indexes, and cursors of the log's owner (other users' are not trusted).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import zstandard

from wald.checking.checker import CheckResult, Level, SegmentToCheck, check
from wald.checking.verifier import Verification
from wald.errors import Damaged, NotFound, WaldError
from wald.files.disk import Disk
from wald.files.identity import Identity, read_identity, require_no_links
from wald.files.layout import TEMPORARY, Root
from wald.files.listing import Listing, Segment, list_segments
from wald.files.locks import leftovers
from wald.files.safe_open import open_file, read_regular
from wald.format.head import BadCursor, decode_cursor
from wald.format.names import CURSOR_SUFFIX, WHOLE_SUFFIX, Kind, parse_segment_name, segment_name
from wald.format.segment import SEGMENT_HEADER, SEGMENT_MAGIC, SPARSE_MAGIC, BadHeader, decode_segment_header
from wald.format.spans import Span
from wald.format.times import utc
from wald.repairing.rescue import IntactContents, readable_index, rescue
from wald.retention.history import History
from wald.segments.durable_end import readable_head
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.reader import identify
from wald.segments.salvage import index_salvaged
from wald.segments.sealed_file import SealedFile
from wald.writing.recovery import state_after


class _LogIdSource(NamedTuple):
    path: Path
    log_id: bytes
    created_ns: int | None = None


def recover_identity(root: Root) -> tuple[Identity, str] | None:
    """Return new contents for ``log.json`` and the reason, or None if the current contents agree with the other files.

    Raise Damaged if the files contradict each other, Damaged or NotFound if none contains a log id.
    """
    require_no_links(root)
    current, reason = None, "it is missing"
    failure: WaldError | None = None
    try:
        current = read_identity(root)
    except NotFound as error:
        if root.unfinished_identity.exists():
            raise
        failure = error
    except Damaged as error:
        reason, failure = error.message.removeprefix(f"{root.identity}: "), error
    sources = list(_log_id_sources(root))
    log_ids = {each.log_id for each in sources}
    if current is not None and (
        current.log_id in log_ids or not any(each.path.parent == root.segments for each in sources)
    ):
        return None
    if not sources:
        assert failure is not None, "the identity was not read"
        raise failure
    if len(log_ids) > 1 or (current is not None and not _is_head_in(root, sources)):
        raise _identity_conflict(root, current, sources)
    if current is not None:
        reason = f"it belongs to log {current.log_id.hex()}"
    (log_id,) = log_ids
    files = f"{len(sources)} file{'s say' if len(sources) > 1 else ' says'}"
    return Identity(log_id, _earliest_time(root, sources)), f"{reason}; {files} that this is log {log_id.hex()}"


def _identity_conflict(root: Root, own: Identity | None, sources: list[_LogIdSource]) -> Damaged:
    claims = [f"{root.identity.name} says {own.log_id.hex()}"] if own is not None else []
    for log_id in dict.fromkeys(each.log_id for each in sources):
        first, *others = (os.path.relpath(each.path, root.path) for each in sources if each.log_id == log_id)
        more = f" and {len(others)} more say" if others else " says"
        claims.append(f"{first}{more} {log_id.hex()}")
    return Damaged(
        f"{root.path}: the identity of the log is uncertain: {'; '.join(claims)}",
        case="identity-uncertain",
        root=root.path,
    )


def _log_id_sources(root: Root) -> Iterator[_LogIdSource]:
    for name in sorted(os.listdir(root.segments)) if root.segments.is_dir() else ():
        parsed = parse_segment_name(name.removesuffix(WHOLE_SUFFIX))
        if parsed is not None:
            with suppress(Damaged, OSError, zstandard.ZstdError, BadHeader):
                yield _log_id_source(root.segments / name, parsed.kind)
    for route in root.route_names():
        directory = root.cursor_directory(route)
        for path in sorted(directory.glob(f"*{CURSOR_SUFFIX}")):
            with suppress(Damaged, OSError, BadCursor):
                status = path.lstat()
                if status.st_uid not in (0, directory.stat().st_uid) or status.st_nlink > 1:
                    continue  # another user may have written it
                log_id = decode_cursor(read_regular(path)).log_id
                if log_id is not None:
                    yield _LogIdSource(path, log_id)


def _log_id_source(path: Path, kind: Kind) -> _LogIdSource:
    with open_file(path) as file:
        if kind is Kind.INDEX or kind.form is Kind.RAW:
            magic = SPARSE_MAGIC if kind is Kind.INDEX else SEGMENT_MAGIC
            header = decode_segment_header(file.read(SEGMENT_HEADER.size), magic)
            return _LogIdSource(path, header.log_id, header.created_at_ns)
        with suppress(zstandard.ZstdError, BadHeader), zstandard.ZstdDecompressor().stream_reader(file) as stream:
            header = decode_segment_header(stream.read(SEGMENT_HEADER.size))
            return _LogIdSource(path, header.log_id, header.created_at_ns)
    with SealedFile(path) as sealed:
        return _LogIdSource(path, sealed.index.log_id)


def _is_head_in(root: Root, sources: list[_LogIdSource]) -> bool:
    """Return True if the head ends a batch in one of these segments."""
    head, paths = readable_head(root), {each.path for each in sources}
    if head is None:
        return False
    end = head.position, head.sequence + 1
    with suppress(Damaged, OSError):
        if (path := root.segment(head.segment, Kind.RAW)) in paths:
            with open_file(path) as file:
                batches = RawFile(file.fileno(), limit=head.position).scan()
                return any(
                    isinstance(batch, ScannedBatch) and (batch.end, batch.header.end_sequence) == end
                    for batch in batches
                )
        if (path := root.segment(head.segment, Kind.SEALED)) in paths:
            with SealedFile(path) as sealed:
                return (sealed.index.raw_bytes, sealed.index.next_sequence) == end
    return False


def _earliest_time(root: Root, sources: list[_LogIdSource]) -> str:
    """Return the earliest time in segments and reports, or ""."""
    times = [each.created_ns for each in sources if each.created_ns is not None]
    for path in root.recovery.glob("*.json"):
        with suppress(Damaged, OSError, ValueError, TypeError, KeyError, RecursionError):
            times.append(int(json.loads(read_regular(path))["at_ns"]))
    return utc(min(times), 3) if times else ""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Facts about one segment file."""

    segment: Segment  # by its contents; the path may differ
    spans: tuple[Span, ...] = ()  # intact records
    problem: str = ""
    remains: IntactContents | None = None  # if damaged
    is_changed: bool = False  # intact, but with another digest than in the ledger
    twin: Path | None = None  # raw form next to a sealed one
    twin_spans: tuple[Span, ...] | None = None  # if the twin is intact
    is_foreign: bool = False
    is_in_ledger: bool = True  # a ledger line lists its contents
    durable: int | None = None  # position of the head, if in this segment
    cut: int = 0  # end of a cut raw segment; 0 if unknown
    dropped: tuple[Span, ...] | None = None  # by the index of a damaged segment
    is_stray: bool = False  # after the head and without intact batches, so it never contained a record
    open_records: Mapping[str, int] = field(default_factory=dict)  # route → record, if the next segment is missing

    @property
    def base(self) -> int:
        return self.segment.base_sequence

    @property
    def repaired_spans(self) -> tuple[Span, ...]:
        return self.spans if self.twin_spans is None else self.twin_spans

    @property
    def is_misnamed(self) -> bool:
        name = segment_name(self.base, self.segment.kind)
        return self.segment.path.name not in (name, name + WHOLE_SUFFIX)


class LogSurvey:
    """Facts about a log. Raise Damaged if its identity or the directory of its segments is lost."""

    def __init__(self, root: Root) -> None:
        self.root = root  # in a dry run, with repaired ledgers
        self.log_id = read_identity(root).log_id
        self._listing = list_segments(root)
        self.head = readable_head(root)
        self._verification = Verification(root)
        self.history = self._verification.history
        self._results: dict[Path, CheckResult] = {}
        self._hidden: list[Segment] = []  # originals of shrunk segments that contain another segment
        self.originals: dict[Path, Path] = {}  # segment → intact original of an interrupted shrinking
        self.damaged_originals: list[Path] = []
        findings = self._verification.findings(self._check_and_store)
        self.findings = [each for each in findings if each.level is Level.ERROR]
        self._sort_originals()
        self._listing = self._listing.including(self._misnamed_segments(list_segments(root)))
        segments = sorted(map(self._survey_segment, range(len(self._listing.segments))), key=lambda each: each.base)
        ends = [last for each in segments for _, last in each.spans]
        # known to be assigned
        self.last = max([*ends, self.head.sequence if self.head else 0, self.history.last_sealed()])
        self.segments = [self._add_open_records(each, segments[n:]) for n, each in enumerate(segments, start=1)]
        directories = (root.segments, root.quarantine, root.recovery)
        unfinished = [path for each in directories for path in sorted(each.glob(f"*{TEMPORARY}"))]
        # The ledgers of a dry run are elsewhere.
        self.leftovers = [*unfinished, *leftovers(Root(root.path), Disk())]

    def _check_and_store(self, target: SegmentToCheck) -> CheckResult:
        result = self._results[target.segment.path] = check(target)
        return result

    def _sort_originals(self) -> None:
        """Decide which originals of interrupted shrinkings to use. If both forms are intact, wald-reclaim decides."""
        listed = {each.base_sequence: each for each in self._listing.segments}
        for name in sorted(os.listdir(self.root.segments)):
            path, shrunk = self.root.segments / name, self.root.segments / name.removesuffix(WHOLE_SUFFIX)
            parsed = parse_segment_name(shrunk.name)
            if not name.endswith(WHOLE_SUFFIX) or parsed is None or parsed.kind is not Kind.SEALED:
                continue
            segment = Segment(parsed.base_sequence, Kind.SEALED, path)
            if self._verification.misplacement(segment):
                self._hidden.append(segment)
            elif check(replace(self._verification.target(segment), open_ended=True)).errors:
                self.damaged_originals.append(path)
            elif (result := self._results.get(shrunk)) is None or result.errors:
                self.originals[shrunk] = path
                listed[segment.base_sequence] = segment
        self._listing = Listing(tuple(listed[base] for base in sorted(listed)))

    def _misnamed_segments(self, listing: Listing) -> Iterator[Segment]:
        """Yield segments that a wrong file name hides from readers.

        A sealed segment under another's name hides that segment's raw form. The original of an interrupted shrinking
        hides the shrunk form. A reclaimed name is wrong without a ledger line, or if the file is another segment.
        """
        yield from self._hidden
        for segment in listing.segments:
            raw, hidden = segment.path.with_suffix(""), segment not in self._listing.segments
            has_raw = segment.kind is Kind.SEALED and raw.exists()
            if segment.kind is Kind.SEALED and (hidden or has_raw) and self._verification.misplacement(segment):
                if hidden:
                    yield segment
                if has_raw:
                    yield Segment(segment.base_sequence, Kind.RAW, raw)
        readable = {segment.base_sequence for segment in listing.segments}
        for segment in listing.released:
            base = segment.base_sequence
            unexplained = base not in readable and any(self.history.unexplained_spans(base, base))
            if unexplained or self._verification.misplacement(segment):
                yield segment._replace(kind=segment.kind.form)

    def _survey_segment(self, number: int) -> SegmentFacts:
        listed = self._listing.segments[number]
        twin = listed.path.with_suffix("") if listed.kind is Kind.SEALED else None
        facts = SegmentFacts(listed, twin=twin if twin is not None and twin.exists() else None)
        with suppress(Damaged, OSError):
            form, header = identify(listed.path) or (listed.kind.form, None)
            if header is not None and header.log_id != self.log_id:
                return replace(facts, is_foreign=True, problem=f"it belongs to log {header.log_id.hex()}")
            if header is not None and (header.base_sequence, form) != (listed.base_sequence, listed.kind):
                problem = f"it contains segment {header.base_sequence}"
                if header.base_sequence == listed.base_sequence:
                    problem = "its suffix does not match its contents"
                segment = Segment(header.base_sequence, form, listed.path)
                facts = replace(facts, segment=segment, problem=problem, twin=None)
        if not facts.problem and facts.is_misnamed:
            facts = replace(facts, problem="it is named like a reclaimed segment, but no ledger line confirms that")
        return self._survey_contents(facts, number)

    def _survey_contents(self, facts: SegmentFacts, number: int) -> SegmentFacts:
        segment, head = facts.segment, self.head
        is_raw = segment.kind is Kind.RAW
        durable = head.position if is_raw and head is not None and head.segment == facts.base else None
        sealed = self.history.sealing_of(facts.base)
        is_in_ledger = is_raw or (sealed is not None and sealed["base"] == facts.base)
        target = replace(self._verification.target(segment), durable=durable, open_ended=True)
        result = (None if facts.is_misnamed else self._results.get(segment.path)) or check(target)
        facts = replace(facts, durable=durable, cut=target.end, is_in_ledger=is_in_ledger)
        if not result.errors:
            last = result.end_state.next_sequence - 1
            spans = ((facts.base, last),) if last >= facts.base else ()  # even if all are dropped
            return replace(facts, spans=spans, is_in_ledger=is_in_ledger or not spans)
        return self._survey_damage(replace(facts, problem=facts.problem or result.errors[0]), number, target)

    def _survey_damage(self, facts: SegmentFacts, number: int, target: SegmentToCheck) -> SegmentFacts:
        segment = facts.segment
        older = self._listing.segments[number - 1] if number else None
        before = state_after(older, self.log_id, [], self.history.last_dropped).open_records
        # An unreadable segment breaks every record that was open before it.
        remains = IntactContents(broken={at: route for route, at in before.items()}, damage=facts.problem)
        with suppress(Damaged, OSError):
            lasts = last_dropped(segment, self.history)
            end = self._next_intact_base(number)
            remains = rescue(segment, self.log_id, before, dropped=lasts, durable=facts.durable, end=end, cut=facts.cut)
        is_stray = self.head is not None and facts.base > self.head.segment and remains.is_empty
        if is_stray:
            remains.broken.clear()
        is_changed = False
        if target.sha256 is not None and not remains.damage:
            digest = index_salvaged(segment, self.log_id, Damaged(str(segment.path))).sha256.hex()
            is_changed = digest not in {target.sha256, *target.shrunk}
        facts = replace(facts, spans=tuple(remains.spans), remains=remains, is_changed=is_changed, is_stray=is_stray)
        with suppress(OSError):
            if (index := readable_index(segment)) is not None:
                facts = replace(facts, dropped=() if index.shrunk is None else tuple(index.shrunk.ranges))
        if facts.twin is not None:
            result = check(SegmentToCheck(Segment(facts.base, Kind.RAW, facts.twin), self.log_id))
            if not result.errors:
                facts = replace(facts, twin_spans=((facts.base, result.end_state.next_sequence - 1),))
        return facts

    def _next_intact_base(self, number: int) -> int:
        """Return the base of the next intact segment. After a killed repair, it may be a piece of this one."""
        for following in self._listing.segments[number + 1 :]:
            result = self._results.get(following.path)
            if result is not None and not result.errors:
                return following.base_sequence
        return 1 << 64

    def _add_open_records(self, facts: SegmentFacts, newer: list[SegmentFacts]) -> SegmentFacts:
        """Add the records open at the end of a segment, if the next sequences are missing."""
        bases = [each.base for each in newer if not (each.is_foreign or each.is_stray)]
        end = facts.spans[-1][1] + 1 if facts.spans else facts.base
        following = bases[0] - 1 if bases else self.last
        if facts.is_foreign or end > following or not any(self.history.unexplained_spans(end, following)):
            return facts
        if facts.remains is not None:
            return replace(facts, open_records=facts.remains.open_records)
        state = state_after(facts.segment, self.log_id, [], self.history.last_dropped)
        return replace(facts, open_records=state.open_records)


def last_dropped(segment: Segment, history: History) -> Mapping[str, int] | None:
    """Return the last dropped sequence of each route, from the index or the ledger."""
    with suppress(OSError):
        index = readable_index(segment)
        if index is not None and index.shrunk is not None and index.shrunk.is_complete:
            return index.shrunk.last_by_route
    return history.last_dropped(segment.base_sequence)

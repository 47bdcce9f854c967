"""Check of a whole log, which reports damage instead of raising it.

The check covers checksums, digests, the chains of ledgers, the order of sequences and append times, and that indexes,
control batches, the head and the cursors agree with the segments. The daemon may run: the check ends at the head read
first, and a segment sealed in the meantime is read in its new form. :mod:`wald.work.snapshot` checks the journals of
work groups.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from wald.checking.checker import INITIAL_STATE, CheckResult, Finding, Level, SegmentToCheck, check
from wald.errors import Damaged, UnsupportedFormat
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import read_files
from wald.files.listing import Listing, Segment
from wald.files.routes import fifo_problems
from wald.files.uptime import read_steps, require_steps, step_between
from wald.format.head import Head
from wald.format.log_state import LogState
from wald.format.names import LEDGERS, PART_SUFFIX, WHOLE_SUFFIX, Kind, parse_segment_name
from wald.format.spans import Spans
from wald.hints import hint_for
from wald.retention.cursors import CursorState, read_cursors
from wald.retention.handovers import handover_pins
from wald.retention.history import History, Loss
from wald.retention.missing import span_text
from wald.segments.durable_end import UNBOUNDED, read_head
from wald.segments.reader import Misplaced, require_matching_name
from wald.segments.view import SegmentGone, View, read_view, recorded_end

_IGNORE_DAMAGE = contextlib.suppress(Damaged)  # of a ledger, which the check of ledgers reports
FindResult = Callable[[SegmentToCheck], CheckResult | None]


def verify(root: Root) -> Iterator[Finding]:
    """Check a whole log, which is intact if no finding is an ERROR."""
    return Verification(root).findings()


class Verification:
    """Check of a root up to the head at its creation. ``first`` is the first record that must exist."""

    def __init__(self, root: Root, *, first: int = 1) -> None:
        self._root = root
        self._first_expected = first
        self.history = History(root)
        self._log_id: bytes | None = None
        self._head: Head | None = None
        self._view = View(root, b"", UNBOUNDED, Listing(()))
        self._state = INITIAL_STATE
        self._last_base = 0  # of the last segment checked
        initial_findings = self._initial_findings = list[Finding]()
        try:
            self._log_id = read_identity(root).log_id
        except (Damaged, UnsupportedFormat) as error:
            initial_findings.append(Finding.of(Level.ERROR, root.identity, error.message))
        head_is_damaged = False
        try:
            self._head = read_head(root)
        except Damaged as error:
            head_is_damaged = True
            initial_findings.append(Finding.of(Level.ERROR, root.head, error.message))
        initial_findings += self._unread_files()
        try:
            self._view = read_view(root, self._log_id or b"", bound=UNBOUNDED)
        except Damaged as error:
            initial_findings.append(Finding.of(Level.ERROR, root.segments, error.message))
        if self._head is None and not head_is_damaged:
            # The head is written before the first segment, so a log with segments has lost its head.
            level = Level.ERROR if self._view.segments else Level.INFO
            message = (
                "is missing or empty, so the last durable record is unknown; the next start of the daemon rewrites it"
            )
            initial_findings.append(Finding(level, root.head, 0, message))
        self._steps = read_steps(root)  # read after the head, so that no earlier step is missed
        self.segments = self.records = self.raw_bytes = 0

    def segments_to_check(self) -> list[SegmentToCheck]:
        return [self.target(segment) for segment in self._view.segments if not self._is_after_head(segment)]

    def findings(self, find_result: FindResult = lambda _: None) -> Iterator[Finding]:
        """Check the log; call once. ``find_result`` may return the result of an earlier check from INITIAL_STATE."""
        yield from self._initial_findings
        yield from self._check_segments(find_result)
        yield from self._check_head()
        yield from self._check_clock_steps()
        for name in LEDGERS:
            yield from self._check_ledger(self._root.ledger / name)
        yield from self._check_cursors()
        for path, message in fifo_problems(self._root):
            yield Finding.of(Level.INFO, path, message)

    def _check_clock_steps(self) -> Iterator[Finding]:
        try:
            require_steps(self._root)
        except (Damaged, OSError) as error:
            yield Finding.of(Level.ERROR, self._root.clock_steps, str(error))

    def _unread_files(self) -> Iterator[Finding]:
        """Report files in ``segments/`` that readers ignore."""
        if not self._root.segments.is_dir():
            return  # read_view() reports it
        for entry in sorted(os.scandir(self._root.segments), key=lambda entry: entry.name):
            path, is_original = Path(entry.path), entry.name.endswith(WHOLE_SUFFIX)
            name = parse_segment_name(entry.name.removesuffix(WHOLE_SUFFIX))
            is_reclaimed = name is not None and name.kind.is_reclaimed
            segment = None if name is None else Segment(name.base_sequence, name.kind, path)
            if segment is not None and (is_reclaimed or is_original) and (error := self.misplacement(segment)):
                yield Finding.of(Level.ERROR, path, f"{error.message}; {error.hint}")
            elif is_reclaimed:
                yield Finding(Level.INFO, path, 0, "reclaimed; in its grace period")
            elif is_original:
                yield Finding(Level.INFO, path, 0, "left by an interrupted shrinking; wald-reclaim finishes it")
            elif name is None and not entry.name.endswith(".tmp"):
                yield Finding(Level.INFO, path, 0, "not a file of the log")

    def misplacement(self, segment: Segment) -> Misplaced | None:
        """Return the error if the header names another segment or log."""
        try:
            if self._log_id is not None:
                require_matching_name(segment, self._log_id)
        except Misplaced as error:
            return error
        except OSError:  # it was removed or is unreadable, and no reader needs it
            pass
        return None

    def _check_segments(self, find_result: FindResult) -> Iterator[Finding]:
        pending = deque(self._view.segments)
        while pending:
            segment = pending.popleft()
            if self._is_after_head(segment):
                yield Finding(Level.INFO, segment.path, 0, "not checked, because it is after the head")
                continue
            expected = self._expected_base(segment.base_sequence)
            # The listing may be hours old, and a deletion may have been undone since.
            missing = self._unexplained(expected, segment.base_sequence - 1)
            view = self._view.including_restored(expected, segment.base_sequence - 1) if missing else self._view
            if view is not self._view:
                self._view = view
                pending = deque(s for s in self._view.segments if s.base_sequence >= expected)
                continue
            try:
                yield from self._view.follow(segment, lambda current: self._check_segment(current, find_result))
            except SegmentGone as gone:
                try:
                    self._view = self._view.without(gone, segment)
                except Damaged as error:
                    yield Finding.of(Level.ERROR, segment.path, error.message)
                else:
                    pending = deque(s for s in self._view.segments if s.base_sequence >= segment.base_sequence)

    def _expected_base(self, base: int) -> int:
        """Return the next segment's first sequence."""
        return self._state.next_sequence or min(self._first_expected, base)

    def _check_segment(self, segment: Segment, find_result: FindResult) -> list[Finding]:
        """Check a segment and its place after the previous one. If the file disappears, the state is unchanged."""
        findings = list(self._compare_with_previous(segment))
        before = self._state
        if segment.base_sequence > self._expected_base(segment.base_sequence):
            before = replace(before, open_records={})  # open records may have ended in the missing segments
        if step_between(self._steps, self._last_base + 1, segment.base_sequence):
            before = replace(before, append_time_ns=INITIAL_STATE.append_time_ns)
        target = self.target(segment)
        independent = find_result(target) or check(target)
        result = independent.for_state(before) or self._recheck(target, independent, before)
        self._state, self._last_base = result.end_state, segment.base_sequence
        self.segments += 1
        self.records += result.records
        self.raw_bytes += result.raw_bytes
        findings += result.findings
        findings += self._check_sealing_line(segment) if result.records else ()
        is_damaged = any(each.level is Level.ERROR and each.path == segment.path for each in findings)
        return [each for each in findings if not (is_damaged and each.level is Level.OK)]

    def _recheck(self, target: SegmentToCheck, independent: CheckResult, before: LogState) -> CheckResult:
        """Check again without open records that a repair drops: given up, or with a reclaimed beginning."""
        with _IGNORE_DAMAGE:
            remaining = {
                route: at
                for route, at in before.open_records.items()
                if not self.history.is_given_up(at) and self.history.deletion_of(at) is None
            }
            before = replace(before, open_records=remaining)
        return independent.for_state(before) or check(target, before)

    def _check_sealing_line(self, segment: Segment) -> Iterator[Finding]:
        """Report a sealed segment without a ledger line, unless the sealer may still write it."""
        if segment.kind.form is Kind.SEALED and not segment.path.with_suffix("").exists():
            with _IGNORE_DAMAGE:
                sealed = self.history.sealing_of(segment.base_sequence)
                if sealed is None or sealed["base"] != segment.base_sequence:
                    message = "the ledger has no line about its sealing; a repair writes one"
                    yield Finding(Level.INFO, segment.path, 0, message)

    def _compare_with_previous(self, segment: Segment) -> Iterator[Finding]:
        """Report records missing or repeated between the previous segment and this one."""
        base, expected = segment.base_sequence, self._expected_base(segment.base_sequence)
        if base > expected:
            missing = self._unexplained(expected, base - 1)
            for first, last in missing:
                yield self._missing(self._root.segments, first, last, "are in no segment, and no ledger explains why")
            explained = list(Spans(missing).gaps(expected, base - 1))
            for first, last in explained:
                yield from self._recorded_losses(first, last)
            for first, last in explained:
                given_up = Spans((loss.extent.first, loss.extent.last) for loss in self._losses(first, last))
                for begin, end in given_up.gaps(first, last):
                    message = f"records {begin} to {end}, before this segment, were reclaimed"
                    yield Finding(Level.INFO, segment.path, 0, message)
        elif base < expected:
            message = f"begins before record {expected}, where the previous segment ends"
            yield Finding(Level.ERROR, segment.path, 0, message)

    def _unexplained(self, first: int, last: int) -> list[tuple[int, int]]:
        try:
            return list(self.history.unexplained_spans(first, last))
        except Damaged:  # the check of the ledgers reports it
            return [(first, last)] if first <= last else []

    def _recorded_losses(self, first: int, last: int) -> Iterator[Finding]:
        for loss in self._losses(first, last):
            begin, end, state = loss.extent.first, loss.extent.last, "missing" if loss.is_unrestored else "lost"
            count = f"{loss.records} of " if loss.records <= end - begin else ""
            verb = "is" if begin == end else "are"
            message = f"{count}{span_text(begin, end)} {verb} {state}: {loss.reason}"
            yield Finding(Level.INFO, self._root.segments, 0, message)

    def _losses(self, first: int, last: int) -> list[Loss]:
        with _IGNORE_DAMAGE:
            return self.history.losses(first, last)
        return []

    def _missing(self, path: Path, first: int, last: int, reason: str) -> Finding:
        """Return a finding for missing records that names released segments which may contain them."""
        released = [s.path.name for s in self._view.listing.released if first <= s.base_sequence <= last]
        more = f"; {', '.join(released)} may contain them; a repair restores the name" if released else ""
        return Finding(Level.ERROR, path, 0, f"records {first} to {last} {reason}{more}")

    def _is_after_head(self, segment: Segment) -> bool:
        return self._head is not None and segment.base_sequence > self._head.segment

    def target(self, segment: Segment) -> SegmentToCheck:
        head, log_id = self._head, self._log_id
        if segment.kind.form is Kind.SEALED:
            sealed, shrunk, base = None, frozenset[str](), segment.base_sequence
            dropped = self.history.last_dropped(base)
            with _IGNORE_DAMAGE:
                sealed = self.history.sealing_of(base)
                shrunk = frozenset(str(shrinking.get("sha256")) for shrinking in self.history.shrinks(base))
            sha256 = None if sealed is None else str(sealed.get("sha256"))
            return SegmentToCheck(segment, log_id, sha256=sha256, shrunk=shrunk, dropped=dropped)
        if head is not None and head.segment == segment.base_sequence:
            return SegmentToCheck(segment, log_id, durable=head.position)
        open_ended = head is None and segment.base_sequence == self._view.segments[-1].base_sequence
        return SegmentToCheck(segment, log_id, open_ended=open_ended, end=recorded_end(self._view, segment))

    def _check_head(self) -> Iterator[Finding]:
        head, last = self._head, max(self._state.next_sequence - 1, 0)
        listing, segments, last_sealed = self._view.listing, self._root.segments, 0
        if head is not None and head.sequence and not listing.segments and not listing.released:
            for _ in self._unexplained(head.sequence, head.sequence):
                hint = hint_for("segments-directory-empty", segments=segments)
                yield Finding(Level.ERROR, segments, 0, f"contains no segments; {hint}")
        with _IGNORE_DAMAGE:
            last_sealed = self.history.last_sealed()
        for begin, end in self._unexplained(last + 1, last_sealed):
            yield self._missing(self._root.segments, begin, end, "were sealed, but are in no segment")
        if head is None:
            return
        missing = self._unexplained(last + 1, head.sequence)
        for begin, end in missing:
            yield self._missing(self._root.head, begin, end, "are durable according to the head, but are in no segment")
        yield from self._recorded_losses(last + 1, head.sequence)
        if not missing:
            yield Finding(Level.OK, self._root.head, 0, f"record {head.sequence}")

    def _check_ledger(self, path: Path) -> Iterator[Finding]:
        try:
            for file, decoded in read_files(path):
                for number, reason in decoded.broken_lines:
                    yield Finding(Level.ERROR, file, 0, f"line {number}: {reason}")
                if file.exists() and not decoded.broken_lines:
                    lines = len(decoded.entries)
                    yield Finding(Level.OK, file, 0, f"{lines} line{'s' * (lines != 1)}")
                if file.suffix != PART_SUFFIX and file.exists() and file.stat().st_size > decoded.complete_bytes:
                    yield Finding(
                        Level.INFO, file, decoded.complete_bytes, "unfinished line; the next append removes it"
                    )
        except Damaged as error:
            yield Finding.of(Level.ERROR, path, error.message)
        except OSError as error:
            yield Finding(Level.ERROR, path, 0, f"cannot be read ({error.strerror})")

    def _check_cursors(self) -> Iterator[Finding]:
        if not self._root.routes.is_dir():
            message = "the directory and all its cursors are missing; every record counts as unread"
            yield Finding(Level.INFO, self._root.routes, 0, message)
        log_id = self._log_id or b""
        for route in self._root.route_names():
            cursors = read_cursors(self._root, route, log_id=log_id, head_sequence=self._last_durable())
            if any(cursor.state is CursorState.BEYOND for cursor in cursors):
                # The head and then a cursor may have advanced since the head was read.
                cursors = read_cursors(self._root, route, log_id=log_id, head_sequence=self._last_durable())
            for cursor in cursors:
                if cursor.state is CursorState.VALID:
                    yield Finding(Level.OK, cursor.path, 0, f"record {cursor.sequence}")
                elif cursor.state is not CursorState.ABSENT:
                    yield Finding.of(Level.ERROR, cursor.path, f"{cursor.message}; the cursor counts as 0")
        for pin in handover_pins(self._root, log_id):
            yield Finding.of(Level.ERROR if pin.problem else Level.INFO, pin.path, pin.message)

    def _last_durable(self) -> int:
        head = self._head
        with contextlib.suppress(Damaged):  # reported when the check began
            head = read_head(self._root) or head
        return head.sequence if head is not None else max(self._state.next_sequence - 1, 0)

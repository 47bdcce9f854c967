"""What ``wald-reclaim --watch`` has done since its start, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from wald.exposition import Histogram, Metric, Samples, counter, histogram
from wald_reclaim.decision import Decision
from wald_reclaim.policy import Verdict
from wald_reclaim.shrink import ShrunkSegment


@dataclass(slots=True)
class Counts:
    """Plain numbers, which the passes write and another thread reads.

    Attributes:
        gone, gone_bytes: segments that were released, by rule.
        kept: segments that stay, by what keeps them, as the last whole pass found it.
        ended_ns: when that ended; 0 before the first one.
    """

    pass_seconds: Histogram = field(default_factory=lambda: Histogram(0.01, 0.025, 0.1, 0.25, 1, 2.5, 10, 60, 300))
    failed: int = 0
    gone: Counter[Verdict] = field(default_factory=Counter)
    gone_bytes: Counter[Verdict] = field(default_factory=Counter)
    deleted: int = 0
    deleted_bytes: int = 0
    taken_back: int = 0
    shrunk: int = 0
    shrunk_bytes: int = 0
    lost_records: int = 0
    kept: Counter[Verdict] = field(default_factory=Counter)
    ended_ns: int = 0
    _keeping: Counter[Verdict] = field(default_factory=Counter)

    def begin(self) -> None:
        """A pass begins."""
        self._keeping = Counter()

    def decision(self, decision: Decision) -> None:
        """Count the decision about a complete segment, after it was carried out."""
        verdict = decision.verdict
        if not verdict.goes:
            self._keeping[verdict] += 1
            return
        self.gone[verdict] += 1
        self.gone_bytes[verdict] += decision.stored_bytes
        self.lost_records += sum((decision.entry or {}).get("lost", {}).values())

    def released(self, decision: Decision, *, due: bool) -> None:
        """Count what has become of a segment that was released before."""
        if not decision.verdict.goes:
            self.taken_back += not decision.stays
        elif due:
            self.deleted += 1
            self.deleted_bytes += decision.stored_bytes

    def add_shrunk(self, shrunk: ShrunkSegment) -> None:
        """Count a segment that was shrunk."""
        self.shrunk += not shrunk.taken_back
        self.shrunk_bytes += shrunk.was_bytes - shrunk.bytes

    def end(self, seconds: float, *, now_ns: int) -> None:
        """A pass has ended without an error."""
        self.pass_seconds.observe(seconds)
        self.kept, self.ended_ns = self._keeping, now_ns


def of_reclaim(counts: Counts) -> Iterator[Metric]:
    """Yield the metrics of ``wald-reclaim``."""
    yield histogram("wald_reclaim_pass_seconds", "Duration of a successful pass", counts.pass_seconds)
    yield counter("wald_reclaim_failed_passes_total", "Passes that failed", counts.failed)
    rules = [verdict for verdict in Verdict if verdict.goes]
    gone: Samples = {(rule.value,): counts.gone[rule] for rule in rules}
    meaning = "Segments released, to be deleted after the grace period"
    yield Metric("wald_reclaim_released_segments_total", "counter", meaning, ("rule",), gone)
    gone_bytes: Samples = {(rule.value,): counts.gone_bytes[rule] for rule in rules}
    yield Metric("wald_reclaim_released_bytes_total", "counter", "Bytes of released segments", ("rule",), gone_bytes)
    yield counter("wald_reclaim_deleted_segments_total", "Segments deleted", counts.deleted)
    yield counter("wald_reclaim_deleted_bytes_total", "Bytes of deleted segments", counts.deleted_bytes)
    meaning = "Released segments restored because they are needed again"
    yield counter("wald_reclaim_taken_back_segments_total", meaning, counts.taken_back)
    meaning = "Pinned segments rewritten to their unread records"
    yield counter("wald_reclaim_shrunk_segments_total", meaning, counts.shrunk)
    yield counter("wald_reclaim_shrunk_bytes_total", "Bytes freed in rewritten segments", counts.shrunk_bytes)
    meaning = "Unread records in segments released by a limit or a quota"
    yield counter("wald_reclaim_lost_records_total", meaning, counts.lost_records)
    kept: Samples = {(verdict.name.lower(),): counts.kept[verdict] for verdict in Verdict if not verdict.goes}
    meaning = "Segments kept by the last successful pass, by reason"
    yield Metric("wald_reclaim_kept_segments", "gauge", meaning, ("reason",), kept)
    ended: Samples = {(): counts.ended_ns / 1e9} if counts.ended_ns else {}
    meaning = "End of the last successful pass"
    yield Metric("wald_reclaim_last_pass_timestamp_seconds", "gauge", meaning, (), ended)

"""Report of ``wald-reclaim``: a line for each released segment, a summary of each pass, and the metrics of all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from wald.cli.output import json_line
from wald.exposition import Histogram, Metric, Samples, counter, histogram
from wald.format.ledger_lines import parse_raw_json
from wald.setting_types import format_bytes
from wald.status.schema import ledger_fields
from wald_reclaim.apply import ShrunkSegment
from wald_reclaim.evidence import RouteLists
from wald_reclaim.policy import Verdict
from wald_reclaim.survey import Decision

_NAMED = 3  # routes in the summary; --json has all


@dataclass(slots=True)
class Counts:
    """Totals since the start, which passes update and another thread reads."""

    pass_seconds: Histogram = field(default_factory=lambda: Histogram(0.01, 0.025, 0.1, 0.25, 1, 2.5, 10, 60, 300))
    failed: int = 0
    released: Counter[Verdict] = field(default_factory=Counter)
    released_bytes: Counter[Verdict] = field(default_factory=Counter)
    deleted: int = 0
    deleted_bytes: int = 0
    taken_back: int = 0
    shrunk: int = 0
    shrunk_bytes: int = 0
    lost_records: int = 0
    # segments that stay, by reason, in the last successful pass
    kept: Counter[Verdict] = field(default_factory=Counter)
    ended_ns: int = 0  # end of that pass; 0 before the first one


@dataclass(slots=True)
class _Pass:
    began: float = field(default_factory=time.monotonic)
    released: int = 0
    released_bytes: int = 0
    deleted: int = 0
    shrunk: int = 0
    kept: Counter[Verdict] = field(default_factory=Counter)
    kept_bytes: int = 0
    pinned_alone: Counter[str] = field(default_factory=Counter)  # bytes that one route alone pins
    pinning: dict[int, str] = field(default_factory=dict)  # that route, of each segment that can be shrunk
    lost: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Report:
    """Report of one process; ``write`` prints a line, ``warn`` a problem."""

    as_json: bool
    is_dry_run: bool
    watching: bool  # omits passes that do nothing, and problems that the previous pass reported
    write: Callable[[str], None]
    warn: Callable[[str], None]
    counts: Counts = field(default_factory=Counts)
    _pass: _Pass = field(default_factory=_Pass)
    _warned: set[str] = field(default_factory=set)
    _warned_before: set[str] = field(default_factory=set)
    _lists: RouteLists = field(default_factory=RouteLists)

    def begin(self) -> None:
        """Begin a pass, whether or not the previous one finished."""
        self._warned_before, self._warned = self._warned, set()
        self._pass = _Pass()

    def decision(self, decision: Decision) -> None:
        """Report the decision about a complete segment; one that stays is only counted."""
        segment, verdict, stored_bytes = decision.segment, decision.verdict, decision.stored_bytes
        if decision.message:
            self.problem(decision.message)
        if not verdict.is_deletion:
            self._pass.kept[verdict] += 1
            self._pass.kept_bytes += stored_bytes
            if decision.is_pinned_alone and decision.pin is not None:
                self._pass.pinned_alone[decision.pin.route] += stored_bytes
                if decision.is_shrinkable:
                    self._pass.pinning[segment.base_sequence] = decision.pin.route
            return
        entry = decision.entry or {"base": segment.base_sequence, "rule": verdict.value}
        lost = entry.get("lost", {})
        self._pass.released += 1
        self._pass.released_bytes += stored_bytes
        self._pass.lost.update(lost)
        self.counts.released[verdict] += 1
        self.counts.released_bytes[verdict] += stored_bytes
        self.counts.lost_records += sum(lost.values())
        if self.as_json:
            evidence = decision.evidence
            routes = {"routes": self._lists.text(evidence.routes, evidence.cursors, {})} if evidence is not None else {}
            fields = ledger_fields(parse_raw_json(entry | routes))
            self._object("would-reclaim" if self.is_dry_run else "reclaimed", fields)
            return
        records = f"records {entry['base']} to {entry['last']}" if "last" in entry else "decided before"
        unread = ", ".join(f"{count} unread of {route}" for route, count in lost.items())
        self.write(
            f"{'would reclaim' if self.is_dry_run else 'reclaimed'} {segment.path.name}: {records}, "
            f"{format_bytes(stored_bytes)}, rule {verdict.value}"
            f"{', damaged' if entry.get('damaged') else ''}{unread and f'; LOST: {unread}'}"
        )

    def released(self, decision: Decision, *, is_due: bool) -> None:
        """Report a segment that was released earlier: deleted if due, waiting, left alone, or taken back."""
        if decision.message:
            self.problem(decision.message)
        if decision.verdict.is_deletion:
            self._pass.deleted += is_due
            self.counts.deleted += is_due
            self.counts.deleted_bytes += decision.stored_bytes if is_due else 0
        elif not decision.keeps_name:
            self.counts.taken_back += 1
            if self.as_json:
                fields = {"segment": decision.segment.base_sequence, "reason": _key(decision.verdict)}
                self._object("would-take-back" if self.is_dry_run else "taken-back", fields)
            else:
                verb = "would take" if self.is_dry_run else "took"
                self.write(f"{verb} {decision.segment.path.name} back: {decision.verdict.value}")

    def shrunk(self, shrunk: ShrunkSegment) -> None:
        """Report a segment that was shrunk; its former bytes were counted as kept."""
        name, base = shrunk.segment.path.name, shrunk.segment.base_sequence
        freed_bytes = shrunk.was_bytes - shrunk.bytes
        self._pass.shrunk += not shrunk.is_restored
        self._pass.kept_bytes -= freed_bytes
        self.counts.shrunk += not shrunk.is_restored
        self.counts.shrunk_bytes += freed_bytes
        if (route := self._pass.pinning.get(base)) is not None:
            self._pass.pinned_alone[route] -= freed_bytes
        was = format_bytes(shrunk.was_bytes)
        if self.as_json:
            sizes = {"bytes": shrunk.bytes, "was_bytes": shrunk.was_bytes}
            fields = {"segment": base, **sizes, "records": None if self.is_dry_run else shrunk.records}
            self._object("would-shrink" if self.is_dry_run else "shrunk", fields)
        elif self.is_dry_run:
            self.write(f"would shrink {name}: about {format_bytes(freed_bytes)} of {was} would be freed")
        elif shrunk.is_restored:
            self.write(f"did not shrink {name}: a cursor was moved back in the meantime")
        else:
            change = f"{was} to {format_bytes(shrunk.bytes)}"
            self.write(f"shrunk {name}: {change}, {shrunk.records} records were read by every group")

    def end(self, problems: Sequence[str]) -> None:
        for message in problems:
            self.problem(f"{message}; no record counts as processed")
        done = self._pass
        if self.as_json:
            fields: dict[str, object] = {"dry_run": self.is_dry_run, "segments": done.released}
            fields |= {"bytes": done.released_bytes, "deleted_segments": done.deleted, "shrunk_segments": done.shrunk}
            fields["kept_segments"] = {_key(verdict): count for verdict, count in done.kept.items()}
            fields |= {"kept_bytes": done.kept_bytes, "pinned_alone": dict(done.pinned_alone), "lost": dict(done.lost)}
            self._object("pass", fields)
        elif done.released or done.deleted or not self.watching:
            self.write(self._summary())
        self.counts.pass_seconds.observe(time.monotonic() - done.began)
        self.counts.kept, self.counts.ended_ns = done.kept, time.time_ns()

    def failed(self, message: str) -> None:
        self.counts.failed += 1
        self.problem(message)

    def problem(self, message: str) -> None:
        """Report a problem; while watching, once for as long as every pass finds it."""
        if message not in self._warned | self._warned_before:
            self.warn(message)
        if self.watching:
            self._warned.add(message)

    def _object(self, event: str, fields: Mapping[str, object]) -> None:
        self.write(json_line("reclaim", {"event": event} | {key: fields[key] for key in fields if key != "event"}))

    def _summary(self) -> str:
        done = self._pass
        released, deleted = ("would be marked", "would be deleted") if self.is_dry_run else ("now marked", "deleted")
        kept = ", ".join(f"{count}: {verdict.value}" for verdict, count in done.kept.items())
        alone = ", ".join(f"{route} {format_bytes(size)}" for route, size in done.pinned_alone.most_common(_NAMED))
        return (
            f"segments {released} for deletion: {done.released} ({format_bytes(done.released_bytes)}); {deleted}: "
            f"{done.deleted}; kept: {done.kept.total()} ({format_bytes(done.kept_bytes)}{kept and f'; {kept}'})"
            f"{alone and f'; pinned by one route alone: {alone}'}"
        )


def _key(verdict: Verdict) -> str:
    return verdict.name.lower()


def reclaim_metrics(counts: Counts) -> Iterator[Metric]:
    def by_rule(name: str, meaning: str, values: Counter[Verdict]) -> Metric:
        samples: Samples = {(rule.value,): values[rule] for rule in Verdict if rule.is_deletion}
        return Metric(name, "counter", meaning, ("rule",), samples)

    yield histogram("wald_reclaim_pass_seconds", "Duration of a successful pass", counts.pass_seconds)
    yield counter("wald_reclaim_failed_passes_total", "Passes that failed", counts.failed)
    meaning = "Segments released, to be deleted after the grace period"
    yield by_rule("wald_reclaim_released_segments_total", meaning, counts.released)
    yield by_rule("wald_reclaim_released_bytes_total", "Bytes of released segments", counts.released_bytes)
    yield counter("wald_reclaim_deleted_segments_total", "Segments deleted", counts.deleted)
    yield counter("wald_reclaim_deleted_bytes_total", "Bytes of deleted segments", counts.deleted_bytes)
    meaning = "Released segments restored because they are needed again"
    yield counter("wald_reclaim_taken_back_segments_total", meaning, counts.taken_back)
    meaning = "Pinned segments rewritten to their unread records"
    yield counter("wald_reclaim_shrunk_segments_total", meaning, counts.shrunk)
    yield counter("wald_reclaim_shrunk_bytes_total", "Bytes freed in rewritten segments", counts.shrunk_bytes)
    meaning = "Unread records in segments released by a limit or a quota"
    yield counter("wald_reclaim_lost_records_total", meaning, counts.lost_records)
    kept: Samples = {(_key(verdict),): counts.kept[verdict] for verdict in Verdict if not verdict.is_deletion}
    meaning = "Segments kept by the last successful pass, by reason"
    yield Metric("wald_reclaim_kept_segments", "gauge", meaning, ("reason",), kept)
    ended: Samples = {(): counts.ended_ns / 1e9} if counts.ended_ns else {}
    meaning = "End of the last successful pass"
    yield Metric("wald_reclaim_last_pass_timestamp_seconds", "gauge", meaning, (), ended)

"""Passes of ``wald-reclaim``: survey, decide, apply and report; once, or whenever segments may have become deletable.

Options override the configuration file; 0 means unlimited in both. ``--unread expire`` is a default that routes may
override; ``--unread keep`` overrides every route.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import wald.settings
from wald.cli.output import ignore_stdout, json_line
from wald.errors import Damaged, DiskFailure, Gone, InvalidInput, NotPermitted, Replaced, WaldError, wrong_type
from wald.exposition import Histogram, Metric, Samples, counter, histogram, serving
from wald.files import locks
from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.format.ledger_lines import parse_raw_json
from wald.format.names import CURSOR_SUFFIX, CURSORS, Kind
from wald.hints import command_line, room_commands
from wald.log import Log
from wald.loop import stop_on_signals, watch_files
from wald.setting_types import format_bytes
from wald.status.schema import ledger_fields
from wald_reclaim.apply import Deleter, Shrinker, ShrunkSegment, estimate_shrinks
from wald_reclaim.evidence import routes_json
from wald_reclaim.policy import Limits, RouteLimits, Verdict
from wald_reclaim.survey import Decision, Survey

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
    watching: bool  # omit passes that do nothing, and problems that the previous pass reported
    write: Callable[[str], None]
    warn: Callable[[str], None]
    counts: Counts = field(default_factory=Counts)
    _pass: _Pass = field(default_factory=_Pass)
    _warned: set[str] = field(default_factory=set)
    _warned_before: set[str] = field(default_factory=set)

    def begin(self) -> None:
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
            routes = {"routes": routes_json(evidence.routes, evidence.cursors, {})} if evidence is not None else {}
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
        """Report a segment released earlier: deleted if due, waiting, left alone, or restored."""
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
    meaning = "Segments released, to be deleted after the grace period"
    yield by_rule("wald_reclaim_released_segments_total", meaning, counts.released)
    yield by_rule("wald_reclaim_released_bytes_total", "Bytes of released segments", counts.released_bytes)
    for name, meaning, value in (
        ("failed_passes", "Passes that failed", counts.failed),
        ("deleted_segments", "Segments deleted", counts.deleted),
        ("deleted_bytes", "Bytes of deleted segments", counts.deleted_bytes),
        ("taken_back_segments", "Released segments restored because they are needed again", counts.taken_back),
        ("shrunk_segments", "Pinned segments rewritten to their unread records", counts.shrunk),
        ("shrunk_bytes", "Bytes freed in rewritten segments", counts.shrunk_bytes),
        ("lost_records", "Unread records in segments released by a limit or a quota", counts.lost_records),
    ):
        yield counter(f"wald_reclaim_{name}_total", meaning, value)
    kept: Samples = {(_key(verdict),): counts.kept[verdict] for verdict in Verdict if not verdict.is_deletion}
    meaning = "Segments kept by the last successful pass, by reason"
    yield Metric("wald_reclaim_kept_segments", "gauge", meaning, ("reason",), kept)
    ended: Samples = {(): counts.ended_ns / 1e9} if counts.ended_ns else {}
    meaning = "End of the last successful pass"
    yield Metric("wald_reclaim_last_pass_timestamp_seconds", "gauge", meaning, (), ended)


PERIOD_SECONDS = 15.0  # between two passes without a change
_RESERVE_BYTES = 256 << 10  # of the ledger: on a full disk, deleting must still be recorded first


_LOG_LIMITS = {"max_age": "log_max_age", "max_bytes": "log_max_bytes", "max_records": "log_max_records"}
"""Options that limit the whole log, by their names in the file, where the short names limit each route."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings of a pass."""

    limits: Limits
    grace_ns: int
    verify: bool
    shrink_pinned: bool


def load_settings(path: Path | None, options: Mapping[str, Any]) -> Settings:
    given = {name: value for name, value in options.items() if value is not None}
    config = wald.settings.Config() if path is None else wald.settings.load(path, os.environ)
    same_name = {name: value for name, value in given.items() if name not in _LOG_LIMITS}
    retention = replace(config.retention, **same_name)
    config = replace(config, retention=retention)
    log = {name: given.get(name, getattr(retention, key)) or None for name, key in _LOG_LIMITS.items()}
    keep_unread = given.get("unread") == "keep"
    of_routes = {name: _route_limits(config.limits(name), keep_unread=keep_unread) for name in config.routes}
    others = _route_limits(config.limits(""), keep_unread=keep_unread)
    limits = Limits(
        min_age_ns=_nanoseconds(retention.min_age or None),
        keep_bytes=retention.keep_bytes or None,
        require_archived=retention.require_archived,
        max_age_ns=_nanoseconds(log["max_age"]),
        max_bytes=log["max_bytes"],
        max_records=log["max_records"],
        of_routes={name: own for name, own in of_routes.items() if own != others},
        others=others,
    )
    has_limit = limits.by_route or any(limit is not None for limit in log.values())
    if given.get("unread") == "expire" and not has_limit:
        raise InvalidInput("--unread expire needs a limit", hint="--max-bytes 10GiB, or --max-age 30d")
    return Settings(limits, int(retention.grace * 1e9), retention.verify, retention.shrink_pinned)


def _route_limits(limits: wald.settings.RouteLimits, *, keep_unread: bool) -> RouteLimits:
    expires_pinned = limits.on_pinned == "expire" and not keep_unread
    return RouteLimits(
        max_age_ns=_nanoseconds(limits.max_age),
        max_bytes=limits.max_bytes,
        max_records=limits.max_records,
        expire=limits.unread == "expire" and not keep_unread,
        pinned_max_bytes=limits.pinned_max_bytes if expires_pinned else None,
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def reclaim(
    root: Path,
    load: Callable[[], Settings],
    *,
    is_dry_run: bool,
    watching: bool,
    metrics: str | None,
    as_json: bool,
    write: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Make one pass, or passes until a signal arrives; ``load`` returns the settings, again on SIGHUP."""
    settings = load()
    log = Log(root)
    report = Report(as_json, is_dry_run=is_dry_run, watching=watching, write=write, warn=warn)
    try:
        if is_dry_run:
            _show(log, settings, report)
        else:
            ignore_stdout()
            with serving(metrics, lambda: reclaim_metrics(report.counts)):
                _work(log, settings, report, reload=load if watching else None)
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or log.root.path) from error
    except BrokenPipeError:  # the reader of a dry run has exited
        raise
    except OSError as error:
        if (misplaced := wrong_type(error)) is not None:
            raise misplaced from error
        message = f"{error.filename or log.root.ledger}: {error.strerror}; nothing is lost, and the next pass continues"
        root_path = log.root.path
        hint = f"{room_commands(root_path, error=error)}; then {command_line(root_path, program='wald-reclaim')}"
        raise DiskFailure(message, hint=hint) from error


class Pass:
    """One pass, which may be repeated."""

    def __init__(self, deleter: Deleter, settings: Settings, stop: threading.Event) -> None:
        self.deleter, self.settings, self.stop = deleter, settings, stop
        self._shrinker = Shrinker(deleter, require_archived=settings.limits.require_archived)

    def set_settings(self, settings: Settings) -> None:
        self.deleter.survey.set_limits(settings.limits, verify=settings.verify)
        self.settings = settings
        self._shrinker = Shrinker(self.deleter, require_archived=settings.limits.require_archived)

    def run(self, report: Report, *, now_ns: int) -> None:
        """Survey the log and apply the decisions; if stopped, end where the next pass can continue."""
        survey = self.deleter.survey
        self.deleter.require_continuity()
        for error in self._shrinker.finish():  # first, because a segment with two forms may be deleted below
            report.problem(str(error))
        if (seen := survey.seen_entry(now_ns=now_ns)) is not None:
            self.deleter.record(seen)
        decisions = takewhile(lambda _: not self.stop.is_set(), survey.decisions(now_ns=now_ns))
        shrinkable: list[Segment] = []
        for decision in self.deleter.release(decisions, now_ns=now_ns):
            report.decision(decision)
            if decision.is_shrinkable and self.settings.shrink_pinned:
                shrinkable.append(decision.segment)
        released = survey.released()
        due = survey.due(released, grace_ns=self.settings.grace_ns)
        for decision in self.deleter.delete(released, due, now_ns=now_ns):
            report.released(decision, is_due=decision.segment.kind is decision.segment.kind.deleting)
        failure = self._shrink(shrinkable, report, now_ns)
        self.deleter.require_continuity()  # before it reports files of another log as damaged
        report.end(survey.problems)
        if failure is not None and not report.watching:
            raise failure

    def _shrink(self, segments: list[Segment], report: Report, now_ns: int) -> OSError | None:
        for segment in segments:
            if self.stop.is_set():
                break
            try:
                shrunk = self._shrinker.shrink(segment, now_ns=now_ns)
            except (Damaged, FileNotFoundError) as error:
                report.problem(str(error))
                continue
            except OSError as error:  # the next pass tries again
                report.problem(f"{segment.path}: {error.strerror}; shrinking needs space for the new file")
                return error
            if shrunk is not None:
                report.shrunk(shrunk)
        return None


def _show(log: Log, settings: Settings, report: Report) -> None:
    limits = settings.limits
    survey = Survey(log.root, limits, log_id=log.identity.log_id, verify=settings.verify)
    now_ns = time.time_ns()
    shrinkable: list[Segment] = []
    for decision in survey.decisions(now_ns=now_ns):
        report.decision(decision)
        if decision.verdict.is_deletion and not settings.grace_ns:  # released and deleted by the same pass
            report.released(replace(decision, message=""), is_due=True)
        if decision.is_shrinkable and settings.shrink_pinned:
            shrinkable.append(decision.segment)
    for shrunk in estimate_shrinks(log.root, survey, shrinkable, require_archived=limits.require_archived):
        report.shrunk(shrunk)
    released = survey.released()
    due = {segment.base_sequence for segment in survey.due(released, grace_ns=settings.grace_ns)}
    for decision in survey.confirm(released, now_ns=now_ns):
        report.released(decision, is_due=decision.segment.base_sequence in due)
    report.end(survey.problems)


def _work(log: Log, settings: Settings, report: Report, *, reload: Callable[[], Settings] | None) -> None:
    """Make one pass; with ``reload``, which reads the settings at SIGHUP, make passes until a signal arrives."""
    disk = Disk()
    path = log.root.ledger / "reclaim.jsonl"
    with closing(Ledger(path, disk, owner="wald-reclaim", reserve_bytes=_RESERVE_BYTES)) as ledger:
        locks.remove_leftovers(locks.leftovers(log.root, disk), disk)
        ledger.cut()  # one from before this program may be long
        # The survey reads the ledger, which is locked by now, so that no other process appends to it.
        survey = Survey(log.root, settings.limits, log_id=log.identity.log_id, verify=settings.verify)
        with stop_on_signals() as stop:
            one_pass = Pass(Deleter(log.root, disk, ledger, survey, log.require_continuity), settings, stop)
            if reload is None:
                one_pass.run(report, now_ns=time.time_ns())
            else:
                _watch(one_pass, report, reload)


def _watch(one_pass: Pass, report: Report, reload: Callable[[], Settings]) -> None:
    """Make passes until a signal arrives; an error is reported, and the next pass tries again."""
    deleter = one_pass.deleter
    root = deleter.root
    hangups: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _frame: hangups.append(number))

    def directories() -> list[Path]:
        return [root.segments, root.ledger, root.routes, *root.route_directories()]

    def may_free_segment(path: Path) -> bool:
        if path.suffix == Kind.RAW.value:  # not the frequent changes of the active segment:
            return not path.exists()  # the sealer removes the raw form last
        names = (CURSORS, "retired", "archive.jsonl")
        return path.name.endswith(CURSOR_SUFFIX) or path.name in names or path.parent == root.routes

    def check_root() -> None:
        try:
            deleter.require_continuity()
        except (OSError, WaldError) as error:
            if isinstance(error, Replaced) and not isinstance(error, Gone):
                raise  # anything else may be temporary, such as an unmounted root; the next pass reports it

    for _ in watch_files(
        directories,
        may_free_segment,
        period_seconds=PERIOD_SECONDS,
        stop=one_pass.stop,
        on_tick=check_root,
        report=report.warn,
    ):
        report.begin()
        try:
            if hangups:
                hangups.clear()
                one_pass.set_settings(reload())
                report.warn("the settings were read again")
            one_pass.run(report, now_ns=time.time_ns())
        except (OSError, WaldError) as error:
            check_root()
            report.failed(str(error))

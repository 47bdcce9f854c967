"""Passes of ``wald-reclaim``: survey, decide, apply and report, once or whenever something may have become free.

Options override the configuration file; 0 means unlimited in both. ``--unread expire`` is a default that routes may
override; ``--unread keep`` overrides every route.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import wald.settings
from wald.cli.output import ignore_stdout
from wald.errors import Damaged, DiskFailure, Gone, InvalidInput, NotPermitted, Replaced, WaldError, wrong_type
from wald.exposition import serving
from wald.files import locks
from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.format.names import CURSOR_SUFFIX, CURSORS, Kind
from wald.hints import command_line, room_commands
from wald.log import Log
from wald.loop import stop_on_signals, watch_files
from wald_reclaim.apply import Deleter, Shrinker, estimate_shrinks
from wald_reclaim.policy import Limits, RouteLimits
from wald_reclaim.report import Report, reclaim_metrics
from wald_reclaim.survey import Survey

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
        raise InvalidInput("--unread expire needs a limit that says when", hint="--max-bytes 10GiB, or --max-age 30d")
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
        """Survey the log and apply the decisions; when stopped, end where the next pass can continue."""
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

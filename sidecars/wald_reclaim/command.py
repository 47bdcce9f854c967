"""``wald-reclaim``: one pass, or one whenever a cursor has moved or a segment was sealed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.entry import run
from wald.cli.options import (
    config_option,
    count_option,
    duration_option,
    json_option,
    metrics_option,
    root_option,
    size_option,
)
from wald.cli.streams import ignore_stdout
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
from wald_reclaim.report import Report, reclaim_metrics
from wald_reclaim.settings import Settings, load_settings
from wald_reclaim.survey import Survey

PERIOD_SECONDS = 15.0  # between two passes without a change
_RESERVE_BYTES = 256 << 10  # of the ledger: on a full disk, deleting must still be recorded first
_CENTURY = 36_600  # days


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wald-reclaim --dry-run", "wald-reclaim --watch --max-bytes 100GiB"),
)
@root_option
@config_option("The daemon's config file: its [retention], and limits of routes. Options override it.")
@click.option(
    "--watch",
    is_flag=True,
    help="Make a pass whenever a cursor moves or a segment is sealed, until SIGTERM, instead of one pass.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@duration_option("--min-age", None, "Keep segments that have been complete for less than this.", days_max=_CENTURY)
@size_option("--keep-bytes", None, "Keep at least this amount, the newest.")
@click.option("--require-archived", is_flag=True, help="Keep records that wald-archive has not put into a bundle.")
@duration_option(
    "--max-age",
    None,
    "Delete older read segments, regardless of --min-age and --keep-bytes; log_max_age in the file. 0: no limit.",
    days_max=_CENTURY,
)
@size_option(
    "--max-bytes",
    None,
    "Delete read segments while the complete ones are more than this; log_max_bytes. 0: no limit.",
)
@count_option("--max-records", count_min=0, hidden=True, help_text="The same in records; log_max_records. 0: no limit.")
@click.option(
    "--unread",
    type=click.Choice(["keep", "expire"]),
    help="expire: delete records beyond a limit even if unread, except of routes with keep. LOSES DATA. "
    "keep: delete no unread record, regardless of the file.  [default: the file, else keep]",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read every frame of a sealed segment before it is deleted; report damage and record it in the ledger. "
    "Without this option, damage after sealing is not noticed.",
)
@duration_option(
    "--grace",
    None,
    "How long a released segment is kept for readers about to open it.  [default: 60s]",
    days_max=366,
    hidden=True,
)
@click.option(
    "--shrink-pinned",
    is_flag=True,
    help="Rewrite a sealed segment that is kept only for its unread records to these, if that frees at least half.",
)
@metrics_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    root: Path,
    config_path: Path | None,
    watch: bool,
    dry_run: bool,
    metrics: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Delete the segments that every consumer group has read.

    A complete segment, sealed or not, is deleted when, for every route that has records in it and is not retired, every
    cursor has reached the route's last record in it. `wald explain` shows which group pins which segments. Each
    deletion is recorded in ledger/reclaim.jsonl before it happens, with the cursors that allowed it. Only one
    wald-reclaim works on a root at a time.
    """
    if watch and dry_run:
        raise InvalidInput("--watch excludes --dry-run", hint="wald-reclaim --help")
    if metrics is not None and not watch:
        raise InvalidInput("--metrics needs --watch", hint=f"--watch --metrics {metrics}")
    given = {
        name: value for name, value in limits.items() if value is not False
    }  # a flag that is absent leaves it to the file
    load = partial(load_settings, config_path, given)
    settings = load()
    log = Log(root)
    report = Report(as_json, is_dry_run=dry_run, watching=watch, write=click.echo, warn=_warn)
    try:
        if dry_run:
            _show(log, settings, report)
        else:
            ignore_stdout()
            with serving(metrics, lambda: reclaim_metrics(report.counts)):
                _work(log, settings, report, reload=load if watch else None)
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or log.root.path) from error
    except BrokenPipeError:  # the reader of a dry run has exited
        raise
    except OSError as error:
        if (misplaced := wrong_type(error)) is not None:
            raise misplaced from error
        raise DiskFailure(
            f"{error.filename or log.root.ledger}: {error.strerror}; nothing is lost, and the next pass continues",
            hint=f"{room_commands(log.root.path, error=error)}; then "
            f"{command_line(log.root.path, program='wald-reclaim')}",
        ) from error


def main() -> None:
    """Run the console script."""
    sys.exit(run(command, "wald-reclaim", sys.argv[1:]))


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
        self._shrink(shrinkable, report, now_ns)
        self.deleter.require_continuity()  # before it reports files of another log as damaged
        report.end(survey.problems)

    def _shrink(self, segments: list[Segment], report: Report, now_ns: int) -> None:
        for segment in segments:
            if self.stop.is_set():
                return
            try:
                shrunk = self._shrinker.shrink(segment, now_ns=now_ns)
            except (Damaged, FileNotFoundError) as error:
                report.problem(str(error))
                continue
            except OSError as error:  # the next pass tries again
                report.problem(f"{segment.path}: {error.strerror}; it is not shrunk, and nothing is lost")
                return
            if shrunk is not None:
                report.shrunk(shrunk)


def _show(log: Log, settings: Settings, report: Report) -> None:
    """Report a dry run."""
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
    """Make one pass, or passes until a signal arrives.

    Args:
        reload: reads the settings again on SIGHUP; None for one pass.
    """
    disk = Disk()
    path = log.root.ledger / "reclaim.jsonl"
    ledger = Ledger(path, disk, owner="wald-reclaim", reserve_bytes=_RESERVE_BYTES)
    try:
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
    finally:
        ledger.close()


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


def _warn(message: str) -> None:
    click.echo(f"wald-reclaim: {message}", err=True)

"""``wald-reclaim``: one pass, or one whenever a cursor has moved or a segment was sealed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import click

import wald
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
from wald_reclaim.apply import Reclaim
from wald_reclaim.counts import Counts, of_reclaim
from wald_reclaim.plan import Planner
from wald_reclaim.report import Report
from wald_reclaim.settings import Settings, settings
from wald_reclaim.shrink import Shrinker, worth

PERIOD_SECONDS = 15.0  # between two passes without a change
_RESERVE_BYTES = 256 << 10  # of the ledger: on a full disk, deleting must still be recorded first
_CENTURY = 36_600  # days


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@root_option
@config_option("The daemon's config file: its [retention], and limits of routes. Options override it.")
@click.option("--once", is_flag=True, help="Make one pass, then exit; the default.")
@click.option("--watch", is_flag=True, help="Make a pass when a cursor moves or a segment is sealed, until SIGTERM.")
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
@count_option("--max-records", count_min=0, help_text="The same in records; log_max_records. 0: no limit.")
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
    "--grace", None, "How long a released segment is kept for readers about to open it.  [default: 60s]", days_max=366
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
    once: bool,
    watch: bool,
    dry_run: bool,
    min_age: float | None,
    keep_bytes: int | None,
    require_archived: bool,
    max_age: float | None,
    max_bytes: int | None,
    max_records: int | None,
    unread: str | None,
    verify: bool,
    grace: float | None,
    shrink_pinned: bool,
    metrics: str | None,
    as_json: bool,
) -> None:
    """Delete the segments that every consumer group has read.

    A complete segment, sealed or not, is deleted when, for every route that has records in it and is not retired, every
    cursor has reached the route's last record in it. `wald explain` shows which group pins which segments. Each
    deletion is recorded in ledger/reclaim.jsonl before it happens, with the cursors that allowed it. Only one
    wald-reclaim works on a root at a time.
    """
    if watch and (once or dry_run):
        raise InvalidInput("--watch excludes --once and --dry-run", hint="wald-reclaim --help")
    if metrics is not None and not watch:
        raise InvalidInput("--metrics needs --watch", hint=f"--watch --metrics {metrics}")
    options = {
        "min_age": min_age,
        "keep_bytes": keep_bytes,
        "require_archived": require_archived or None,
        "max_age": max_age,
        "max_bytes": max_bytes,
        "max_records": max_records,
        "unread": unread,
        "verify": verify or None,
        "grace": grace,
        "shrink_pinned": shrink_pinned or None,
    }

    def in_force() -> Settings:
        return settings(config_path, options)

    wanted = in_force()
    log = Log(root)
    report = Report(as_json, intended=dry_run, watching=watch, write=click.echo, warn=_warn)
    try:
        if dry_run:
            _show(log, wanted, report)
        else:
            ignore_stdout()
            counts = Counts()
            with serving(metrics, lambda: of_reclaim(counts)):
                _work(log, wanted, report, counts, reload=in_force if watch else None)
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
            f"{command_line(log.root.path, '--once', program='wald-reclaim')}",
        ) from error


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-reclaim", sys.argv[1:]))


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass needs. One without a ``shrinker`` looks at no shrink, not at interrupted ones either."""

    reclaim: Reclaim
    grace_ns: int
    stop: threading.Event
    counts: Counts = field(default_factory=Counts)
    shrinker: Shrinker | None = None
    shrink_pinned: bool = False

    def with_settings(self, wanted: Settings) -> Pass:
        """The same with other settings."""
        self.reclaim.planner.take_over(wanted.limits, verify=wanted.verify)
        return replace(
            self,
            grace_ns=wanted.grace_ns,
            shrinker=_shrinker(self.reclaim, wanted),
            shrink_pinned=wanted.shrink_pinned,
        )

    def run(self, report: Report, *, now_ns: int) -> None:
        """Make one pass; when stopped, it ends where the next pass can go on."""
        planner = self.reclaim.planner
        self.reclaim.require()
        if self.shrinker is not None:
            for error in self.shrinker.finish():  # first, as a segment of which two forms are there may go below
                report.trouble(str(error))
        if (witness := planner.witness(now_ns=now_ns)) is not None:
            self.reclaim.record(witness)
        decisions = takewhile(lambda _: not self.stop.is_set(), planner.decisions(now_ns=now_ns))
        pinned: list[Segment] = []
        for decision in self.reclaim.release(decisions, now_ns=now_ns):
            report.decision(decision)
            self.counts.decision(decision)
            if decision.shrinkable:
                pinned.append(decision.segment)
        released = planner.released()
        due = planner.due(released, grace_ns=self.grace_ns)
        for decision in self.reclaim.delete(released, due, now_ns=now_ns):
            is_due = decision.segment.kind is decision.segment.kind.deleting
            report.released(decision, due=is_due)
            self.counts.released(decision, due=is_due)
        if self.shrink_pinned and self.shrinker is not None:
            self._shrink(pinned, self.shrinker, report, now_ns)
        self.reclaim.require()  # before it reports files of another log as wrong
        report.end(planner.troubles)

    def _shrink(self, pinned: list[Segment], shrinker: Shrinker, report: Report, now_ns: int) -> None:
        """Shrink what pays; what cannot be read is left, and without room the next pass tries again."""
        for segment in pinned:
            if self.stop.is_set():
                return
            try:
                shrunk = shrinker.shrink(segment, now_ns=now_ns)
            except (Damaged, FileNotFoundError) as error:
                report.trouble(str(error))
                continue
            except OSError as error:
                report.trouble(f"{segment.path}: {error.strerror}; it is not shrunk, and nothing is lost")
                return
            if shrunk is not None:
                self.counts.add_shrunk(shrunk)
                report.shrunk(shrunk)


def _shrinker(reclaim: Reclaim, wanted: Settings) -> Shrinker:
    """What shrinks segments, if that is wanted; what an interrupted shrink has left it clears away in any case."""
    return Shrinker(
        reclaim.root,
        reclaim.disk,
        reclaim.planner.log_id,
        reclaim.record,
        reclaim.planner.changed,
        require_archived=wanted.limits.require_archived,
    )


def _show(log: Log, wanted: Settings, report: Report) -> None:
    """Report what a pass would do."""
    planner = Planner(log.root, wanted.limits, log_id=log.identity.log_id, verify=wanted.verify)
    now_ns = time.time_ns()
    pinned: list[Segment] = []
    for decision in planner.decisions(now_ns=now_ns):
        report.decision(decision)
        if decision.verdict.goes and not wanted.grace_ns:  # released and deleted by the same pass
            report.released(replace(decision, message=""), due=True)
        if decision.shrinkable and wanted.shrink_pinned:
            pinned.append(decision.segment)
    for shrunk in worth(log, pinned, require_archived=wanted.limits.require_archived):
        report.shrunk(shrunk)
    released = planner.released()
    due = {segment.base_sequence for segment in planner.due(released, grace_ns=wanted.grace_ns)}
    for decision in planner.confirm(released, now_ns=now_ns):
        report.released(decision, due=decision.segment.base_sequence in due)
    report.end(planner.troubles)


def _work(log: Log, wanted: Settings, report: Report, counts: Counts, *, reload: Callable[[], Settings] | None) -> None:
    """Make one pass, or passes until a signal arrives.

    Args:
        reload: returns the settings anew, when SIGHUP asks for that; None: only one pass is made.
    """
    disk = Disk()
    path = log.root.ledger / "reclaim.jsonl"
    ledger = Ledger(path, disk, owner="wald-reclaim", reserve_bytes=_RESERVE_BYTES)
    try:
        locks.remove_leftovers(locks.leftovers(log.root, disk), disk)
        ledger.cut()  # one from before this program may be long
        # After the lock of the ledger is taken: before that, another process may write what the planner reads.
        planner = Planner(log.root, wanted.limits, log_id=log.identity.log_id, verify=wanted.verify)
        with stop_on_signals() as stop:
            reclaim = Reclaim(log.root, disk, ledger, planner, log.require_continuity)
            one_pass = Pass(reclaim, wanted.grace_ns, stop, counts, _shrinker(reclaim, wanted), wanted.shrink_pinned)
            if reload is None:
                one_pass.run(report, now_ns=time.time_ns())
            else:
                _watch(one_pass, report, reload)
    finally:
        ledger.close()


def _watch(one_pass: Pass, report: Report, reload: Callable[[], Settings]) -> None:
    """Make passes until a signal arrives; an error is reported, and the next pass tries again.

    Raises:
        Replaced: the root has another log or an older copy; the open ledger does not belong to its segments.
    """
    root = one_pass.reclaim.root
    hangups: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _frame: hangups.append(number))

    def directories() -> list[Path]:
        return [root.segments, root.ledger, root.routes, *root.route_directories()]

    def matters(path: Path) -> bool:
        return _matters(path) or path.name == CURSORS or path.parent == root.routes

    def look() -> None:
        try:
            one_pass.reclaim.require()
        except (OSError, WaldError) as error:
            if isinstance(error, Replaced) and not isinstance(error, Gone):
                raise  # anything else may pass, such as an unmounted root; the next pass reports it

    for _ in watch_files(
        directories, matters, period_seconds=PERIOD_SECONDS, stop=one_pass.stop, on_tick=look, report=report.warn
    ):
        began = time.monotonic()
        report.begin()
        one_pass.counts.begin()
        try:
            if hangups:
                hangups.clear()
                one_pass = one_pass.with_settings(reload())
                report.warn("the settings were read again")
            one_pass.run(report, now_ns=time.time_ns())
        except (OSError, WaldError) as error:
            look()
            one_pass.counts.failed += 1
            report.trouble(str(error))
        else:
            one_pass.counts.end(time.monotonic() - began, now_ns=time.time_ns())


def _matters(path: Path) -> bool:
    """Whether a change of ``path`` may free a segment; the frequent changes of the active segment do not."""
    if path.suffix == Kind.RAW.value:
        return not path.exists()  # sealed: the sealer removes the raw form last
    return path.name.endswith(CURSOR_SUFFIX) or path.name in ("retired", "archive.jsonl")


def _warn(message: str) -> None:
    click.echo(f"wald-reclaim: {message}", err=True)

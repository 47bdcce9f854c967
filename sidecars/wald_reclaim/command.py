"""``wald-reclaim``: once, or whenever a cursor has moved or a segment was sealed."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import duration_option, json_option, root_option, size_option
from wald.errors import DiskFailure, InvalidInput, NotPermitted, WaldError, command_line
from wald.format.names import CURSOR_SUFFIX, Kind
from wald.log import Log
from wald.loop import stop_on_signals, wakes
from wald.store.files.disk import Disk
from wald.store.files.ledger import Ledger
from wald_reclaim.apply import Reclaim
from wald_reclaim.plan import Planner
from wald_reclaim.policy import Limits
from wald_reclaim.report import Report

PERIOD_SECONDS = 15.0  # between two looks that nothing has asked for
_RESERVE_BYTES = 64 << 10  # on a full disk, room is made by whoever can still write that it will be
_CENTURY = 36_600  # days


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@root_option
@click.option("--once", is_flag=True, help="One look, then end; the default.")
@click.option("--watch", is_flag=True, help="Look again when a cursor moves or a segment is sealed, until SIGTERM.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@duration_option("--min-age", None, "Keep what has been complete for less than this.", days_max=_CENTURY)
@size_option("--keep-bytes", None, "Keep at least so much, the newest.")
@click.option("--require-archived", is_flag=True, help="Keep what wald-archive has not put into a bundle.")
@duration_option(
    "--max-age", None, "What was read goes when older, whatever --min-age and --keep-bytes say.", days_max=_CENTURY
)
@size_option("--max-bytes", None, "What was read goes when the complete segments are more than this.")
@click.option("--max-records", type=click.IntRange(min=0), metavar="N", help="The same, counting their records.")
@click.option(
    "--unread",
    type=click.Choice(["keep", "expire"]),
    default="keep",
    show_default=True,
    help="expire: what is beyond --max-age, --max-bytes or --max-records goes even if nobody has read it. LOSES DATA.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read every frame of a sealed segment before it goes, and tell of damage, in the ledger too. Without it, what "
    "was damaged after sealing goes unnoticed.",
)
@duration_option("--grace", "60s", "How long a reclaimed segment stays, for readers about to open it.", days_max=366)
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    root: Path,
    once: bool,
    watch: bool,
    dry_run: bool,
    min_age: float | None,
    keep_bytes: int | None,
    require_archived: bool,
    max_age: float | None,
    max_bytes: int | None,
    max_records: int | None,
    unread: str,
    verify: bool,
    grace: float,
    as_json: bool,
) -> None:
    """Delete the segments that everybody has read.

    A complete segment, sealed or not, goes when, for every route that has records in it and is not retired, every
    cursor has reached the route's last record in it. `wald explain` says who holds back what. Each deletion is in
    ledger/reclaim.jsonl before it happens, with the cursors that made it legal. One wald-reclaim works on a root at a
    time.
    """
    if watch and (once or dry_run):
        raise InvalidInput("--watch excludes --once and --dry-run", hint="wald-reclaim --help")
    limits = Limits(
        min_age_ns=None if min_age is None else _nanoseconds(min_age),
        keep_bytes=keep_bytes,
        require_archived=require_archived,
        max_age_ns=None if max_age is None else _nanoseconds(max_age),
        max_bytes=max_bytes,
        max_records=max_records,
        expire=unread == "expire",
    )
    if limits.expire and max_age is None and max_bytes is None and max_records is None:
        raise InvalidInput("--unread expire needs a limit that says when", hint="--max-bytes 10GiB, or --max-age 30d")
    log = Log(root)
    report = Report(as_json, intended=dry_run, watching=watch)
    try:
        if dry_run:
            _tell(log, limits, report, _nanoseconds(grace), verify=verify)
        else:
            _work(log, limits, report, _nanoseconds(grace), watch=watch, verify=verify)
    except PermissionError as error:
        raise NotPermitted.of(error, error.filename or log.root.path) from error
    except BrokenPipeError:  # who reads what is said has left
        raise
    except OSError as error:
        raise DiskFailure(
            f"{error.filename or log.root.ledger}: {error.strerror}; nothing is lost, and the next look goes on",
            hint=f"df -h {log.root.path}; then {command_line(log.root.path, '--once', program='wald-reclaim')}",
        ) from error


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-reclaim", sys.argv[1:]))


@dataclass(frozen=True, slots=True)
class Work:
    """What a look needs."""

    reclaim: Reclaim
    grace_ns: int
    stop: threading.Event

    def look(self, report: Report, *, now_ns: int) -> None:
        """Look once, and carry out what follows; stopped, it ends where the next look can go on."""
        planner = self.reclaim.planner
        if (witness := planner.witness(now_ns=now_ns)) is not None:
            self.reclaim.tell(witness)
        decisions = takewhile(lambda _: not self.stop.is_set(), planner.decisions(now_ns=now_ns))
        for decision in self.reclaim.release(decisions):
            report.decision(decision)
        released = planner.released()
        waited = planner.waited(released, grace_ns=self.grace_ns)
        for decision in self.reclaim.delete(released, waited, now_ns=now_ns):
            report.released(decision, due=decision.segment.kind is decision.segment.kind.deleting)
        report.end(planner.troubles)


def _tell(log: Log, limits: Limits, report: Report, grace_ns: int, *, verify: bool) -> None:
    """What a look would do."""
    planner = Planner(log.root, limits, log_id=log.identity.log_id, verify=verify)
    now_ns = time.time_ns()
    for decision in planner.decisions(now_ns=now_ns):
        report.decision(decision)
    released = planner.released()
    waited = {segment.base_sequence for segment in planner.waited(released, grace_ns=grace_ns)}
    for decision in planner.again(released, now_ns=now_ns):
        report.released(decision, due=decision.segment.base_sequence in waited)
    report.end(planner.troubles)


def _work(log: Log, limits: Limits, report: Report, grace_ns: int, *, watch: bool, verify: bool) -> None:
    """Look and carry out, once or until a signal comes."""
    disk = Disk()
    path = log.root.ledger / "reclaim.jsonl"
    ledger = Ledger(path, disk, owner="wald-reclaim", reserve_bytes=_RESERVE_BYTES)
    try:
        # Not before the ledger is ours: until then another one may be writing what the planner reads in it.
        planner = Planner(log.root, limits, log_id=log.identity.log_id, verify=verify)
        with stop_on_signals() as stop:
            work = Work(Reclaim(log.root, disk, ledger, planner), grace_ns, stop)
            if watch:
                _watch(work, report)
            else:
                work.look(report, now_ns=time.time_ns())
    finally:
        ledger.close()


def _watch(work: Work, report: Report) -> None:
    """Look until a signal comes; what goes wrong is told, and tried again at the next look."""
    root = work.reclaim.root
    directories = (root.routes, root.segments, root.ledger)
    for _ in wakes(directories, _matters, period_seconds=PERIOD_SECONDS, stop=work.stop):
        try:
            work.look(report, now_ns=time.time_ns())
        except BrokenPipeError:
            raise
        except (OSError, WaldError) as error:
            report.trouble(str(error))


def _matters(path: Path) -> bool:
    """Whether a change of ``path`` may free something; the active segment's, which come all the time, do not."""
    if path.suffix == Kind.RAW.value:
        return not path.exists()  # sealed: the sealer removes the raw form last
    return path.name.endswith(CURSOR_SUFFIX) or path.name in ("retired", "archive.jsonl")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

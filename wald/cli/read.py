"""``wald read``: records to stdout, whole chunks at a time, and the cursor after stdout took them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

import wald
from wald.cli.options import GROUP_HELP, count_option, root_option
from wald.cli.read_output import Output
from wald.cli.read_range import Asked, Range, of_latest
from wald.cli.times import warn_of_wrong_times
from wald.errors import Damaged, Partial, WaldError
from wald.format.names import DEFAULT_GROUP, check_group, check_route

if TYPE_CHECKING:
    from wald.log import Log
    from wald.reading.assembler import Batch
    from wald.retention.missing import Missing

COMMIT_SECONDS = 0.2  # between two moves of the cursor, because each is two syncs


@click.command()
@click.argument("route", required=False)
@root_option
@click.option("--from", "start", metavar="POSITION", help="earliest, end, cursor, a sequence, or a time.")
@click.option("--to", "stop", metavar="POSITION", help="The last sequence, or a time, which ends before it.")
@click.option("--since", metavar="TIME", help="Records appended then or later: 5m, 14:00, yesterday, 2026-11-21.")
@click.option("--until", metavar="TIME", help="Records appended before then.")
@count_option("-n", "--last", "count", count_min=0, help_text="Only the last N of them.")
@count_option("--limit", count_min=0, help_text="Only the first N of them.")
@click.option("--grep", metavar="REGEX", help="Only records in which the regular expression is found.")
@click.option("-f", "--follow", is_flag=True, help="At the end, wait for more records.")
@click.option("--group", help=GROUP_HELP)
@click.option("--commit", is_flag=True, help="Move the group's cursor after the records were written to stdout.")
@click.option(
    "--on-missing",
    type=click.Choice(["error", "skip"]),
    help="What to do about reclaimed records; without it: an error if --from names a sequence or a time.",
)
@click.option("--times", is_flag=True, help="Print the append time before each record.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="json: one object per line.",
)
def read(root: Path, route: str | None, on_missing: str | None, **options: Any) -> int:  # Any: those of Asked
    """Write the records of ROUTE, or of every route, to stdout; raw: each record as it came, and a newline.

    Without --from, reading starts at the earliest record; with --group or --commit, after the group's cursor. A time
    (2026-11-21T10:00:00Z, 14:00, yesterday, 5m) is compared with the append time of records. `wald read R -n 20 -f`
    shows the last 20 records and then new ones.

    Damaged records are reported and skipped, and the exit code is 4; with --commit, reading ends there, with the cursor
    before them. If records were reclaimed, and --from names a sequence or a time, or the cursor is before them, reading
    ends with exit code 3; otherwise it continues, and the exit code is 12. --on-missing error always ends it;
    --on-missing skip skips missing records with exit code 0.
    """
    from wald.reading.assembler import Senders

    asked = Asked(root, route if route is None else check_route(route), **options)
    asked.check()
    log = wald.open(root)
    wanted = Range(*asked.range())
    warn_of_wrong_times(root, wanted.start, wanted.stop)
    matcher = None
    if asked.grep is not None:
        from wald.cli.patterns import matcher_of

        matcher = matcher_of(root, asked.grep)
    if asked.count is not None:
        latest = of_latest(log, wanted, route, asked.count, matcher=matcher)
        if latest is None:
            return 0
        wanted = latest
    damage, missing = _Damage(), _MissingRecords(on_missing, asked)
    if asked.group and wanted.start == "cursor" and not asked.commit and route is not None:
        _report_absent(log, route, asked.group)
    group = check_group(asked.group or DEFAULT_GROUP)
    if asked.commit and route is not None:
        _succeed_workers(log, route, group)
    batches = log.batches(
        route,
        wanted.start,
        wanted.stop,
        group=group,
        limit=None if matcher else asked.limit,
        follow=asked.follow,
        on_damage=None if asked.commit else damage.report,  # a cursor after damage lets RECLAIM delete it
        on_missing=missing.handle,
    )
    with closing(Senders(log.view)) as senders:
        output = Output(
            senders if asked.form == "json" else None,
            times=asked.times,
            matcher=matcher,
            limit=asked.limit if matcher else None,
        )
        if asked.commit and route is not None:
            _write_and_commit(log, route, group, batches, output)
        else:
            _write(batches, output)
    if damage.found:
        return Damaged.exit_code
    return Partial.exit_code if missing.partial else 0


def _write(batches: Iterable[Batch], output: Output, commits: _Commits | None = None) -> None:
    remaining = iter(batches)
    while not output.full and (batch := next(remaining, None)):
        done = output.write(batch)
        if commits is not None:
            commits.processed = done


def _report_absent(log: Log, route: str, group: str) -> None:
    """Report that the group has no cursor: its name may be misspelt."""
    from wald.retention.cursors import CursorState

    if log.cursor(route, group).state is CursorState.ABSENT:
        click.echo(f"wald: group {group} has no cursor on route {route}: reading begins at the oldest record", err=True)


def _succeed_workers(log: Log, route: str, group: str) -> None:
    """Take the place of the workers of a work group, if nothing would be read again that they have processed."""
    if log.cursor(route, group).of_work_group:
        from wald.work.ownership import succeed_workers

        succeed_workers(log, route, group)


def _write_and_commit(log: Log, route: str, group: str, batches: Iterable[Batch], output: Output) -> None:
    from wald.retention.cursors import new_group_warning

    if news := new_group_warning(log.root, route, group):
        click.echo(f"wald: {news}", err=True)
    with _Commits(log, route, group) as commits:
        _write(batches, output, commits)


@dataclass(slots=True)
class _Damage:
    """Reports damaged records on stderr."""

    found: bool = False

    def report(self, error: Damaged) -> None:
        self.found = True
        click.echo(f"wald: {error.message}\n  hint: {error.hint}", err=True)


@dataclass(slots=True)
class _MissingRecords:
    """What to do about records that were reclaimed: an error, or a message on stderr.

    Attributes:
        asked: the options of the command, for the hint. With -n, no start was named.
        partial: whether records were passed over although --on-missing was not given.
    """

    on_missing: str | None
    asked: Asked
    partial: bool = False

    def handle(self, missing: Missing) -> None:
        form = "" if self.asked.form == "raw" else f" --format {self.asked.form}"
        before, behind = f"read {missing.route or ''}".rstrip(), self.asked.again() + form
        stop = self.asked.until or self.asked.stop
        error = missing.error(stop=stop, form=form, command=(before, behind))
        named = missing.asked and self.asked.count is None
        if self.on_missing == "error" or (self.on_missing is None and named):
            raise error
        self.partial = self.partial or self.on_missing is None
        click.echo(f"wald: {error.message}\n  hint: {error.hint}", err=True)


class _Commits:
    """Moves a cursor to :attr:`processed` at intervals and at the end; while following, also when no record arrives.

    The cursor never moves backwards: records that are read again stay processed.
    """

    def __init__(self, log: Log, route: str, group: str) -> None:
        self._log, self._route, self._group = log, route, group
        self._committed = self.processed = log.cursor(route, group).effective
        self._stopped = threading.Event()
        self._failure: WaldError | OSError | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure
        self._commit()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(COMMIT_SECONDS):
                self._commit()
        except (WaldError, OSError) as error:
            self._failure = error

    def _commit(self) -> None:
        processed = self.processed
        if processed > self._committed:
            self._log.set_cursor(self._route, processed, self._group)
            self._committed = processed

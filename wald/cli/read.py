"""``wald read``: records to stdout, whole chunks at a time, and the cursor after stdout took them."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

import click

import wald
from wald.cli.options import GROUP_HELP, root_option
from wald.cli.output import write_stdout
from wald.cli.times import position
from wald.errors import Damaged, InvalidInput, Partial, WaldError, command_line
from wald.format.names import DEFAULT_GROUP, check_group, check_route
from wald.format.times import nanoseconds
from wald.store.reading.selection import Named, Start
from wald.store.retention.cursors import CursorState, newcomer
from wald.store.retention.missing import POLICIES

if TYPE_CHECKING:
    from wald.log import Log
    from wald.store.reading.batches import Batch
    from wald.store.retention.missing import Missing

COMMIT_SECONDS = 0.2  # between two moves of the cursor, because each is two syncs
_JSON_BYTES = 256 << 10  # written at once
_NAMED: dict[str, Named] = {name: name for name in get_args(Named)}


@click.command()
@click.argument("route", required=False)
@root_option
@click.option("--from", "start", metavar="POSITION", help="earliest, end, cursor, a sequence, or a time.")
@click.option("--to", "stop", metavar="POSITION", help="The last sequence, or a time, which ends before it.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most so many records.")
@click.option("--follow", is_flag=True, help="At the end, wait for more records.")
@click.option("--group", help=GROUP_HELP)
@click.option("--commit", is_flag=True, help="Move the group's cursor after the records were written to stdout.")
@click.option(
    "--on-missing",
    type=click.Choice(POLICIES),
    help="What to do about reclaimed records; without it: an error if --from names a sequence or a time.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="json: one object per line.",
)
def read(
    root: Path,
    route: str | None,
    start: str | None,
    stop: str | None,
    limit: int | None,
    follow: bool,
    group: str | None,
    commit: bool,
    on_missing: str | None,
    form: str,
) -> int:
    """Write the records of ROUTE, or of every route, to stdout; raw: each record as it came, and a newline.

    Without --from, reading starts at the earliest record; with --group or --commit, after the group's cursor. A time
    (2026-11-21T10:00:00Z, 14:00, yesterday, 5m) is compared with the append time of records.

    Damaged records are reported, reading goes on, and the exit code is 4; with --commit, reading ends there, with the
    cursor before them. If records were reclaimed, and --from names a sequence or a time, or the cursor is before them,
    reading ends with exit code 3; otherwise it goes on, and the exit code is 12. --on-missing error always ends it;
    --on-missing skip passes over missing records with exit code 0.
    """
    if route is not None:
        check_route(route)
    if commit and route is None:
        raise InvalidInput(
            "--commit needs a ROUTE: a cursor belongs to one", hint=f"{command_line(root, 'routes')} lists them"
        )
    log = wald.open(root)
    if start is None:
        start = "cursor" if group or commit else "earliest"
    begin, end = _range(start, stop)
    damage = _Damage()
    missing = _MissingRecords(on_missing, stop, _again(group, limit=limit, follow=follow, commit=commit), form)
    if group and start == "cursor" and not commit and route is not None:
        _report_absent(log, route, group)
    group = check_group(group or DEFAULT_GROUP)
    batches = log.batches(
        route,
        begin,
        end,
        group=group,
        limit=limit,
        follow=follow,
        on_damage=None if commit else damage.report,  # a cursor after damage lets RECLAIM delete it
        on_missing=missing.handle,
    )
    write = _write_raw if form == "raw" else _write_json
    if commit and route is not None:
        _write_and_commit(log, route, group, batches, write)
    else:
        for batch in batches:
            write(batch)
    if damage.found:
        return Damaged.exit_code
    return Partial.exit_code if missing.partial else 0


def _report_absent(log: Log, route: str, group: str) -> None:
    """Report that the group has no cursor: its name may be misspelt."""
    if log.cursor(route, group).state is CursorState.ABSENT:
        click.echo(f"wald: group {group} has no cursor on route {route}: reading begins at the oldest record", err=True)


def _write_and_commit(
    log: Log, route: str, group: str, batches: Iterable[Batch], write: Callable[[Batch], None]
) -> None:
    if news := newcomer(log.root, route, group):
        click.echo(f"wald: {news}", err=True)
    with _Commits(log, route, group) as commits:
        for batch in batches:
            write(batch)
            commits.processed = batch.last_sequence


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
        stop, options: of the command, for the hint.
        partial: whether records were passed over although --on-missing was not given.
    """

    on_missing: str | None
    stop: str | None
    options: str
    form: str
    partial: bool = False

    def handle(self, missing: Missing) -> None:
        form = "" if self.form == "raw" else f" --format {self.form}"
        hint = missing.hint(stop=self.stop, options=self.options, form=form)
        if self.on_missing == "error" or (self.on_missing is None and missing.asked):
            raise missing.error(hint)
        self.partial = self.partial or self.on_missing is None
        click.echo(f"wald: {missing.message()}\n  hint: {hint}", err=True)


def _again(group: str | None, *, limit: int | None, follow: bool, commit: bool) -> str:
    """The options, to type again; --commit moves the same group's cursor."""
    values = [f" --limit {limit}" if limit is not None else "", f" --group {shlex.quote(group)}" if group else ""]
    return "".join([*values, " --follow" * follow, " --commit" * commit])


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


def _write_raw(batch: Batch) -> None:
    write_stdout(batch.raw())


def _write_json(batch: Batch) -> None:
    lines: list[str] = []
    size = 0
    for record in batch.records():
        lines.append(record.to_json())
        size += len(lines[-1])
        if size > _JSON_BYTES:
            write_stdout(("\n".join(lines) + "\n").encode())
            lines, size = [], 0
    if lines:
        write_stdout(("\n".join(lines) + "\n").encode())


def _range(start: str, stop: str | None) -> tuple[Start, int | datetime | None]:
    """The positions of --from and --to.

    Raises:
        InvalidInput: one of them is none, or no record can lie between them.
    """
    begin: Start = _NAMED[start] if start in _NAMED else position("--from", start, _NAMED)
    end = None if stop is None else position("--to", stop)
    match begin, end:
        case (int(), int()):
            empty = begin > end
        case (datetime(), datetime()):
            empty = nanoseconds(begin) > nanoseconds(end)
        case _:
            empty = False
    if empty:
        raise InvalidInput(
            f"--from {start} --to {stop}: the end is before the start", hint=f"--from {stop} --to {start}"
        )
    return begin, end

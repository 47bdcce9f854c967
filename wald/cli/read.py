"""``wald read``: records to stdout, whole chunks at a time, and the cursor after stdout took them."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

import click

import wald
from wald.cli.options import GROUP_HELP, root_option
from wald.cli.output import write_stdout
from wald.errors import Damaged, InvalidInput, Partial, WaldError, command_line
from wald.format.names import DEFAULT_GROUP, check_group, check_route
from wald.format.times import nanoseconds
from wald.store.reading.reader import Named, Start
from wald.store.retention.cursors import newcomer
from wald.store.retention.missing import POLICIES

if TYPE_CHECKING:
    from wald.log import Log
    from wald.store.reading.batches import Batch
    from wald.store.retention.missing import Missing

COMMIT_SECONDS = 0.2  # how far a cursor may lag behind what stdout took: each commit is two syncs
_JSON_BYTES = 256 << 10  # written at once
_NAMED: dict[str, Named] = {name: name for name in get_args(Named)}


@click.command()
@click.argument("route", required=False)
@root_option
@click.option("--from", "start", metavar="PLACE", help="earliest, end, cursor, a sequence, or a time.")
@click.option("--to", "stop", metavar="PLACE", help="The last sequence, or a time before which records are wanted.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most so many records.")
@click.option("--follow", is_flag=True, help="Wait for more at the end.")
@click.option("--group", help=GROUP_HELP)
@click.option("--commit", is_flag=True, help="Move the group's cursor once stdout took the records.")
@click.option(
    "--on-missing",
    type=click.Choice(POLICIES),
    help="What about records that were reclaimed; without it: an error if --from names a place.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="json: an object a line.",
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
    """Write the records of ROUTE, or of every route, to stdout; raw: each and a newline, exactly as they came.

    Without --from it begins at the earliest record there is; with --group or --commit, after the group's cursor. Times
    are like 2026-11-21T10:00:00Z, local without a zone, and mean when the daemon took a record.

    Where bytes are damaged it says so, reads on, and the exit code is 4; with --commit it ends there, and the cursor
    stays in front of them. Where wanted records were reclaimed it ends with exit code 3 if --from names a sequence or a
    time, or the cursor is in front of them; else it says so, and the exit code is 12. --on-missing error ends it in any
    case, skip passes over them with exit code 0.
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
    begin = _place("--from", start)
    damaged: list[Damaged] = []

    def tell(error: Damaged) -> None:
        damaged.append(error)
        print(f"wald: {error.message}\n  hint: {error.hint}", file=sys.stderr)

    told = _Told(on_missing, stop, _again(limit=limit, follow=follow, commit=commit), form)
    group = check_group(group or DEFAULT_GROUP)
    end = None if stop is None else _place("--to", stop)
    if isinstance(end, str):
        raise InvalidInput(f"--to {end}: not a sequence or a time", hint="--to 250, or --to 2026-11-21T10:00:00Z")
    _require_order(begin, end, (start, stop or ""))
    batches = log.batches(
        route,
        begin,
        end,
        group=group,
        limit=limit,
        follow=follow,
        on_damage=None if commit else tell,  # a cursor behind damage would let RECLAIM delete what might be mended
        on_missing=told.meet,
    )
    write = _write_raw if form == "raw" else _write_json
    if not commit:
        for batch in batches:
            write(batch)
    else:
        assert route is not None
        if news := newcomer(log.root, route, group):
            click.echo(f"wald: {news}", err=True)
        with _Commits(log, route, group) as commits:
            for batch in batches:
                write(batch)
                commits.processed = batch.last_sequence
    if damaged:
        return Damaged.exit_code
    return Partial.exit_code if told.partial else 0


@dataclass(slots=True)
class _Told:
    """What becomes of records that are missing because they were reclaimed.

    Attributes:
        stop, options: of the command, for the hint.
        partial: whether some were passed over without the operator's word.
    """

    on_missing: str | None
    stop: str | None
    options: str
    form: str
    partial: bool = False

    def meet(self, missing: Missing) -> None:
        form = "" if self.form == "raw" else f" --format {self.form}"
        hint = missing.hint(stop=self.stop, options=self.options, form=form)
        if self.on_missing == "error" or (self.on_missing is None and missing.asked):
            raise missing.error(hint)
        self.partial = self.partial or self.on_missing is None
        print(f"wald: {missing.message()}\n  hint: {hint}", file=sys.stderr)


def _again(*, limit: int | None, follow: bool, commit: bool) -> str:
    """The options, to be given again."""
    words = [f" --limit {limit}" if limit is not None else "", " --follow" * follow, " --commit" * commit]
    return "".join(words)


class _Commits:
    """Moves a cursor behind :attr:`processed`, now and then and at the end; while following, also when nothing comes.

    The cursor never moves backwards: records that are read once more stay processed.
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


def _require_order(begin: int | str | datetime, end: int | datetime | None, words: tuple[str, str]) -> None:
    """
    Raises:
        InvalidInput: nothing can lie between two places of one kind.
    """
    match begin, end:
        case (int(), int()):
            empty = begin > end
        case (datetime(), datetime()):
            empty = nanoseconds(begin) > nanoseconds(end)
        case _:
            return
    if empty:
        first, last = words
        raise InvalidInput(
            f"--from {first} --to {last}: the end is in front of the beginning", hint=f"--from {last} --to {first}"
        )


def _place(option: str, words: str) -> Start:
    if words in _NAMED:
        return _NAMED[words]
    if words.isdecimal() and words.isascii():
        return int(words)
    try:
        return datetime.fromisoformat(words)
    except ValueError:
        raise InvalidInput(
            f"{option} {words}: neither a sequence nor a time", hint=f"{option} 250, or {option} 2026-11-21T10:00:00Z"
        ) from None

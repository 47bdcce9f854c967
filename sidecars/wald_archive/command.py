"""``wald-archive``: pack routes into bundles, verify an archive, restore records from one."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

import wald
from wald.checking.checker import Level
from wald.cli.command import examples
from wald.cli.entry import run
from wald.cli.options import (
    DefaultGroup,
    SequenceNumber,
    count_option,
    group_option,
    json_option,
    root_option,
    size_option,
)
from wald.cli.output import json_line, progress
from wald.cli.streams import stdout_is_a_report, write_stdout
from wald.errors import Damaged, DiskFailure, InvalidInput, NotFound, NotPermitted, wrong_type
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import entries_of, read_files, readable_entries
from wald.files.ledger_write import Ledger
from wald.format.names import check_route
from wald.format.times import utc
from wald.hints import command_line, room_commands
from wald.log import Log
from wald.retention.missing import span_text
from wald.setting_types import MIB, format_bytes
from wald.status.schema import time_fields
from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec
from wald_archive.engines import AUTO, LOCAL, SPARK, choose_engine
from wald_archive.ledger import Recorded, Request, Run, recorded_at
from wald_archive.objects import Destination, open_destination
from wald_archive.pack import Packed, Packer
from wald_archive.parts import Bytes, Records, Size
from wald_archive.restore import Outcome, end_of, extent_of, restore_into
from wald_archive.restore import restore as restored
from wald_archive.verify import Finding, bundle_bytes
from wald_archive.verify import verify as findings_of

BUNDLE_BYTES = 256 * MIB


@click.group(
    cls=DefaultGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="ROUTE... | COMMAND [ARGS]...",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, readable=False),
    help="The directory of the log.  [env of pack: WALD_ROOT]",
)
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(ctx: click.Context, root: Path | None) -> None:
    """Pack routes into bundles that tar and sha256sum can check; prove an archive; get records out of one.

    `wald-archive ROUTE...` is short for `wald-archive pack ROUTE...`, see `wald-archive pack --help`.
    """
    ctx.obj = root


@command.command(
    epilog=examples("wald-archive access --dest /srv/archive", "wald-archive pack access orders --codec gz")
)
@click.argument("routes", nargs=-1, required=True, metavar="ROUTE...")
@root_option
@click.option(
    "--dest",
    envvar="ARCHIVE_DEST",
    show_envvar=True,
    metavar="DIR|URL",
    help="Destination of the bags.  [default: ROOT/archive]",
)
@group_option
@count_option("--records-per-bundle", help_text="Number of records in each bundle.")
@size_option("--bytes-per-bundle", None, "Maximum size of the records in a bundle.  [default: 256MiB]")
@click.option(
    "--to", type=SequenceNumber(), metavar="SEQ", help="Last record to pack; later ones are left for another run."
)
@click.option(
    "--engine",
    type=click.Choice([AUTO, LOCAL, SPARK]),
    default=AUTO,
    show_default=True,
    help="Program that makes the bundles, which are the same either way. auto: Spark with --master, or if it and its "
    "Java are installed, there are more than 4 cores, and more than about 8 GiB to pack; otherwise this process.",
)
@click.option("--master", metavar="URL", help="Cluster for Spark.  [default: local[*], this machine]")
@click.option(
    "--codec",
    type=click.Choice([codec.value for codec in Codec]),
    default=Codec.ZST.value,
    show_default=True,
    help="Compression of the bundles.",
)
@json_option
@stdout_is_a_report
def pack(
    root: Path,
    routes: tuple[str, ...],
    dest: str | None,
    group: str,
    records_per_bundle: int | None,
    bytes_per_bundle: int | None,
    to: int | None,
    engine: str,
    master: str | None,
    codec: str,
    as_json: bool,
) -> None:
    """Archive all records of each ROUTE that the group has not processed, then move its cursor.

    Each run makes a BagIt bag at DEST/ROUTE/FIRST-LAST: bundles, each a tar of records with a file of its sha256, and a
    manifest. Everything is read back before the cursor moves. An interrupted run is finished first, with its own sizes
    and codec. Nothing at the destination is ever overwritten.
    """
    for route in routes:
        check_route(route)
    log = Log(root)
    size = _size(records_per_bundle, bytes_per_bundle)
    destination = open_destination(dest or str(log.root.archive), Disk())
    path = log.root.ledger / "archive.jsonl"
    requests = [
        Request(route, group, size, Codec(codec), f"wald {wald.__version__}", to) for route in dict.fromkeys(routes)
    ]
    with _disk_failures(root, destination), ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(path, Disk(), owner="wald-archive")))
        report = stack.enter_context(PackReport(as_json, write=click.echo, warn=_warn))
        packer = Packer(
            log,
            Disk(),
            ledger,
            destination,
            choose_engine(engine, master, log, destination, requests, stack),
            now_ns=time.time_ns,
            moment=_moment,
            on_begin=report.begin,
            on_abandon=report.abandoned,
            on_reclaimed=_warn,
            on_record=report.record,
        )
        for request in requests:
            report.route(request, packer.archive(request))


@command.command(
    epilog=examples("wald-archive verify /srv/archive", "wald-archive verify /srv/archive --root /var/lib/wald")
)
@click.argument("destinations", nargs=-1, required=True, metavar="DEST...")
@click.option(
    "--root",
    type=click.Path(path_type=Path, readable=False),
    help="A log whose ledger lists the expected bundles. An archive needs no log, so WALD_ROOT is not used.",
)
@json_option
@click.pass_context
def verify(ctx: click.Context, destinations: tuple[str, ...], root: Path | None, as_json: bool) -> int:
    """Read every byte at each DEST, verify it against the manifests, and change nothing.

    Several DESTs are verified together: a bundle may follow one at another DEST. With --root, every bundle that the
    log's ledger records must be there, too. One line for each finding; the exit code is 4 if anything is wrong.
    """
    root = root or ctx.find_object(Path)
    archives = [open_destination(address, Disk()) for address in destinations]
    recorded = [Recorded() for _ in archives]
    report = ProofReport(as_json, click.echo)
    if root is not None:
        read_identity(Root(root))
        path = Root(root).ledger / "archive.jsonl"
        for file, decoded in read_files(path):
            for number, reason in decoded.broken_lines:
                report.finding(Finding(Level.ERROR, str(file), "", "", f"line {number}: {reason}"))
        recorded = [recorded_at(readable_entries(path), archive.address) for archive in archives]
    with progress("verify", sum(map(bundle_bytes, archives))) as advance:
        for finding in findings_of(archives, recorded, on_bytes=advance):
            report.finding(finding)
    report.end()
    return Damaged.exit_code if report.counts[Level.ERROR] else 0


@command.command(
    epilog=examples(
        "wald-archive restore /srv/archive access --from 250", "wald-archive restore /srv/archive --into ./restored"
    )
)
@click.argument("address", metavar="DEST")
@click.argument("routes", nargs=-1, metavar="[ROUTE]...")
@click.option(
    "--root",
    type=click.Path(path_type=Path, readable=False),
    help="A log whose ledger lists the expected bundles. An archive needs no log, so WALD_ROOT is not used.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, readable=False),
    metavar="ROOT",
    help="Create a new log there from every ROUTE; without ROUTE, from the whole archive.",
)
@click.option("--from", "start", type=SequenceNumber(), metavar="SEQ", help="The first record.")
@click.option("--to", "last", type=SequenceNumber(), metavar="SEQ", help="The last record.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="Format of the records on stdout; json: one object per line.",
)
@click.option("--json", "as_json", is_flag=True, help="With --into: print the result as JSON.")
@click.pass_context
def restore(
    ctx: click.Context,
    address: str,
    routes: tuple[str, ...],
    root: Path | None,
    into: Path | None,
    start: int | None,
    last: int | None,
    form: str,
    as_json: bool,
) -> None:
    """Write the records of ROUTE in the archive DEST to stdout, as `wald read` would; no log is needed.

    The digest of a bundle is checked before any of its records is written. If the archive begins after --from, or ends
    before --from, before --to or, without --to, before the last record in the ledger of --root, the records that exist
    are written, and the exit code is 3.

    With --into the records become a new log, with the sequences and times that they had. It has a new id; cursors and
    the senders of records are not in an archive. `wald where N` shows which sequences are in no bundle.
    """
    first = 1 if start is None else start
    if last is not None and first > last:
        message = f"--from {first} --to {last}: the end is before the start"
        raise InvalidInput(message, hint=f"--from {last} --to {first}")
    for route in routes:
        check_route(route)
    destination = open_destination(address, Disk())
    if into is not None:
        _restore_into(destination, routes, into, first, last, as_json=as_json)
        return
    if len(routes) != 1 or as_json:
        wrong = "--json is for --into" if as_json else "one ROUTE goes to stdout; several, or all, need --into"
        raise InvalidInput(wrong, hint=f"wald-archive restore {shlex.quote(address)} ROUTE, or --into ROOT")
    _restore_to_stdout(destination, address, routes[0], root or ctx.find_object(Path), start, last, form)


@stdout_is_a_report
def _restore_into(
    destination: Destination, routes: tuple[str, ...], into: Path, first: int, last: int | None, *, as_json: bool
) -> None:
    end = end_of(destination, routes)
    at = first - 1
    total = max(0, (end if last is None else min(end, last)) - at)
    with _restore_failures(into), progress("restore", total) as advance:

        def reached(sequence: int) -> None:
            nonlocal at
            advance(sequence - at)
            at = sequence

        outcome = restore_into(destination, routes, into, disk=Disk(), first=first, last=last, on_record=reached)
    report_restored(outcome, destination.address, click.echo, as_json=as_json)


def _restore_to_stdout(
    destination: Destination,
    address: str,
    route: str,
    root: Path | None,
    start: int | None,
    last: int | None,
    form: str,
) -> None:
    first = start or 1
    begin, end, after = extent_of(destination, route)
    due = max(first, last or 0)
    if root is not None and last is None:
        read_identity(Root(root))
        recorded = recorded_at(entries_of(Root(root).ledger / "archive.jsonl"), destination.address)
        due = max(due, recorded.last_of(route))
    at = max(begin, first) - 1
    with progress("restore", (end if last is None else min(end, last)) - at) as advance:
        for records in restored(destination, route, first, last, as_json=form == "json"):
            write_stdout(records.data)
            advance(records.last - at)
            at = records.last
    missing = (first, min(after, last or after)) if start is not None and first <= after else (end + 1, due)
    if missing[0] <= missing[1]:
        asking = command_line("ROOT" if root is None else root, f"where {missing[0]}")
        raise NotFound(
            f"{address}: no bundle covers {span_text(*missing)} of route {route}",
            hint=f"{asking} shows what happened to it in the log",
        )


def main() -> None:
    """Run the console script."""
    sys.exit(run(command, "wald-archive", sys.argv[1:]))


def _size(records: int | None, size_bytes: int | None) -> Size:
    if records is not None and size_bytes is not None:
        raise InvalidInput(
            "--records-per-bundle and --bytes-per-bundle are mutually exclusive", hint="wald-archive pack --help"
        )
    if size_bytes == 0:
        raise InvalidInput("a bundle of 0 bytes cannot have any records", hint="--bytes-per-bundle 256MiB")
    return Records(records) if records is not None else Bytes(size_bytes or BUNDLE_BYTES)


@contextmanager
def _disk_failures(root: Path, destination: Destination) -> Iterator[None]:
    """Convert errors of the operating system, with the file and a hint."""
    try:
        yield
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or root) from error
    except OSError as error:
        if (misplaced := wrong_type(error)) is not None:
            raise misplaced from error
        raise DiskFailure(
            f"{error.filename or f'{root} or {destination.address}'}: {error.strerror or error}; nothing is lost, and "
            "nothing that is not at the destination was acknowledged",
            hint=f"{room_commands(root, destination.address, error=error)}; then rerun the same command to continue",
        ) from error


@contextmanager
def _restore_failures(into: Path) -> Iterator[None]:
    """Convert errors of the operating system, with the file and a hint."""
    try:
        yield
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or into) from error
    except OSError as error:
        place = shlex.quote(str(into))
        raise DiskFailure(
            f"{error.filename or into}: {error.strerror or error}; the restore is incomplete, and no log was created",
            hint=f"{room_commands(into, error=error)}; rm -r {place}; then the same command again",
        ) from error


def _warn(message: str) -> None:
    click.echo(f"wald-archive: {message}", err=True)


def _moment() -> str:
    return utc(time.time_ns())


class PackReport:
    """Report of one command, route by route, with a progress bar for each run."""

    def __init__(self, as_json: bool, *, write: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._write = write
        self._warn = warn
        self._as_json = as_json
        self._runs: list[dict[str, Any]] = []  # Any: it is JSON
        self._bar = ExitStack()
        self._advance: Callable[[int], None] = lambda _: None
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._as_json and error is None:
            self._write(json_line("archive.pack", {"runs": self._runs}))

    def begin(self, run: Run, resumed: bool) -> None:
        if resumed:
            self._warn(f"continuing the interrupted run {run.bag} with its own sizes and codec ({run.codec.value})")
        self._at = run.first - 1
        self._advance = self._bar.enter_context(progress(run.origin.route, run.last - self._at))

    def abandoned(self, run: Run) -> None:
        reason = f"the cursor of {run.origin.group} was moved in the meantime"
        self._warn(f"the interrupted run {run.bag} is abandoned: {reason}; its files at {run.dest} may be removed")

    def record(self, sequence: int) -> None:
        self._advance(sequence - self._at)
        self._at = sequence

    def route(self, request: Request, runs: Iterator[Packed]) -> None:
        """Report every run for one route when it is finished, or that there was nothing to archive."""
        done: Packed | None = None
        for done in runs:
            self._bar.close()
            if self._as_json:
                self._runs.append(_fields(done))
            else:
                self._write("\n".join(_lines(done)))
        if done is None and not self._as_json:
            upto = "" if request.to is None else f" up to record {request.to}"
            self._write(f"nothing to archive: group {request.group} has read all of {request.route}{upto}")


@dataclass(slots=True)
class ProofReport:
    """Report of one verification, finding by finding."""

    as_json: bool
    write: Callable[[str], None]
    counts: Counter[Level] = field(default_factory=Counter)

    def finding(self, found: Finding) -> None:
        """Report a finding; good files are only counted."""
        self.counts[found.level] += 1
        if self.as_json:
            fields = {
                "kind": "finding",
                "level": found.level.value,
                "dest": found.address,
                "bag": found.bag,
                "file": found.file,
                "offset": found.offset,
                "message": found.message,
            }
            self.write(json_line("archive.verify", fields))
        elif found.level is not Level.OK:
            at = "" if found.offset is None else f" offset {found.offset}:"
            self.write(f"{found.level.value:5}  {found.name}:{at} {found.message}")

    def end(self) -> None:
        """Report the counts."""
        good, errors, noted = self.counts[Level.OK], self.counts[Level.ERROR], self.counts[Level.INFO]
        if self.as_json:
            findings = {level.value: self.counts[level] for level in Level}
            self.write(json_line("archive.verify", {"kind": "summary", "good": not errors, "findings": findings}))
        else:
            verdict, plural = "damaged" if errors else "OK", "s" * (errors != 1)
            self.write(f"{verdict}: {_bundles(good)} proven, {noted} info, {errors} error{plural}")


def report_restored(outcome: Outcome, address: str, write: Callable[[str], None], *, as_json: bool) -> None:
    """Report a new log, and the data that an archive does not have."""
    if as_json:
        routes = [{"route": route, "records": count} for route, count in sorted(outcome.records.items())]
        fields = {
            "root": str(outcome.root),
            "log": outcome.log,
            "dest": address,
            "from_log": outcome.from_log,
            "first": outcome.first,
            "last": outcome.last,
            "records": sum(outcome.records.values()),
            "routes": routes,
            "missing": outcome.missing,
            "holes": outcome.holes,
        }
        write(json_line("archive.restore", fields))
        return
    for route, count in sorted(outcome.records.items()):
        write(f"{route}: {count} records")
    write(f"log {outcome.log} at {outcome.root}: records {outcome.first} to {outcome.last} of log {outcome.from_log}")
    if outcome.missing:
        write(f"not restored: {outcome.missing} sequences, in {outcome.holes} runs, as no bundle holds them")
    write("not in an archive: the cursors of groups, who sent a record, and the numbers of producers' batches")


def _fields(done: Packed) -> dict[str, Any]:
    run, manifest = done.run, done.manifest
    return {
        "route": run.origin.route,
        "group": run.origin.group,
        "dest": run.dest,
        "bag": str(run.bag),
        "first": run.first,
        "last": run.last,
        "records": manifest.count if manifest else None,
        "resumed": done.resumed,
        "bundles": [_bundle_fields(entry.bundle) for entry in manifest.entries] if manifest else [],
    }


def _bundle_fields(bundle: Bundle) -> dict[str, Any]:
    contents = bundle.contents
    return {
        "bundle": bundle.name,
        "first": contents.first,
        "last": contents.last,
        "records": contents.count,
        "record_bytes": contents.record_bytes,
        "bytes": bundle.bytes,
        "sha256": bundle.sha256,
        **time_fields("earliest", contents.earliest_ns),
        **time_fields("latest", contents.latest_ns),
    }


def _lines(done: Packed) -> Iterator[str]:
    run, manifest = done.run, done.manifest
    if manifest is None:
        yield f"bag {run.bag}: was complete, and is acknowledged now"
        return
    for entry in manifest.entries:
        bundle = entry.bundle
        contents = bundle.contents
        yield (
            f"{bundle.name}: {contents.count} records, {contents.first} to {contents.last}, "
            f"{format_bytes(contents.record_bytes)} in {format_bytes(bundle.bytes)}, sha256 {bundle.sha256}"
        )
    yield f"bag {run.bag}: {manifest.count} records in {_bundles(len(manifest.entries))} at {run.dest}"


def _bundles(count: int) -> str:
    return "1 bundle" if count == 1 else f"{count} bundles"

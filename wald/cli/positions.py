"""``wald head``, ``where`` and ``show``: the durable end of the log, and the fate of a record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples
from wald.cli.options import check_span, json_option, now, root_option, time_option, warn_of_wrong_times
from wald.cli.output import aligned, counted, json_line, print_result, write_stdout
from wald.errors import Damaged, InvalidInput, NotFound, Partial
from wald.format.names import check_route
from wald.format.times import nanoseconds, utc
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.files.layout import Root
    from wald.format.records import Record
    from wald.log import Log
    from wald.reading.assembler import Sender
    from wald.reading.lookup import Whereabouts
    from wald.retention.history import History
    from wald.retention.missing import Missing
    from wald.segments.view import State


def exit_code(state: State) -> int:
    if state.value in ("never-issued", "skipped", "unknown"):
        return NotFound.exit_code
    return Damaged.exit_code if state.value in ("quarantined", "lost") else 0


@click.command(epilog=examples("wald head", "wald head --json"))
@root_option
@json_option
def head(root: Path, as_json: bool) -> None:
    """Show the last durable sequence, and where the durable bytes end."""
    log = wald.open(root)
    found = log.head()
    if found is None:
        message = f"{log.root.head}: no record is durable yet"
        raise NotFound(message, hint=f"{command_line(root, 'run')}, or send it a record if it runs")
    if as_json:
        from wald.status.schema import Head

        click.echo(json_line("head", Head.of(log.root, found)))
    else:
        place = f"segment={found.segment} position={found.position} epoch={found.epoch}"
        click.echo(f"seq={found.sequence} {place} at={moment(found.at_ns)}")
        warn_without_daemon(log.root)


@click.command(epilog=examples("wald where 250", "wald where --route access --since 14:00 --until 14:05"))
@click.argument("sequence", type=int, required=False)
@root_option
@click.option(
    "--route",
    callback=lambda _ctx, _parameter, name: name and check_route(name),
    help="Check only this route.",
)
@time_option("--since", "Check the records appended at or after this time.")
@time_option("--until", "Check the records appended before this time.  [default: now]")
@json_option
def where(
    root: Path, sequence: int | None, route: str | None, since: datetime | None, until: datetime | None, as_json: bool
) -> int:
    """Show where record SEQUENCE is: active, cut, sealed, reclaimed, archived, never issued, …

    The exit code is 3 if it is unknown or was never issued, and 4 if it is damaged.

    With --since: show whether all records of that period are here, and where the others are. The exit code is 0 if they
    are, 12 if some were reclaimed, and 4 if some are damaged or lost.
    """
    from wald.segments.view import State
    from wald.status.schema import Where

    log = wald.open(root)
    if (sequence is None) == (since is None) or (since is None and (route is not None or until is not None)):
        message = "where takes a SEQUENCE, or --since with --until and --route"
        examples = ("where 250", "where --route access --since 14:00 --until 14:05")
        raise InvalidInput(message, hint="; ".join(command_line(root, each) for each in examples))
    if since is not None:
        return _coverage(log, route, since, until, as_json=as_json)
    assert sequence is not None
    found = log.where(sequence)
    state = f"{found.state.value}: " * (not found.message.startswith(found.state.value.replace("-", " ")))
    lines = [f"{found.sequence}: {state}{found.message}"]
    if found.append_time_ns is not None:
        lines.append(f"  appended {moment(found.append_time_ns)}, {'durable' if found.durable else 'not durable'}")
    lines += [f"  group {group}: has {'' if done else 'not '}read it" for group, done in found.processed.items()]
    if found.bundle is not None and found.state is not State.ARCHIVED:
        lines.append(f"  also in bundle {found.bundle}, member {found.member or 'not known'}")
    print_result("where", as_json, Where.of(found), lines)
    return exit_code(found.state)


def _coverage(log: Log, route: str | None, since: datetime, until: datetime | None, *, as_json: bool) -> int:
    """Report if all records between two times are in the log, and the fate of the others; return the exit code."""
    from wald.retention.history import History  # reads ledgers, which one sequence does not need
    from wald.status.schema import time_fields

    asked = now()
    if nanoseconds(since) >= nanoseconds(asked):
        day, other = timedelta(days=1), f" --route {route}" if route else ""
        spans = [("--since", since), ("--until", until)]
        earlier = "".join(f" {name} {moment(nanoseconds(each - day))}" for name, each in spans if each is not None)
        example = f"{command_line(log.root.path, f'where{other}{earlier}')} asks about the day before"
        raise InvalidInput(f"--since {moment(nanoseconds(since))}: that time has not come yet", hint=example)
    check_span(since, until)
    until = until or asked
    warn_of_wrong_times(log.root.path, since, until)
    gone: list[Missing] = []
    damage: list[str] = []
    records, first, last = 0, None, None
    reading = log.batches(
        route, since, until, on_missing=gone.append, on_damage=lambda error: damage.append(error.message)
    )
    for batch in reading:
        records += batch.count
        first, last = first or batch.first_sequence, batch.last_sequence
    history = History(log.root)
    missing = [(each, _is_archived(history, each, route)) for each in gone]
    lost = bool(damage) or any(each.lost for each in gone)
    code = Damaged.exit_code if lost else Partial.exit_code if gone else 0
    is_past = nanoseconds(until) <= nanoseconds(asked)
    count = f"{counted(records, 'record')}, {first} to {last}" if records else "no record"
    span = " to ".join(utc(nanoseconds(each)) for each in (since, until))
    found = f"{span} of {f'route {route}' if route else 'all routes'}: {'not ' * bool(code)}all here: {count}"
    fields = {"route": route, **time_fields("since", nanoseconds(since)), **time_fields("until", nanoseconds(until))}
    fields |= {"complete": not code, "past": is_past, "records": records, "first": first, "last": last}
    names = ("first", "last", "records", "exact", "archive", "lost")
    fields["missing"] = [
        {name: getattr(each, name) for name in names} | {"archived": archived, "message": each.message()}
        for each, archived in missing
    ]
    fields["damage"] = damage
    lines = [found + "; this period has not ended, and more records may follow" * (not code and not is_past)]
    lines += [line for each, archived in missing for line in _missing_text(log, each, route, archived=archived)]
    lines += [f"  damaged: {message}" for message in damage]
    print_result("where.since", as_json, fields, lines)
    return code


def _is_archived(history: History, missing: Missing, route: str | None) -> bool:
    """Return True if bundles hold all of the range."""
    routes = missing.routes if route is None else {route}
    ends = {name: missing.last_of_route.get(name, missing.last) for name in routes}
    return bool(routes) and all(history.all_archived(name, missing.first, last) for name, last in ends.items())


def _missing_text(log: Log, missing: Missing, route: str | None, *, archived: bool) -> Iterator[str]:
    yield f"  {missing.message()}"
    if not missing.archive:
        yield "  no bundle has these"
        yield f"  hint: {command_line(log.root.path, f'where {missing.first}')} says why"
        return
    name = route or next(iter(sorted(missing.routes)), "ROUTE")
    last = missing.last_of_route.get(name, missing.last)
    yield f"  {'all of these are' if archived else 'some of these may be'} in the archive {missing.archive}"
    yield f"  hint: wald-archive restore {missing.archive} {name} --from {missing.first} --to {last}"


def warn_without_daemon(root: Root) -> None:
    """Report on stderr if no daemon runs, and how the last one ended."""
    from wald.files.disk import Disk
    from wald.writing.run_reports import no_daemon_message

    if message := no_daemon_message(root, Disk()):
        click.echo(f"{message}\n  hint: {command_line(root.path, 'run')}", err=True)


def moment(time_ns: int) -> str:
    """Return a time as ``--from`` accepts it; "-" without one."""
    return utc(time_ns, 6) if time_ns else "-"


@click.command(epilog=examples("wald show 250", "wald show 250 --raw > value.bin"))
@click.argument("sequence", type=int)
@root_option
@click.option(
    "--archive",
    metavar="DIR|URL",
    help="The archive's destination if it is not the one in the ledger; also searched if no ledger lists the record.",
)
@click.option("--raw", is_flag=True, help="Print only the value, byte for byte, without a newline.")
@json_option
def show(root: Path, sequence: int, archive: str | None, raw: bool, as_json: bool) -> int:
    """Show record SEQUENCE: value, key, headers, times, route, and where it is.

    It is read from its segment, raw or sealed, active or reclaimed in its grace period; if the log no longer has it,
    from its bundle, whose digest is checked. If the record is nowhere, the error says why: the exit code is 3 if it was
    deleted or never issued, and 4 if it is damaged.
    """
    if raw and as_json:
        raise InvalidInput("--raw and --json are mutually exclusive", hint="wald show --help")
    log = wald.open(root)
    found = log.where(sequence)
    batch = None
    if found.durable:
        batch = next(log.batches(start=sequence, stop=sequence, on_missing="skip"), None)
    record = _in_archive(log, found, archive) if batch is None else next(batch.records())
    sender = None if batch is None else log.sender(batch)
    if record is None:
        raise _nowhere(log, found, archive)
    if raw:
        write_stdout(record.value)
    else:
        print_result("show", as_json, _record_fields(record, found, sender), _record_text(record, found, sender))
    return 0


def _in_archive(log: Log, found: Whereabouts, archive: str | None) -> Record | None:
    """Return the record from its bundle or the given archive; None if neither has it."""
    entry = found.bundle_entry
    address = archive or (str(entry["dest"]) if entry and entry.get("dest") else None)
    from importlib.metadata import entry_points

    finder = next(iter(entry_points(group="wald.bundles", name="find")), None)
    if address is None or finder is None:
        return None
    find: Callable[[str, str | None, int], Record | None] = finder.load()
    try:
        return find(address, str(entry["route"]) if entry and entry.get("route") else found.route, found.sequence)
    except OSError as error:
        message = f"{error.filename or address}: {error.strerror or error}: the archive that holds it cannot be read"
        naming = command_line(log.root.path, f"show {found.sequence} --archive DIR")
        raise NotFound(message, hint=f"mount it, or name its place: {naming}") from error


def _nowhere(log: Log, found: Whereabouts, archive: str | None) -> NotFound | Damaged:
    looking = command_line(log.root.path, f"where {found.sequence}")
    message = f"record {found.sequence}: {found.message}"
    if archive is not None:
        message += f"; it is not in {archive}"
        if "://" not in archive and not Path(archive).is_dir():
            message += ", which is not a directory"
    elif found.bundle is not None:
        message += "; that bundle is not there"
    if exit_code(found.state) == Damaged.exit_code:
        return Damaged(message, hint=f"{command_line(log.root.path, 'verify')} reports all damage")
    naming = command_line(log.root.path, f"show {found.sequence} --archive DIR")
    return NotFound(message, hint=f"{looking} --json shows all that is known; {naming} looks in an archive")


def _record_text(record: Record, found: Whereabouts, sender: Sender | None) -> Iterator[str]:
    rows = [("sequence", str(record.sequence)), ("route", record.route), ("appended", utc(record.append_time_ns, 9))]
    if record.event_time_ns is not None:
        rows.append(("event time", utc(record.event_time_ns, 9)))
    rows += [(name, _shown(value)) for name, value in (("key", record.key), ("headers", record.headers)) if value]
    rows += [("sent by", str(sender))] if sender else []
    rows.append(("where", f"{found.state.value}: {found.message}"))
    rows += [(f"group {group}", f"has {'' if done else 'not '}read it") for group, done in found.processed.items()]
    if not record.terminated:
        rows.append(("ended", "without a newline"))
    rows.append(("value", f"{len(record.value)} bytes"))
    yield from aligned(rows, ())
    yield _shown(record.value)


def _shown(value: bytes) -> str:
    """Return printable text unchanged, and other bytes in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex(" ", 4)
    return text if text.replace("\t", "").isprintable() else repr(text)[1:-1]


def _record_fields(record: Record, found: Whereabouts, sender: Sender | None) -> dict[str, object]:
    from wald.status.schema import segment_fields, time_fields

    fields: dict[str, object] = json.loads(record.to_json())
    fields |= time_fields("append_time", record.append_time_ns) | time_fields("event_time", record.event_time_ns)
    fields |= {"sender": sender.to_json() if sender else None, "terminated": record.terminated}
    fields |= segment_fields(found.segment) | {"state": found.state.value}
    names = ("message", "position", "bundle", "member", "processed")
    return fields | {name: getattr(found, name) for name in names}

"""``wald show``: one record with all that is known of it, wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples
from wald.cli.options import json_option, root_option
from wald.cli.output import aligned, json_line
from wald.cli.positions import exit_code
from wald.cli.streams import write_stdout
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.times import utc
from wald.hints import command_line
from wald.status.schema import segment_fields, time_fields

if TYPE_CHECKING:
    from wald.format.records import Record
    from wald.log import Log
    from wald.reading.assembler import Batch, Sender
    from wald.reading.lookup import Whereabouts

    Finder = Callable[[str, str | None, int], Record | None]
    """Address of an archive, route, sequence → the record there."""


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
    batch = _in_log(log, found)
    record = _in_archive(log, found, archive) if batch is None else next(batch.records())
    sender = None if batch is None else log.sender(batch)
    if record is None:
        raise _nowhere(log, found, archive)
    if raw:
        write_stdout(record.value)
    elif as_json:
        click.echo(json_line("show", _fields(record, found, sender)))
    else:
        click.echo("\n".join(_text(record, found, sender)))
    return 0


def _in_log(log: Log, found: Whereabouts) -> Batch | None:
    """The record as a batch of its own; None if no segment has it."""
    if not found.durable:
        return None
    return next(log.batches(start=found.sequence, stop=found.sequence, on_missing="skip"), None)


def _in_archive(log: Log, found: Whereabouts, archive: str | None) -> Record | None:
    """The record from its bundle, or from the archive that was named; None if it is in none."""
    entry = found.bundle_entry
    address = archive or (str(entry["dest"]) if entry and entry.get("dest") else None)
    from importlib.metadata import entry_points

    finder = next(iter(entry_points(group="wald.bundles", name="find")), None)
    if address is None or finder is None:
        return None
    find: Finder = finder.load()
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
            message += ", which is no directory"
    elif found.bundle is not None:
        message += "; that bundle is not there"
    if exit_code(found.state) == Damaged.exit_code:
        return Damaged(message, hint=f"{command_line(log.root.path, 'verify')} reports all damage")
    naming = command_line(log.root.path, f"show {found.sequence} --archive DIR")
    return NotFound(message, hint=f"{looking} --json has all that is known; {naming} looks into an archive")


def _text(record: Record, found: Whereabouts, sender: Sender | None) -> Iterator[str]:
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
    """Text as it is, if a terminal can show it; other bytes in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex(" ", 4)
    return text if text.replace("\t", "").isprintable() else repr(text)[1:-1]


def _fields(record: Record, found: Whereabouts, sender: Sender | None) -> dict[str, object]:
    fields: dict[str, object] = json.loads(record.to_json())
    fields |= time_fields("append_time", record.append_time_ns) | time_fields("event_time", record.event_time_ns)
    return fields | {
        "sender": sender.to_json() if sender else None,
        "terminated": record.terminated,
        "state": found.state.value,
        "message": found.message,
        **segment_fields(found.segment),
        "position": found.position,
        "bundle": found.bundle,
        "member": found.member,
        "processed": found.processed,
    }

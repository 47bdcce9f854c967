"""``wald inspect``: the kind, writer, damage and content of a file, and a verdict on its deletion."""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from wald.checking.kinds import FileKind
from wald.cli.command import examples
from wald.cli.options import json_option
from wald.cli.output import aligned, json_line, print_result
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.locks import is_locked
from wald.files.safe_open import read_object
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.checking.dump import Item
    from wald.checking.kinds import RecognizedFile
    from wald.retention.backlog import SegmentStatus

_SEGMENTS = {FileKind.RAW, FileKind.SEALED, FileKind.RELEASED, FileKind.DELETING, FileKind.SPARSE_INDEX}
_DUMPED = {FileKind.IDENTITY, FileKind.HEAD, FileKind.TRANSFERS, FileKind.CURSOR, FileKind.LEDGER, FileKind.RECOVERY}


@click.command(epilog=examples("wald inspect $WALD_ROOT/head", "wald inspect --content $WALD_ROOT/head"))
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--content", is_flag=True, help="Print the content of a file of the log instead, piece by piece.")
@click.option("--records", is_flag=True, help="The same, with the records in each batch.")
@json_option
def inspect(path: Path, content: bool, records: bool, as_json: bool) -> int:
    """Show what PATH is in a log or an archive: what wrote it, whether it is intact, whether it may be deleted.

    A segment is read completely. Nothing is changed or deleted. The exit code is 4 if the file is damaged; --content
    shows the position of the damage. With --content and --json, each piece is one object per line.
    """
    if content or records:
        return _print_content(path, records=records, as_json=as_json)
    from wald.checking.kinds import kind_of

    path = Path(os.path.abspath(path))
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path}: no such file", hint=f"ls -la {path.parent}") from None
    above = [path, *path.parents] if path.is_dir() else path.parents
    root = next((Root(each) for each in above if (each / "log.json").is_file()), None)
    named = kind_of(str(path.relative_to(root.path)) if root else str(path), in_root=root is not None)
    damage = _damage(root, path, named)
    verdict = may_delete(root, path, named)
    by = _written_by(root, path, named)
    fields: dict[str, object] = {
        "path": str(path),
        "root": str(root.path) if root else None,
        "meaning": named.kind.meaning,
    }
    fields |= {"kind": named.kind.name.lower().replace("_", "-"), "route": named.route or None}
    fields |= {"group": named.group or None, "written_by": by or None, "damage": damage or None}
    fields |= {"whole": None if damage is None else not damage, "may_delete": verdict.allowed}
    fields |= {"why": verdict.why, "instead": verdict.instead or None}
    rows = [("file", str(path)), ("is", named.kind.meaning)]
    rows += [("log", str(root.path))] if root else []
    rows += [(name, value) for name, value in (("route", named.route), ("group", named.group)) if value]
    rows.append(("written by", by or "not on record"))
    if damage is not None:
        rows.append(("whole", f"no: {damage}" if damage else "yes"))
    rows.append(("delete it?", f"{'yes' if verdict.allowed else 'no'}: {verdict.why}"))
    if verdict.instead:
        rows.append(("first" if verdict.allowed else "instead", verdict.instead))
    print_result("inspect", as_json, fields, aligned(rows, ()))
    return Damaged.exit_code if damage else 0


def _print_content(path: Path, *, records: bool, as_json: bool) -> int:
    from wald.checking.dump import dump

    damaged = False
    for item in dump(path, records=records):
        damaged = damaged or "damage" in item
        click.echo(json_line("inspect.content", _with_times(item)) if as_json else _line(item))
    return Damaged.exit_code if damaged else 0


def _damage(root: Root | None, path: Path, named: RecognizedFile) -> str | None:
    """Return the damage of the file, "" if it is intact; None if its content cannot be checked."""
    from wald.checking.dump import dump
    from wald.work.journal import read_beside_owner

    if named.kind is FileKind.FIFO:
        return "" if stat.S_ISFIFO(os.stat(path).st_mode) else "not a FIFO"
    if named.kind in (FileKind.BUNDLE, FileKind.DIGEST):
        return _bundle_damage(path.with_name(path.name.removesuffix(".sha256")))
    if named.kind is FileKind.WORK:
        read, _ = read_beside_owner(path)
        return f"offset {read.end}: {read.damage}" if read.damage else ""
    if named.kind not in _DUMPED | _SEGMENTS:
        return None
    try:
        found = _active_damage(root, path) if root is not None and named.kind is FileKind.RAW else None
        return next((str(item["damage"]) for item in dump(path) if "damage" in item), "") if found is None else found
    except (Damaged, InvalidInput) as error:
        return error.message.removeprefix(f"{path}: ")


def _active_damage(root: Root, path: Path) -> str | None:
    """Return the damage of the active segment up to its durable end; None if ``path`` is another file."""
    from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
    from wald.segments.view import State, read_view

    view = read_view(root, read_identity(root).log_id)
    segment = next((each for each in view.segments if each.path == path), None)
    if segment is None or view.state(segment) is not State.ACTIVE:
        return None
    with closing(view.open(segment)) as opened:
        met = (each for each in opened.batches(FIRST_BATCH, view.limit(segment)) if isinstance(each, DamagedBytes))
        return next((f"offset {each.offset}: {each.reason}" for each in met), "")


def _bundle_damage(bundle: Path) -> str:
    """Compare a bundle with its digest, as ``sha256sum -c`` does."""
    from hashlib import file_digest

    try:
        expected = bundle.with_name(f"{bundle.name}.sha256").read_text().split()[0]
        with bundle.open("rb") as opened:
            found = file_digest(opened, "sha256").hexdigest()
    except (OSError, IndexError) as error:
        return f"it cannot be compared: {error}"
    return "" if found == expected else f"its sha256 is {found}, not {expected}"


def _written_by(root: Root | None, path: Path, named: RecognizedFile) -> str:
    """Return the program and version that wrote the file; "" if unknown."""
    if root is not None and named.kind in _SEGMENTS:
        return _writer(root, path)
    if root is not None and named.kind is FileKind.RECOVERY:
        return _life(root, int(path.stem))
    if named.kind in (FileKind.BUNDLE, FileKind.DIGEST):
        return _software(path.parent.parent / "manifest.json")
    if named.kind in (FileKind.BAG, FileKind.BAG_PART):
        return _software((path if named.kind is FileKind.BAG else path.parent) / "manifest.json")
    return ""


def _writer(root: Root, path: Path) -> str:
    from wald.checking.dump import dump

    try:
        item: Item = next((item for item in dump(path) if "epoch" in item), {})
    except (Damaged, InvalidInput):
        return ""
    if item.get("writer"):
        return f"the daemon, epoch {item['epoch']}, wald {item['writer']}"
    return _life(root, item["epoch"]) if "epoch" in item else ""


def _life(root: Root, epoch: int) -> str:
    software = (read_object(root.report(epoch)) or {}).get("software")
    return f"the daemon, epoch {epoch}, {software or 'a version that no report in recovery/ has any more'}"


def _software(manifest: Path) -> str:
    try:
        return f"wald-archive, {json.loads(manifest.read_bytes())['software']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _with_times(item: Item) -> Item:
    from wald.status.schema import time_fields

    fields: Item = {}
    for key, value in item.items():
        fields |= time_fields(key[:-3], value) if key.endswith("_ns") else {key: value}
    return fields


def _line(item: Item) -> str:
    """Format ``kind key=value …``; a record's value, which may be any bytes, is printed as JSON."""
    parts = [str(item["kind"])]
    for key, value in item.items():
        if key != "kind" and value not in (None, [], {}):
            plain = isinstance(value, int) or (isinstance(value, str) and value.isalnum())
            parts.append(f"{key}={value if plain else json.dumps(value, ensure_ascii=False)}")
    return " ".join(parts)


class Verdict(NamedTuple):
    """Verdict on deleting a file: allowed if that neither loses nor breaks anything; ``instead`` is a safe command."""

    allowed: bool
    why: str
    instead: str = ""


_LEDGER = (False, "it proves that deletions were allowed; without it, missing records count as lost")
_ALWAYS = {
    FileKind.ROOT: (False, "it is the log, with every record in it"),
    FileKind.IDENTITY: (False, "without it no program opens the log"),
    FileKind.LOCK: (False, "it has only one line, but without it a second daemon could start"),
    FileKind.CLOCK: (False, "without it look-ups by time miss records, and append times that go back look damaged"),
    FileKind.TRANSFERS: (
        False,
        "without it, a start may store lines twice that were in a pipe when the daemon was killed",
    ),
    FileKind.SPARSE_INDEX: (True, "it is a hint; readers only take longer without it"),
    FileKind.DIRECTORY: (False, "the programs of the log need it and its files"),
    FileKind.LEDGER: _LEDGER,
    FileKind.LEDGER_PART: _LEDGER,
    FileKind.QUARANTINE: (True, "no program reads it; but it is the only copy of these bytes"),
    FileKind.RECOVERY: (True, "it is only a report; the daemon keeps the last 32"),
    FileKind.KEYS: (
        False,
        "a request that is repeated would be stored twice if its records have already been reclaimed",
    ),
    FileKind.KEYS_LOCK: (False, "it is empty, but without it two gates could write the table of keys at once"),
    FileKind.FOREIGN: (True, "no program of wald made it or reads it; whether another needs it is not known"),
}
_ARCHIVED = {FileKind.ARCHIVED_ROUTE, FileKind.BAG, FileKind.BUNDLE, FileKind.DIGEST, FileKind.BAG_PART}
_ARCHIVE = "it may be the only copy of its records, and the chain of bundles would have a gap"


def may_delete(root: Root | None, path: Path, named: RecognizedFile) -> Verdict:
    if root is None and named.kind is FileKind.FOREIGN:
        return Verdict(False, "it is not in a log, and wald does not know whether it is needed")
    if named.kind in _ALWAYS:
        allowed, why = _ALWAYS[named.kind]
        return Verdict(allowed, why, f"less {shlex.quote(str(path))}" if named.kind is FileKind.QUARANTINE else "")
    if named.kind in _ARCHIVED:
        return Verdict(False, _ARCHIVE, "wald-archive verify COPY proves another copy of the whole archive")
    assert root is not None, "only a bag may be outside a root"
    if named.route:
        return _of_route(root, path, named)
    if path.parent == root.segments and named.kind is not FileKind.TEMPORARY:
        return _segment(root, path, named.kind)
    return _of_daemon(root, path, named.kind)


def _of_daemon(root: Root, path: Path, kind: FileKind) -> Verdict:
    runs = is_locked(root.lock, Disk())
    match kind:
        case FileKind.HEAD if not runs:
            return Verdict(False, "readers need it; only if it is damaged: the next start rebuilds it", "")
        case FileKind.HEAD:
            return Verdict(
                False, "without it, readers see no record after the newest complete segment until the next commit"
            )
        case FileKind.SOCKET if runs:
            return Verdict(False, "producers could not reach the daemon without it")
        case FileKind.SOCKET:
            return Verdict(True, "no daemon listens on it; the next one creates its own")
        case FileKind.TEMPORARY if runs:
            return Verdict(False, "a program may be using it; the next start of the daemon removes it")
        case FileKind.TEMPORARY:
            return Verdict(True, "no daemon runs; the next one removes it")
        case FileKind.LEDGER_LOCK:
            return Verdict(False, "it is empty, but without it two programs could write the ledger at once")
    raise AssertionError(f"{path}: no verdict for {kind}")


def _of_route(root: Root, path: Path, named: RecognizedFile) -> Verdict:
    route, group, name = named.route, named.group, shlex.quote(str(path))
    retiring = command_line(root.path, f"route retire {route}")
    appending = f"{command_line(root.path, f'append {route} {name}')} && rm {name}"
    removing = command_line(root.path, f"group remove {route} {group}")
    removing_cursor = command_line(root.path, f"cursor remove {route} --group {group}")
    match named.kind:
        case FileKind.ROUTE:
            why = "its segments would be pinned for a route that nothing shows, and its cursors would be lost"
            return Verdict(False, why, retiring)
        case FileKind.FIFO if not stat.S_ISFIFO(os.stat(path).st_mode):
            return Verdict(False, "it is not a FIFO: its lines are not in the log", appending)
        case FileKind.FIFO:
            why = "producers would write into a plain file; the daemon recreates the FIFO within a second"
            return Verdict(False, why, retiring)
        case FileKind.FOUND:
            return Verdict(False, "its lines are not in the log", appending)
        case FileKind.CURSOR:
            return Verdict(
                False,
                f"group {group} would restart at the oldest record, or its records would be freed",
                removing_cursor,
            )
        case FileKind.HANDOVER | FileKind.COMMAND:
            why = "the next start of wald-drain finishes it; remove the group if none will run again"
            return Verdict(False, why, removing_cursor)
        case FileKind.WORK:
            why = "records done above the cursor would be redelivered; never delete it while a worker runs"
            return Verdict(False, why, removing)
        case FileKind.ASK:
            return Verdict(False, "a command may be using it", removing)
        case FileKind.PIN:
            why = "RECLAIM could delete records of an unfinished handover, and the next start would send them again"
            return Verdict(False, why, removing)
        case FileKind.CURSORS:
            why = "the groups would restart at the oldest record, or their records would be freed"
            return Verdict(False, why, command_line(root.path, f"cursor list {route}"))
        case FileKind.RETIRED:
            why = "it would reactivate the route and pin records without the daemon's knowledge"
            return Verdict(False, why, command_line(root.path, f"route add {route}"))
    return Verdict(True, "a program that was killed has left it")  # a temporary


def _segment(root: Root, path: Path, kind: FileKind) -> Verdict:
    from wald.retention.backlog import Backlog
    from wald.segments.view import read_view

    reclaiming = command_line(root.path, program="wald-reclaim")
    if kind is FileKind.RELEASED:
        return Verdict(False, "it is restored if a group needs it, and deleted after the grace period", reclaiming)
    if kind is FileKind.DELETING:
        return Verdict(False, "its deletion is recorded; the next pass completes it", reclaiming)
    if kind is FileKind.WHOLE:
        return Verdict(False, "it may be the only copy of records; the next pass of wald-reclaim decides", reclaiming)
    base = int(path.name[:20])
    try:
        statuses = Backlog(read_view(root, read_identity(root).log_id)).segments()
        status = next((each for each in statuses if each.segment.base_sequence == base), None)
    except Damaged as error:
        return Verdict(False, f"its contents are unknown: {error.message}", error.hint)
    if status is None or status.segment.path != path:
        return Verdict(False, "its sealed form is there; the sealer removes it")
    return _judged(root, status, reclaiming)


def _judged(root: Root, status: SegmentStatus, reclaiming: str) -> Verdict:
    from wald.segments.view import State

    if status.state is State.ACTIVE:
        return Verdict(False, "the daemon writes it", command_line(root.path, "cut"))
    if not status.readable:
        return Verdict(False, f"it is damaged: {status.problem}", status.hint)
    if status.pins:
        pin, more = next(iter(status.pins)), len(status.pins) - 1
        others = f", and {more} more" if more else ""
        why = f"{pin.route}/{pin.group} is at {pin.at} and needs it up to {pin.needs}{others}"
        return Verdict(False, why, command_line(root.path, "explain"))
    if status.is_newest:
        return Verdict(False, "it is the newest segment, after which the next start continues")
    return Verdict(False, "no group needs it, but only wald-reclaim records why it may be deleted", reclaiming)

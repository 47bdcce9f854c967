"""``wald inspect``: what a file is, what wrote it, whether it is intact, whether it may be deleted; or its content."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.checking.kinds import FileKind
from wald.cli.command import examples
from wald.cli.deletable import Verdict, may_delete
from wald.cli.options import json_option
from wald.cli.output import aligned, json_line
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.safe_open import read_object
from wald.status.schema import time_fields

if TYPE_CHECKING:
    from wald.checking.dump import Item
    from wald.checking.kinds import RecognizedFile

_DUMPED = {
    FileKind.IDENTITY,
    FileKind.HEAD,
    FileKind.TRANSFERS,
    FileKind.RAW,
    FileKind.SPARSE_INDEX,
    FileKind.SEALED,
    FileKind.RELEASED,
    FileKind.DELETING,
    FileKind.CURSOR,
    FileKind.LEDGER,
    FileKind.RECOVERY,
}
_SEGMENTS = {FileKind.RAW, FileKind.SEALED, FileKind.RELEASED, FileKind.DELETING, FileKind.SPARSE_INDEX}


@click.command(epilog=examples("wald inspect $WALD_ROOT/head", "wald inspect --content $WALD_ROOT/head"))
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--content", is_flag=True, help="Print the content of a file of the log instead, piece by piece.")
@click.option("--records", is_flag=True, help="The same, with the records in each batch.")
@json_option
def inspect(path: Path, content: bool, records: bool, as_json: bool) -> int:
    """Show what PATH is in a log or an archive: what wrote it, whether it is intact, whether it may be deleted.

    A segment is read completely. Nothing is changed or deleted. The exit code is 4 if the file is damaged; --content
    shows the position of the damage. With --content and --json, each piece is an object on a line.
    """
    if content or records:
        return _print_content(path, records=records, as_json=as_json)
    from wald.checking.kinds import kind_of

    path = Path(os.path.abspath(path))
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path}: no such file", hint=f"ls -la {path.parent}") from None
    root = _root_of(path)
    named = kind_of(str(path.relative_to(root.path)) if root else str(path), in_root=root is not None)
    damage = _damage(root, path, named)
    verdict = may_delete(root, path, named)
    by = _written_by(root, path, named)
    if as_json:
        click.echo(json_line("inspect", _fields(root, path, named, by, damage, verdict)))
    else:
        click.echo("\n".join(_text(root, path, named, by, damage, verdict)))
    return Damaged.exit_code if damage else 0


def _print_content(path: Path, *, records: bool, as_json: bool) -> int:
    from wald.checking.dump import dump

    damaged = False
    for item in dump(path, records=records):
        damaged = damaged or "damage" in item
        click.echo(json_line("inspect.content", _with_times(item)) if as_json else _line(item))
    return Damaged.exit_code if damaged else 0


def _root_of(path: Path) -> Root | None:
    """The log that the file is in; None if it is in none."""
    above = [path, *path.parents] if path.is_dir() else path.parents
    return next((Root(each) for each in above if (each / "log.json").is_file()), None)


def _damage(root: Root | None, path: Path, named: RecognizedFile) -> str | None:
    """What is wrong with the file, "" if nothing is; None if it has no content of its own to be checked by."""
    from wald.checking.dump import dump
    from wald.work.journal import read_beside_owner

    if named.kind is FileKind.FIFO:
        return "" if stat.S_ISFIFO(os.stat(path).st_mode) else "not a FIFO"
    if named.kind in (FileKind.BUNDLE, FileKind.DIGEST):
        return _bundle_damage(path.with_name(path.name.removesuffix(".sha256")))
    if named.kind is FileKind.WORK:
        read, _ = read_beside_owner(path)
        return f"offset {read.end}: {read.damage}" if read.damage else ""
    if named.kind not in _DUMPED:
        return None
    try:
        if root is not None and named.kind is FileKind.RAW:
            return _raw_damage(root, path)
        return next((str(item["damage"]) for item in dump(path) if "damage" in item), "")
    except (Damaged, InvalidInput) as error:
        return error.message.removeprefix(f"{path}: ")


def _raw_damage(root: Root, path: Path) -> str:
    """Of a raw segment, up to where it is durable: what follows may be half written."""
    from wald.checking.dump import dump
    from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes
    from wald.segments.view import State, read_view

    view = read_view(root, read_identity(root).log_id)
    segment = next((each for each in view.segments if each.path == path), None)
    if segment is None or view.state(segment) is not State.ACTIVE:
        return next((str(item["damage"]) for item in dump(path) if "damage" in item), "")
    opened = view.open(segment)
    try:
        for met in opened.batches(FIRST_BATCH, view.limit(segment)):
            if isinstance(met, DamagedBytes):
                return f"offset {met.offset}: {met.reason}"
    finally:
        opened.close()
    return ""


def _bundle_damage(bundle: Path) -> str:
    """By the digest beside it, as ``sha256sum -c`` checks it."""
    from hashlib import file_digest

    try:
        expected = bundle.with_name(f"{bundle.name}.sha256").read_text().split()[0]
        with bundle.open("rb") as opened:
            found = file_digest(opened, "sha256").hexdigest()
    except (OSError, IndexError) as error:
        return f"it cannot be compared: {error}"
    return "" if found == expected else f"its sha256 is {found}, not {expected}"


def _written_by(root: Root | None, path: Path, named: RecognizedFile) -> str:
    """The program and its version, as far as anything says; "" if nothing does."""
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
    """The life of the daemon that made a segment, and its version; "" if its header or index cannot be read."""
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


def _text(
    root: Root | None, path: Path, named: RecognizedFile, by: str, damage: str | None, verdict: Verdict
) -> Iterator[str]:
    rows = [("file", str(path)), ("is", named.kind.meaning)]
    rows += [("log", str(root.path))] if root else []
    rows += [(name, value) for name, value in (("route", named.route), ("group", named.group)) if value]
    rows.append(("written by", by or "not on record"))
    if damage is not None:
        rows.append(("whole", f"no: {damage}" if damage else "yes"))
    rows.append(("delete it?", f"{'yes' if verdict.allowed else 'no'}: {verdict.why}"))
    if verdict.instead:
        rows.append(("first" if verdict.allowed else "instead", verdict.instead))
    yield from aligned(rows, ())


def _fields(
    root: Root | None, path: Path, named: RecognizedFile, by: str, damage: str | None, verdict: Verdict
) -> dict[str, object]:
    return {
        "path": str(path),
        "root": str(root.path) if root else None,
        "kind": named.kind.name.lower().replace("_", "-"),
        "meaning": named.kind.meaning,
        "route": named.route or None,
        "group": named.group or None,
        "written_by": by or None,
        "whole": None if damage is None else not damage,
        "damage": damage or None,
        "may_delete": verdict.allowed,
        "why": verdict.why,
        "instead": verdict.instead or None,
    }


def _with_times(item: Item) -> Item:
    """Return an item with its times in readable form, too."""
    fields: Item = {}
    for key, value in item.items():
        fields |= time_fields(key[:-3], value) if key.endswith("_ns") else {key: value}
    return fields


def _line(item: Item) -> str:
    """``kind key=value …``; the value of a record, which may be any bytes, is shown as JSON."""
    parts = [str(item["kind"])]
    for key, value in item.items():
        if key != "kind" and value not in (None, [], {}):
            plain = isinstance(value, int) or (isinstance(value, str) and value.isalnum())
            parts.append(f"{key}={value if plain else json.dumps(value, ensure_ascii=False)}")
    return " ".join(parts)

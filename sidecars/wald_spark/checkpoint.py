"""``wald cursor from-checkpoint``: moves a cursor to the position of a stream, read from its checkpoint.

    commits/N    batch N is in the sink
    offsets/N    where batch N ends, a line for each source of the stream; written before the batch is read

A batch with offsets and without a commit does not count: Spark was stopped in it, and repeats it. Spark does not sync
these files, so after a power cut the last ones may be empty: the last batch with two complete files counts.

Both are text: the version, Spark's own JSON, and in offsets one line of each source: JSON as in
:mod:`wald_spark.offsets`, or the text of another source. In ``v2`` the name of the source and a colon precede it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

import wald
from wald.cli.command import examples
from wald.cli.cursors import print_moved
from wald.cli.options import group_option, root_option, route_argument
from wald.cli.output import stdout_is_a_report
from wald.errors import Damaged, NotFound, Refused, UnsupportedFormat
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.hints import command_line
from wald.retention.cursors import Cursor, new_group_warning, reject_leftover_journal
from wald.segments.continuity import Continuity, LastSeen
from wald_spark.locations import local_path
from wald_spark.offsets import BadOffsets, Offsets, Position, decode_offsets, is_offsets

_VERSIONS = ("v1", "v2", "v3")  # the last one of commits only


@click.command(
    epilog=examples(
        "wald cursor from-checkpoint /data/checkpoint access",
        "wald cursor from-checkpoint /data/checkpoint access --group spark",
    )
)
@click.argument("checkpoint", callback=lambda _, __, given: _directory(given))
@route_argument
@root_option
@group_option
@stdout_is_a_report
def from_checkpoint(root: Path, checkpoint: Path, route: str, group: str) -> None:
    """Move the cursor to the position in ROUTE that a Spark stream has committed in its CHECKPOINT directory."""
    log = wald.open(root)
    current = log.cursor(route, group)
    sequence = processed_by_stream(checkpoint, log.root, current, log_id=log.identity.log_id)
    reject_leftover_journal(log.root, log.cursor(route, group))
    news = new_group_warning(log.root, route, group)
    print_moved(log.set_cursor(route, sequence, group), news)


def _directory(given: str) -> Path:
    hint = "copy the checkpoint with its offsets and commits to this machine, and name the copy"
    return Path(local_path(given, hint=hint))


def processed_by_stream(checkpoint: Path, root: Root, cursor: Cursor, *, log_id: bytes) -> int:
    """Return the sequence to which ``cursor`` may move: the stream has processed every record up to it."""
    path, sources = _last_commit(checkpoint)
    log = log_id.hex()
    reading = [source for source in sources if log in source.logs]
    if not reading:
        raise NotFound(f"{path}: the stream does not read log {log}", hint=f"cat {root.identity}; cat {path}")
    of_route = [source.logs[log] for source in reading if source.routes is None or cursor.route in source.routes]
    if not of_route:
        routes = sorted({route for source in reading for route in source.routes or ()})
        raise Refused(
            f"{path}: the stream does not read route {cursor.route} of this log", hint=f"it reads {', '.join(routes)}"
        )
    _require_same_past(path, root, of_route, log_id)
    began, last = max(at.began for at in of_route), min(at.last for at in of_route)
    _require_nothing_skipped(path, root, cursor, Position(began, last))
    return last


def _require_same_past(path: Path, root: Root, positions: Sequence[Position], log_id: bytes) -> None:
    """Refuse a log with other records than the stream has read: a cursor would skip some of them."""
    setting = command_line(root.path, "cursor set")
    hint = f"{path} belongs to the log before the restore; move the cursor with {setting}, or use a new stream"
    for position in filter(lambda each: each.epoch, positions):
        Continuity(root, log_id, LastSeen(position.last, position.epoch, position.life), hint=hint).require()


def _require_nothing_skipped(path: Path, root: Root, cursor: Cursor, position: Position) -> None:
    """Refuse if the group has not processed records before the stream's beginning."""
    segments = list_segments(root).segments
    gone = segments[0].base_sequence - 1 if segments else position.began
    if max(cursor.effective, gone) < position.began:
        setting = command_line(root.path, f"cursor set {cursor.route} {position.began} --group {cursor.group}")
        raise Refused(
            f"{path}: the stream began behind record {position.began}, and group {cursor.group} has processed "
            f"{cursor.route} up to {cursor.effective}: neither has read the records in between",
            hint=f"{setting} says that it is done",
        )


def _last_commit(checkpoint: Path) -> tuple[Path, list[Offsets]]:
    """Return the offsets file of the last committed batch, and the offsets of wald sources in it."""
    commits, offsets = checkpoint / "commits", checkpoint / "offsets"
    if not offsets.is_dir():
        raise NotFound(f"{checkpoint}: not the checkpoint of a stream", hint=f"ls {checkpoint} shows its contents")
    numbers = sorted((int(path.name) for path in commits.glob("*") if path.name.isdecimal()), reverse=True)
    if not numbers:
        raise NotFound(
            f"{commits}: the stream has committed nothing yet", hint=f"ls {offsets} shows batches that began"
        )
    for number in numbers:
        path = offsets / str(number)
        if _complete_lines(commits / str(number)) and (lines := _complete_lines(path)):
            return path, [_decoded(path, line) for line in lines if is_offsets(_json(line))]
    raise Damaged(
        f"{commits / str(numbers[0])}: neither this batch nor an older one has complete offsets and a commit",
        hint=f"ls -l {commits} {offsets}",
    )


def _complete_lines(path: Path) -> list[str]:
    """Return the lines after the version of a file written by Spark; none if it is missing or truncated."""
    try:
        version, *lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    if not lines or not lines[0].startswith("{"):
        return []
    if version not in _VERSIONS:
        raise UnsupportedFormat(
            f"{path}: version {version!r} of Spark's format", hint="install a newer wald: docs/install.md"
        )
    parts = [line[line.index("{") :] for line in lines if "{" in line]
    return parts if all(_json(part) is not None for part in parts) else []


def _decoded(path: Path, line: str) -> Offsets:
    try:
        return decode_offsets(_json(line))
    except BadOffsets as error:
        raise Damaged(f"{path}: {error}", hint="install a newer wald, if one has written it") from error


def _json(text: str) -> object:
    """Return the value; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

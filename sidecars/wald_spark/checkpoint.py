"""Offsets of a stream in its logs, in Spark's checkpoint; and ``wald cursor from-checkpoint``, which reads them.

    commits/N    batch N is in the sink
    offsets/N    where batch N ends, one line per source of the stream; written before the batch is read

A batch with offsets but no commit does not count: Spark was stopped during it, and repeats it. Spark does not sync
these files, so after a power cut the last ones may be empty: the last batch with two complete files counts.

Both are text: the version, Spark's own JSON and, in offsets, one line per source: JSON as below, or the text of
another source. In ``v2`` the name of the source and a colon precede it.

    {"version": 1, "logs": {"<32 hex>": 700}, "began": {"<32 hex>": 250}, "routes": ["access"],
     "starts": {"<32 hex>": [3, "<life>"]}}

    logs     id of the log → the last delivered sequence; the stream continues with the next one
    began    id of the log → the sequence after which the stream began; equal to ``logs`` if nothing was delivered yet
    routes   the routes that are read; null for all
    starts   id of the log → epoch and life of the daemon when that sequence was read; missing in offsets of older
    versions

A stream may begin at any record of a log. It has not read earlier records, so ``began`` is kept. Equal offsets have
equal bytes, because Spark compares them as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click

import wald
from wald.cli.command import examples
from wald.cli.cursors import print_moved
from wald.cli.options import group_option, root_option, route_argument
from wald.cli.output import stdout_is_a_report
from wald.errors import Damaged, NotFound, Refused, UnsupportedFormat
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import SEQUENCE_MAX, is_route
from wald.hints import command_line
from wald.retention.cursors import Cursor, new_group_warning, reject_leftover_journal
from wald.segments.continuity import Continuity, LastSeen
from wald_spark.locations import local_path

VERSION = 1
_LOG = re.compile(r"[0-9a-f]{32}")
_CHECKPOINT_VERSIONS = ("v1", "v2", "v3")  # commits only: the last one


class BadOffsets(ValueError):
    """JSON that is not wald's offsets, or is from a newer version."""


class Position(NamedTuple):
    """Position in one log: records with began < sequence ≤ last were delivered."""

    began: int
    last: int
    epoch: int = 0  # of the daemon's start when ``last`` was read, as the life
    life: str = ""


@dataclass(frozen=True, slots=True)
class Offsets:
    """Positions of a stream: ``logs`` by id, empty before the first trigger; ``routes`` is None for all."""

    logs: Mapping[str, Position] = field(default_factory=dict)
    routes: frozenset[str] | None = None


def encode_offsets(offsets: Offsets) -> dict[str, object]:
    """Return ``offsets`` as JSON values, in a fixed order."""
    logs = sorted(offsets.logs.items())
    starts = {log: [position.epoch, position.life] for log, position in logs if position.epoch}
    encoded: dict[str, object] = {
        "version": VERSION,
        "logs": {log: position.last for log, position in logs},
        "began": {log: position.began for log, position in logs},
        "routes": None if offsets.routes is None else sorted(offsets.routes),
    }
    return encoded | {"starts": starts} if starts else encoded


def is_offsets(decoded: object) -> bool:
    """Return True if decoded JSON claims to be offsets of wald, of any version."""
    return isinstance(decoded, dict) and {"version", "logs", "began", "routes"} <= decoded.keys()


def decode_offsets(decoded: object) -> Offsets:
    if not isinstance(decoded, dict) or not is_offsets(decoded):
        raise BadOffsets("not the offsets of a stream that reads logs")
    if decoded["version"] != VERSION:
        raise BadOffsets(f"version {decoded['version']!r}, and this program knows {VERSION}")
    last, began, starts, routes = decoded["logs"], decoded["began"], decoded.get("starts", {}), decoded["routes"]
    if not isinstance(last, dict) or not isinstance(began, dict) or last.keys() != began.keys():
        raise BadOffsets("logs and began do not name the same logs")
    if not isinstance(starts, dict) or not starts.keys() <= last.keys():
        raise BadOffsets("starts names other logs")
    logs = {str(log): Position(_sequence(began[log]), _sequence(last[log]), *_start(starts.get(log))) for log in last}
    for log, position in logs.items():
        if not _LOG.fullmatch(log) or position.began > position.last:
            raise BadOffsets(f"log {log!r} cannot be at {position.last} after {position.began}")
    if routes is None:
        return Offsets(logs)
    if not isinstance(routes, list) or not all(isinstance(route, str) and is_route(route) for route in routes):
        raise BadOffsets(f"not a list of routes: {routes!r}")
    return Offsets(logs, frozenset(routes))


def _start(start: object) -> tuple[int, str]:
    if start is None:
        return 0, ""
    if not isinstance(start, list) or len(start) != 2 or not isinstance(start[1], str):
        raise BadOffsets(f"{start!r} is not a start of the daemon")
    return _sequence(start[0]), start[1]


def _sequence(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= SEQUENCE_MAX:
        raise BadOffsets(f"{value!r} is not a sequence")
    return value


def _directory(_: click.Context, __: click.Parameter, given: str) -> Path:
    hint = "copy the checkpoint with its offsets and commits to this machine, and name the copy"
    return Path(local_path(given, hint=hint))


@click.command(
    epilog=examples(
        "wald cursor from-checkpoint /data/checkpoint access",
        "wald cursor from-checkpoint /data/checkpoint access --group spark",
    )
)
@click.argument("checkpoint", callback=_directory)
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


def processed_by_stream(checkpoint: Path, root: Root, cursor: Cursor, *, log_id: bytes) -> int:
    """Return the sequence to which ``cursor`` may move: the stream has processed all records up to it."""
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
    setting = command_line(root.path, "cursor set")
    hint = f"{path} belongs to the log before the restore; move the cursor with {setting}, or use a new stream"
    for each in of_route:
        if each.epoch:  # in a log with records other than those the stream read, a cursor would skip some
            Continuity(root, log_id, LastSeen(each.last, each.epoch, each.life), hint=hint).require()
    began = max(each.began for each in of_route)
    segments = list_segments(root).segments
    gone = segments[0].base_sequence - 1 if segments else began
    if max(cursor.effective, gone) < began:
        setting = command_line(root.path, f"cursor set {cursor.route} {began} --group {cursor.group}")
        raise Refused(
            f"{path}: the stream began after record {began}, and group {cursor.group} has processed "
            f"{cursor.route} up to {cursor.effective}: neither has read the records in between",
            hint=f"{setting} marks them as processed",
        )
    return min(each.last for each in of_route)


def _last_commit(checkpoint: Path) -> tuple[Path, list[Offsets]]:
    commits, offsets = checkpoint / "commits", checkpoint / "offsets"
    if not offsets.is_dir():
        raise NotFound(f"{checkpoint}: not the checkpoint of a stream", hint=f"ls {checkpoint} shows its contents")
    numbers = sorted((int(path.name) for path in commits.glob("*") if path.name.isdecimal()), reverse=True)
    if not numbers:
        raise NotFound(
            f"{commits}: the stream has committed nothing yet", hint=f"ls {offsets} shows the batches that have begun"
        )
    for number in numbers:
        path = offsets / str(number)
        if _json_lines(commits / str(number)) and (found := _json_lines(path)):
            try:
                return path, [decode_offsets(each) for each in found if is_offsets(each)]
            except BadOffsets as error:
                raise Damaged(f"{path}: {error}", hint="install a newer wald, if one has written it") from error
    raise Damaged(
        f"{commits / str(numbers[0])}: neither this batch nor an older one has complete offsets and a commit",
        hint=f"ls -l {commits} {offsets}",
    )


def _json_lines(path: Path) -> list[object]:
    """Return the JSON in a file written by Spark; none if the file is missing or truncated."""
    try:
        version, *lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    if not lines or not lines[0].startswith("{"):
        return []
    if version not in _CHECKPOINT_VERSIONS:
        raise UnsupportedFormat(
            f"{path}: version {version!r} of Spark's format", hint="install a newer wald: docs/install.md"
        )
    try:
        return [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    except (ValueError, RecursionError):
        return []

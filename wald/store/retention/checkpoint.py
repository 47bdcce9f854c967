"""The checkpoint of a stream, as Spark keeps it in a directory: what of a log it has really processed.

    commits/N    batch N is in the sink
    offsets/N    where batch N ends, one line for each source of the stream; written before anything of it is read

A batch with offsets and without a commit does not count: Spark was killed in it, and will do it again. Spark does not
sync these files, so after a loss of power the last ones may be empty: then the last batch counts of which both are
whole.

Both are text: the version, JSON of Spark's, and in offsets what each source has to say: JSON as in
:mod:`wald.format.offsets`, or whatever others say. In ``v2``, the name of the source and a colon stand before that.
"""

from __future__ import annotations

import json
from pathlib import Path

from wald.errors import Damaged, NotFound, Refused, UnsupportedFormat, command_line
from wald.format.offsets import BadOffsets, Offsets, Position, decode_offsets, is_offsets
from wald.store.files.directory import Root, list_segments
from wald.store.retention.cursors import Cursor

_VERSIONS = ("v1", "v2", "v3")  # the last one of commits only


def processed_by_stream(checkpoint: Path, root: Root, cursor: Cursor, *, log_id: bytes) -> int:
    """The sequence to which ``cursor`` may move, as the stream has processed everything behind it up to there.

    Raises:
        NotFound: there is no checkpoint, nothing in it is committed, or no source of the stream reads this log.
        Refused: the stream does not read the cursor's route, or began behind records that the group has not processed.
        Damaged, UnsupportedFormat: what is committed cannot be told.
    """
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
    began, last = max(at.began for at in of_route), min(at.last for at in of_route)
    _require_all_read(path, root, cursor, Position(began, last))
    return last


def _require_all_read(path: Path, root: Root, cursor: Cursor, position: Position) -> None:
    """What the stream has not met, the group has processed, or nobody can any more."""
    segments = list_segments(root).segments
    gone = segments[0].base_sequence - 1 if segments else position.began
    if max(cursor.effective, gone) < position.began:
        setting = command_line(root.path, f"cursor set {cursor.route} {position.began} --group {cursor.group}")
        raise Refused(
            f"{path}: the stream began behind record {position.began}, and group {cursor.group} has processed "
            f"{cursor.route} up to {cursor.effective}: what lies between was read by neither",
            hint=f"{setting} says that it is done",
        )


def _last_commit(checkpoint: Path) -> tuple[Path, list[Offsets]]:
    """The offsets file of the last batch that is committed, and what it says of sources of ours."""
    commits, offsets = checkpoint / "commits", checkpoint / "offsets"
    if not offsets.is_dir():
        raise NotFound(f"{checkpoint}: not the checkpoint of a stream", hint=f"ls {checkpoint} shows what it is")
    numbers = sorted((int(path.name) for path in commits.glob("*") if path.name.isdecimal()), reverse=True)
    if not numbers:
        raise NotFound(f"{commits}: the stream has committed nothing yet", hint=f"ls {offsets} shows what it has begun")
    for number in numbers:
        path = offsets / str(number)
        if _whole_lines(commits / str(number)) and (lines := _whole_lines(path)):
            return path, [_decoded(path, line) for line in lines if is_offsets(_json(line))]
    raise Damaged(
        f"{commits / str(numbers[0])}: neither of this batch nor of an older one there are whole offsets and a commit",
        hint=f"ls -l {commits} {offsets}",
    )


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file of Spark's behind its version; none if it is not there, or was cut short.

    Raises:
        UnsupportedFormat: it is of a version that is not known.
    """
    try:
        version, *lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    if not lines or not lines[0].startswith("{"):
        return []
    if version not in _VERSIONS:
        raise UnsupportedFormat(f"{path}: version {version!r} of Spark's format", hint="pip install --upgrade wald")
    parts = [line[line.index("{") :] for line in lines if "{" in line]
    return parts if all(_json(part) is not None for part in parts) else []


def _decoded(path: Path, line: str) -> Offsets:
    try:
        return decode_offsets(_json(line))
    except BadOffsets as error:
        raise Damaged(f"{path}: {error}", hint="pip install --upgrade wald, if a newer one has written it") from error


def _json(text: str) -> object:
    """The value; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

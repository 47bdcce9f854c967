"""Whether an operator may delete a file of a log: a verdict for each kind, with the reason and what to do instead."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wald.checking.kinds import FileKind
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.locks import is_locked
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.checking.kinds import RecognizedFile
    from wald.retention.backlog import SegmentStatus


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Attributes:
        allowed: whether nothing is lost by it, and nothing goes wrong.
        instead: the command that does what is wanted, or has to come first; "" if there is none.
    """

    allowed: bool
    why: str
    instead: str = ""


_ALWAYS = {
    FileKind.ROOT: (False, "it is the log, with every record in it"),
    FileKind.IDENTITY: (False, "without it no program opens the log"),
    FileKind.LOCK: (False, "a second daemon could start beside the one that holds it; it has only a line in it"),
    FileKind.CLOCK: (False, "without it look-ups by time miss records, and append times that go back look damaged"),
    FileKind.TRANSFERS: (False, "without it a start may store again what a pipe held when the daemon was killed"),
    FileKind.SPARSE_INDEX: (True, "it is a hint; readers only take longer without it"),
    FileKind.DIRECTORY: (False, "the programs of the log need it, and what is in it"),
    FileKind.LEDGER: (False, "it proves what was deleted and why; without it, missing records count as lost"),
    FileKind.LEDGER_PART: (False, "it proves what was deleted and why; without it, missing records count as lost"),
    FileKind.QUARANTINE: (True, "no program reads it; but it is the only copy of these bytes"),
    FileKind.RECOVERY: (True, "only what it says is lost; the daemon keeps the last 32 by itself"),
    FileKind.KEYS: (False, "a request that is repeated would be stored twice if its records are reclaimed already"),
    FileKind.KEYS_LOCK: (False, "two gates could write the table of keys at a time; it is empty"),
    FileKind.FOREIGN: (True, "no program of wald made it or reads it; whether another needs it is not known"),
}
_ARCHIVED = {FileKind.ARCHIVED_ROUTE, FileKind.BAG, FileKind.BUNDLE, FileKind.DIGEST, FileKind.BAG_PART}
_ARCHIVE = "it may be the only copy of its records, and the chain of bundles would have a gap"


def may_delete(root: Root | None, path: Path, named: RecognizedFile) -> Verdict:
    """
    Args:
        root: of the log that the file is in; None: it is in none.
    """
    if root is None and named.kind is FileKind.FOREIGN:
        return Verdict(False, "it is in no log, and wald knows nothing of what needs it")
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
            return Verdict(False, "readers need it; only if it is damaged: the next start makes it again", "")
        case FileKind.HEAD:
            return Verdict(False, "readers see no record behind the newest complete segment until the next commit")
        case FileKind.SOCKET if runs:
            return Verdict(False, "producers could not reach the daemon")
        case FileKind.SOCKET:
            return Verdict(True, "no daemon listens on it; the next one makes its own")
        case FileKind.TEMPORARY if runs:
            return Verdict(False, "a program may be at work on it; the next start of the daemon removes it")
        case FileKind.TEMPORARY:
            return Verdict(True, "no daemon runs; the next one removes it")
        case FileKind.LEDGER_LOCK:
            return Verdict(False, "two programs could write the ledger at a time; it is empty")
    raise AssertionError(f"{path}: no verdict for {kind}")


def _of_route(root: Root, path: Path, named: RecognizedFile) -> Verdict:
    route, group = named.route, named.group
    match named.kind:
        case FileKind.ROUTE:
            why = "its segments would be pinned for a route that nothing shows, and its cursors would be lost"
            return Verdict(False, why, command_line(root.path, f"route retire {route}"))
        case FileKind.FIFO if not stat.S_ISFIFO(os.stat(path).st_mode):
            return Verdict(False, "it is no FIFO: what was written to it is not in the log", _append(root, path, route))
        case FileKind.FIFO:
            why = "producers would write into a plain file; the daemon makes the FIFO anew within a second"
            return Verdict(False, why, command_line(root.path, f"route retire {route}"))
        case FileKind.FOUND:
            return Verdict(False, "what is in it is not in the log", _append(root, path, route))
        case FileKind.CURSOR:
            why = f"group {group} would begin at the front, or its records would be freed"
            return Verdict(False, why, command_line(root.path, f"cursor remove {route} --group {group}"))
        case FileKind.HANDOVER | FileKind.COMMAND:
            why = "a start of wald-drain finishes what is in it; it may go only for good, while none runs"
            return Verdict(False, why, command_line(root.path, f"cursor remove {route} --group {group}"))
        case FileKind.WORK:
            why = "what is done above the cursor would be delivered again; and not while a worker runs"
            return Verdict(False, why, command_line(root.path, f"group remove {route} {group}"))
        case FileKind.ASK:
            return Verdict(False, "a command may be using it", command_line(root.path, f"group remove {route} {group}"))
        case FileKind.PIN:
            why = "RECLAIM could delete what an unfinished handover has sent, and the next start would send it again"
            return Verdict(False, why, command_line(root.path, f"group remove {route} {group}"))
        case FileKind.CURSORS:
            why = "the groups would begin at the front, or their records would be freed"
            return Verdict(False, why, command_line(root.path, f"cursor list {route}"))
        case FileKind.RETIRED:
            why = "it would take the route back, and hold records back again, without the daemon's knowledge"
            return Verdict(False, why, _add(root, route, ""))
    return Verdict(True, "a program that was killed has left it")  # a temporary


def _append(root: Root, path: Path, route: str) -> str:
    name = shlex.quote(str(path))
    return f"{command_line(root.path, f'append {route} {name}')} && rm {name}"


def _add(root: Root, route: str, option: str) -> str:
    return command_line(root.path, f"route add {route} {option}".strip())


def _segment(root: Root, path: Path, kind: FileKind) -> Verdict:
    from wald.retention.backlog import Backlog
    from wald.segments.view import read_view

    reclaiming = command_line(root.path, program="wald-reclaim")
    if kind is FileKind.RELEASED:
        return Verdict(False, "it comes back if a group needs it; it goes when the grace period is over", reclaiming)
    if kind is FileKind.DELETING:
        return Verdict(False, "its deletion is decided and recorded; the next look carries it out", reclaiming)
    if kind is FileKind.WHOLE:
        return Verdict(
            False, "it may be all that is left of records; the next pass of wald-reclaim decides", reclaiming
        )
    base = int(path.name[:20])
    try:
        statuses = Backlog(read_view(root, read_identity(root).log_id)).segments()
        status = next((each for each in statuses if each.segment.base_sequence == base), None)
    except Damaged as error:
        return Verdict(False, f"what it holds is not known: {error.message}", error.hint)
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
        return Verdict(False, "it is the newest segment, behind which the next start goes on")
    return Verdict(False, "no group needs it, but only wald-reclaim records why it may go", reclaiming)

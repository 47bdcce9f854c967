"""The root and the log in it, read only: identity, permissions, names, settings, daemon."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from wald.cli.doctor.findings import Facts, Paths, Verdict, fail, ok, skipped, unknown, warn
from wald.cli.doctor.medium import Space
from wald.client.session import status as ask_status
from wald.errors import Damaged, InvalidInput, NotPermitted, WaldError
from wald.files.disk import Disk, free_bytes, total_bytes
from wald.files.identity import check_root, read_identity
from wald.files.layout import TEMPORARY, Root, known_names
from wald.files.locks import is_locked
from wald.files.routes import fifo_problems, has_fifo
from wald.files.safe_open import read_regular
from wald.format.names import CURSOR_SUFFIX, CURSORS, is_group_file
from wald.hints import group_name, user_name
from wald.retention.backlog import Backlog
from wald.segments.view import read_view
from wald.settings import Config, load
from wald.writing.daemon_lock import describe_daemon
from wald.writing.disk_budget import sizes_for
from wald.writing.run_reports import last_daemon_fields

_SOCKET_PATH_BYTES = 107
_NAMES_MAX = 20_000
_REWRITTEN = frozenset({"head", "lock", "transfers"})  # changed in place, so a second name shows the changes
_RENAMING = stat.S_IWOTH | stat.S_ISVTX  # of a directory in which every user may rename files: only the first
_IS_TYPE = {"wald.sock": stat.S_ISSOCK, "in": stat.S_ISFIFO}


class Kind(StrEnum):
    """Kind of directory or file at the path of the root."""

    LOG = "log"
    EMPTY = "empty"
    ABSENT = "absent"
    UNFIT = "unfit"
    """No log can be created there, or the existing one cannot be opened."""
    HIDDEN = "hidden"
    """This user may not look there, so a log may exist."""


@dataclass(frozen=True, slots=True)
class Place(Facts):
    """Directory or file at the path of the root."""

    kind: Kind
    at: str  # the directory examined: the root, or its nearest existing parent
    error: str = ""
    hint: str = ""
    removed: int = 0  # number of scratch directories that killed doctors left, and that were removed

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(self.error, self.hint)
        if self.kind is Kind.ABSENT:
            return ok(f"does not exist yet; its parent {self.at} is examined")
        if self.kind is Kind.EMPTY:
            return ok("an empty directory, which can become a log")
        return ok("a log")


def place(root: Path) -> Place:
    found = Path(os.path.abspath(root))
    while not os.path.lexists(found):
        found = found.parent
    at = found
    while not os.path.isdir(at):  # a link may lead to a place that this user may not see
        at = at.parent
    try:
        check_root(root)
    except PermissionError as error:
        refused = NotPermitted.from_error(error)
        return Place(Kind.HIDDEN, str(at), refused.message, refused.hint)
    except NotPermitted as error:
        return Place(Kind.HIDDEN, str(at), error.message, error.hint)
    except WaldError as error:
        return Place(Kind.UNFIT, str(at), error.message, error.hint)
    except OSError as error:
        return Place(Kind.UNFIT, str(at), f"{error.filename or root}: {error.strerror}", f"ls -ld {root}")
    if at != found:
        return Place(Kind.UNFIT, str(at), f"{found}: not a directory", f"ls -l {found}")
    if not os.path.lexists(root):
        return Place(Kind.ABSENT, str(at))
    return Place(Kind.LOG if Root(root).identity.exists() else Kind.EMPTY, str(at))


@dataclass(frozen=True, slots=True)
class Settings(Facts):
    """Variables WALD_… and the file of --config."""

    path: str
    error: str = ""
    hint: str = ""

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(self.error, self.hint)
        if not self.path:
            return ok("no file was given; the variables and the defaults are valid")
        return ok(f"{self.path} is valid")


def settings(path: Path | None) -> tuple[Settings, Config]:
    """Load the settings; return the defaults if the daemon would refuse to start with them."""
    name = "" if path is None else str(path)
    try:
        return Settings(name), load(path, os.environ)
    except InvalidInput as error:
        return Settings(name, error.message, error.hint), load(None, {})


@dataclass(frozen=True, slots=True)
class User(Facts):
    """This user, and the owner that the daemon runs as."""

    user: str
    owner: str
    may_write: bool
    is_read_only: bool = False

    def verdict(self, paths: Paths) -> Verdict:
        as_owner = f"runuser -u {self.owner} -- {paths.wald} doctor"
        if self.is_read_only:
            return skipped("the file system is mounted read-only, so nothing was tested")
        if not self.may_write:
            return unknown(
                f"user {self.user} may not write here, so nothing was tested; the owner is {self.owner}", as_owner
            )
        if self.user != self.owner:
            return unknown(
                f"limits and permissions of user {self.user} may differ from those of the owner, {self.owner}", as_owner
            )
        return ok(f"user {self.user}, who owns the directory")


def user(place: Place) -> User:
    at = Path(place.at)
    me = user_name(os.geteuid())
    may_write = os.access(at, os.W_OK | os.X_OK, effective_ids=True)
    owner = me if place.kind is Kind.ABSENT and may_write else user_name(at.stat().st_uid)
    return User(me, owner, may_write, bool(os.statvfs(at).f_flag & os.ST_RDONLY))


@dataclass(frozen=True, slots=True)
class Rights(Facts):
    """Users who may change or replace the directory, by its mode and those of its parents."""

    mode: str
    owner: str
    group: str
    is_open: bool = False  # True if users outside its group may write to the directory itself
    open_above: tuple[str, ...] = ()  # parents in which users outside the group may rename the directory
    strange_above: tuple[str, ...] = ()  # parents that belong to neither root nor the owner

    def verdict(self, paths: Paths) -> Verdict:
        parents = ", ".join(self.open_above or self.strange_above)
        if self.is_open:
            return fail(
                f"mode {self.mode}: every user may add files here and remove those of the log", f"chmod o-w {paths.at}"
            )
        if self.open_above:
            message = f"every user may rename files in {parents}, and so replace the log"
            return fail(message, f"chmod o-w {parents}, or chmod +t {parents}")
        if self.strange_above:
            message = f"{parents} belongs to a user who is neither root nor {self.owner}, and who may replace the log"
            return warn(message, f"chown root {parents}, or put the root elsewhere")
        return ok(f"mode {self.mode}, {self.owner}:{self.group}; no other user may replace it")


def rights(place: Place) -> Rights:
    at = Path(os.path.realpath(place.at))
    status = at.stat()
    is_absent = place.kind is Kind.ABSENT
    owner = os.geteuid() if is_absent else status.st_uid
    above = [at, *at.parents] if is_absent else [*at.parents]
    return Rights(
        mode=f"{stat.S_IMODE(status.st_mode):04o}",
        owner=user_name(status.st_uid),
        group=group_name(status.st_gid),
        is_open=not is_absent and bool(status.st_mode & stat.S_IWOTH),
        open_above=tuple(str(each) for each in above if each.stat().st_mode & _RENAMING == stat.S_IWOTH),
        strange_above=tuple(str(each) for each in above if each.stat().st_uid not in (0, owner)),
    )


@dataclass(frozen=True, slots=True)
class SocketPath(Facts):
    """Length of the socket's path."""

    path: str
    path_bytes: int

    def verdict(self, paths: Paths) -> Verdict:
        if self.path_bytes > _SOCKET_PATH_BYTES:
            message = f"{self.path} has {self.path_bytes} bytes, but a socket may have 107: the daemon does not start"
            hint = "export WALD_SOCKET=/run/wald.sock, for the daemon and for commands; or use a shorter root"
            return fail(message, hint)
        return ok(f"{self.path}, {self.path_bytes} of 107 bytes")


def socket_path(root: Path, given: Path | None, config: Config) -> SocketPath:
    path = str(given or config.socket or os.path.abspath(Root(root).socket))
    return SocketPath(path, len(os.fsencode(path)))


@dataclass(frozen=True, slots=True)
class Running(Facts):
    """Daemon that holds the root, if any, and its response."""

    holder: str = ""  # as named in its lock file; empty if no daemon holds the root
    answers: bool | None = None  # True if it answered STAT in time; None if this user may not query it
    degraded_by: str = ""  # the reason why it accepts no input; empty if it does

    def verdict(self, paths: Paths) -> Verdict:
        if not self.holder:
            return ok("no daemon holds the root")
        if self.answers is None:
            return unknown(
                f"{self.holder}; this user may not query it", f"join the group of the socket: ls -l {paths.root}"
            )
        if not self.answers:
            message = f"{self.holder}, but it does not answer: it is starting, hangs, or listens elsewhere"
            return fail(message, f"{paths.wald} head; journalctl -u wald; or name its socket with --socket")
        if self.degraded_by:
            message = f"{self.holder}; it accepts no input because of {self.degraded_by}"
            return fail(message, f"{paths.wald} explain; df -h {paths.at}")
        return ok(f"{self.holder}; it answers")


def running(root: Path, socket: Path) -> tuple[Running, Mapping[str, Any]]:
    here = Root(root)
    if not is_locked(here.lock, Disk()):
        return Running(), {}
    holder = describe_daemon(last_daemon_fields(here))
    if socket.exists() and not os.access(socket, os.W_OK, effective_ids=True):
        return Running(holder), {}
    answer = ask_status(socket)
    return Running(holder, bool(answer), str(answer.get("degraded_by") or "")), answer


def daemon_pid(root: Path, answer: Mapping[str, Any]) -> int:
    """Return the process id of the daemon that holds the root; 0 if unknown."""
    if isinstance(pid := answer.get("pid"), int):
        return pid
    try:
        found = json.loads(read_regular(Root(root).lock)).get("pid")
    except (OSError, ValueError, AttributeError, Damaged):
        return 0
    return found if isinstance(found, int) else 0


def count_fifos(root: Path) -> int:
    here, count = Root(root), 0
    for name in here.route_names():
        with suppress(OSError):
            count += has_fifo(here, name)
    return count


def space(place: Place, config: Config, answer: Mapping[str, Any]) -> Space:
    """Return free and needed space; a running daemon's numbers include its preallocated segments."""
    at, is_log = Path(place.at), place.kind is Kind.LOG
    if is_log and Root(at).segments.is_dir():
        at = Root(at).segments  # may be a separate mount
    sizes = sizes_for(total_bytes(at), segment_max_bytes=config.segment_max_bytes, free_space_min=config.free_space_min)
    pinned, full_in = _backlog(Root(Path(place.at))) if is_log else (None, None)
    return Space(
        free_bytes=free_bytes(at),
        needed_bytes=int(answer.get("needed_bytes", sizes.needed_bytes)),
        segment_bytes=int(answer.get("segment_max_bytes", sizes.segment_bytes)),
        segment_max_bytes=config.segment_max_bytes,
        pinned_bytes=pinned,
        full_in_seconds=full_in,
    )


def _backlog(root: Root) -> tuple[int | None, float | None]:
    try:
        backlog = Backlog(read_view(root, read_identity(root).log_id))
        pinned = sum(status.stored_bytes for status in backlog.segments() if status.pins)
    except (WaldError, OSError):  # reported by the checks of the root and of its files
        return None, None
    growth = backlog.growth_meter.growth(now_ns=time.time_ns())
    return pinned, growth.seconds_until_full(backlog.free_bytes) if growth else None


@dataclass(frozen=True, slots=True)
class Files(Facts):
    """Links, devices, owners and modes in the log's directories, and names that are not wald's."""

    examined: int
    unsafe: tuple[str, ...] = ()  # files that another user could have planted or may change, each with the reason
    unsafe_cursors: tuple[str, ...] = ()  # the same for cursors and for directories that contain cursors
    strange: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()  # problems of FIFOs, as reported by `wald explain`
    is_complete: bool = True

    def verdict(self, paths: Paths) -> Verdict:
        if self.unsafe_cursors:
            return fail(
                _shorten(self.unsafe_cursors),
                f"leave it in place and repair it with chown or chmod, a cursor with {paths.wald} cursor set --rewind: "
                "wald-reclaim deletes records that a group without a cursor has not read",
            )
        if self.unsafe:
            return fail(_shorten(self.unsafe), f"ls -la {paths.root}, and move away files that you did not put there")
        if self.strange:
            message = f"not wald's: {_shorten(self.strange)}"
            return warn(message, f"move it out of {paths.root}; no program deletes it, and it uses space")
        if self.troubles:
            return warn(_shorten(self.troubles), f"{paths.wald} explain")
        if not self.is_complete:
            return unknown(f"{self.examined} names examined, but there are more")
        return ok(f"{self.examined} names, all of them wald's")


def _shorten(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more


def files(root: Path) -> Files:
    here = Root(root)
    owner = root.stat().st_uid
    examined, is_complete = 0, True
    unsafe, unsafe_cursors, strange = list[str](), list[str](), list[str]()
    for directory, is_known in known_names(here):
        entries = _entries(directory)
        is_complete = is_complete and entries is not None
        for entry in entries or ():
            if examined >= _NAMES_MAX:
                is_complete = False
                break
            examined += 1
            if reason := _reason(entry, owner):
                (unsafe_cursors if _may_hold_cursors(here, entry) else unsafe).append(f"{entry.path}: {reason}")
            elif not is_known(entry.name):
                strange.append(entry.path)
    try:
        troubles = tuple(message for _, message in fifo_problems(here))
    except OSError:
        troubles, is_complete = (), False
    return Files(examined, tuple(unsafe), tuple(unsafe_cursors), tuple(strange), troubles, is_complete)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]] | None:
    """List a directory, not through a link; None if it cannot be listed."""
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        return iter(sorted(os.scandir(directory), key=lambda entry: entry.name))
    except FileNotFoundError:
        return iter(())
    except OSError:  # not readable, or not a directory, which its own entry reports
        return None


def _may_hold_cursors(root: Root, entry: os.DirEntry[str]) -> bool:
    """Return True if losing this file may cost a group its position."""
    is_directory = entry.name == CURSORS or Path(entry.path) == root.routes
    is_route = Path(entry.path).parent == root.routes and entry.is_dir(follow_symlinks=False)
    return entry.name.endswith(CURSOR_SUFFIX) or is_directory or is_route


def _reason(entry: os.DirEntry[str], owner: int) -> str:
    """Return why a file is unsafe; "" if it is safe."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # removed in the meantime
        return ""
    mode = status.st_mode
    is_expected = entry.name in _IS_TYPE and _IS_TYPE[entry.name](mode)
    if stat.S_ISLNK(mode):
        with suppress(OSError):
            if entry.name == "in" and status.st_uid in (0, owner) and stat.S_ISFIFO(entry.stat().st_mode):
                return ""  # systemd creates the FIFO of this route
        return "a symbolic link"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_expected):
        return "a FIFO, a socket or a device that wald did not create"
    may_be_of_cursor_owner = is_group_file(entry.name) or entry.name.endswith(TEMPORARY)
    if status.st_uid not in (0, owner) and not may_be_of_cursor_owner:
        return f"belongs to user {status.st_uid}, not to the log's owner, {owner}"
    if mode & stat.S_IWOTH and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"mode {stat.S_IMODE(mode):04o}: every user may change it"
    if entry.name in _REWRITTEN and status.st_nlink > 1:
        return "has a second name, under which it may be changed"
    return ""

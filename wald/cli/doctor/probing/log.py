"""The root and the log in it, read only: identity, rights, names, daemon, room."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wald.cli.doctor.judging.log import (
    Kind,
    Place,
    Rights,
    Running,
    Settings,
    SocketPath,
    User,
)
from wald.cli.doctor.judging.medium import Mount
from wald.cli.doctor.judging.space import Inodes, Quota, Space
from wald.client.connection import status as asked
from wald.errors import Damaged, InvalidInput, NotPermitted, WaldError
from wald.files.disk import Disk, free_bytes, total_bytes
from wald.files.identity import check_root, read_identity
from wald.files.layout import Root
from wald.files.locks import is_locked
from wald.files.routes import has_fifo
from wald.files.safe_open import read_regular
from wald.hints import group_name, user_name
from wald.retention.backlog import Backlog
from wald.segments.view import read_view
from wald.settings import Config, load
from wald.writing.daemon_lock import describe_daemon
from wald.writing.disk_budget import sizes_for
from wald.writing.run_reports import last_daemon_fields

_QUOTAS = ("usrquota", "grpquota", "prjquota", "usrjquota", "grpjquota", "uquota", "gquota", "pquota", "quota")


def settings(path: Path | None) -> tuple[Settings, Config]:
    """What the daemon would start with; with the defaults where it would not start."""
    name = "" if path is None else str(path)
    try:
        return Settings(name), load(path, os.environ)
    except InvalidInput as error:
        return Settings(name, error.message, error.hint), load(None, {})


def place(root: Path) -> Place:
    """What is at the path."""
    at = found = _nearest(root)
    while not os.path.isdir(at):  # also where a link leads to what this user may not see
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


def _nearest(path: Path) -> Path:
    """What there is at ``path``, or nearest above it."""
    found = Path(os.path.abspath(path))
    while not os.path.lexists(found):
        found = found.parent
    return found


def user(place_: Place) -> User:
    """Whether this user may write there; a root that is absent would belong to this user."""
    at = Path(place_.at)
    me = user_name(os.geteuid())
    may_write = os.access(at, os.W_OK | os.X_OK, effective_ids=True)
    owner = me if place_.kind is Kind.ABSENT and may_write else user_name(at.stat().st_uid)
    return User(me, owner, may_write, bool(os.statvfs(at).f_flag & os.ST_RDONLY))


def rights(place_: Place) -> Rights:
    """Modes and owners, from the directory up."""
    at = Path(os.path.realpath(place_.at))
    there = at.stat()
    owner = os.geteuid() if place_.kind is Kind.ABSENT else there.st_uid
    above = [at] if place_.kind is Kind.ABSENT else []
    above += at.parents
    return Rights(
        mode=f"{stat.S_IMODE(there.st_mode):04o}",
        owner=user_name(there.st_uid),
        group=group_name(there.st_gid),
        is_open=place_.kind is not Kind.ABSENT and bool(there.st_mode & stat.S_IWOTH),
        open_above=tuple(str(each) for each in above if _is_open(each.stat())),
        strange_above=tuple(str(each) for each in above if each.stat().st_uid not in (0, owner)),
    )


def _is_open(status: os.stat_result) -> bool:
    """Whether every user may rename what is in a directory."""
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


def socket_path(root: Path, named: Path | None, config: Config) -> SocketPath:
    """Of the option, the setting, or the root."""
    path = str(named or config.socket or os.path.abspath(Root(root).socket))
    return SocketPath(path, len(os.fsencode(path)))


def fifos(root: Path) -> int:
    """How many the log has."""
    here = Root(root)
    return sum(_safe_has_fifo(here, name) for name in here.route_names())


def _safe_has_fifo(root: Root, route: str) -> bool:
    try:
        return has_fifo(root, route)
    except OSError:
        return False


def running(root: Path, socket: Path) -> tuple[Running, Mapping[str, Any]]:
    """The daemon, and its answer to STAT; ``Any``: it is JSON."""
    here = Root(root)
    if not is_locked(here.lock, Disk()):
        return Running(), {}
    who = describe_daemon(last_daemon_fields(here))
    if socket.exists() and not os.access(socket, os.W_OK, effective_ids=True):
        return Running(who), {}
    answer = asked(socket)
    return Running(who, bool(answer), str(answer.get("degraded_by") or "")), answer


def daemon_pid(root: Path, answer: Mapping[str, Any]) -> int:
    """The process of the daemon that holds the root; 0 if it is not known."""
    if isinstance(pid := answer.get("pid"), int):
        return pid
    try:
        found = json.loads(read_regular(Root(root).lock)).get("pid")
    except (OSError, ValueError, AttributeError, Damaged):
        return 0
    return found if isinstance(found, int) else 0


def space(place_: Place, config: Config, answer: Mapping[str, Any]) -> Space:
    """Of a running daemon its own numbers, which count what it has allocated already."""
    at = Path(place_.at)
    if place_.kind is Kind.LOG and Root(at).segments.is_dir():
        at = Root(at).segments  # may be a separate mount
    sizes = sizes_for(total_bytes(at), segment_max_bytes=config.segment_max_bytes, free_space_min=config.free_space_min)
    pinned, full_in = _backlog(Path(place_.at)) if place_.kind is Kind.LOG else (None, None)
    return Space(
        free_bytes=free_bytes(at),
        needed_bytes=int(answer.get("needed_bytes", sizes.needed_bytes)),
        segment_bytes=int(answer.get("segment_max_bytes", sizes.segment_bytes)),
        segment_max_bytes=config.segment_max_bytes,
        pinned_bytes=pinned,
        full_in_seconds=full_in,
    )


def _backlog(root: Path) -> tuple[int | None, float | None]:
    """Bytes that groups pin, and seconds until the disk is full."""
    here = Root(root)
    try:
        backlog = Backlog(read_view(here, read_identity(here).log_id))
        pinned = sum(status.stored_bytes for status in backlog.segments() if status.pins)
    except (WaldError, OSError):  # the checks of the root and of its files report it
        return None, None
    growth = backlog.growth_meter.growth(now_ns=time.time_ns())
    return pinned, growth.seconds_until_full(backlog.free_bytes) if growth else None


def inodes(at: Path) -> Inodes:
    """For a user who is not root."""
    status = os.statvfs(at)
    return Inodes(status.f_favail, status.f_files)


def quota(mount: Mount) -> Quota:
    """As the mount has it."""
    return Quota(tuple(each for each in mount.options if each.partition("=")[0] in _QUOTAS))

"""Hints: the command to type, or the thing to do, for each case of an error.

An error has a message, a case and facts: ``Refused("…: beyond the head", case="cursor-beyond-head", root=root)``. Each
case has a template, a text or a function of the facts. In a text, ``{name}`` is a fact, quoted if it is a path;
``{wald}`` and ``{wald_reclaim}`` are programs, with ``--root`` if the facts include ``root``.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hint_for(case: str, /, **facts: Any) -> str:
    """Return the hint for a case; "" for an empty case.

    >>> hint_for("no-log", root="/srv/my log")
    "wald --root '/srv/my log' run creates one"
    """
    template = TEMPLATES[case]
    if not isinstance(template, str):
        return template(**facts)
    programs = {name: command_line(facts.get("root"), program=program) for name, program in PROGRAMS.items()}
    quoted = {name: quote(fact) if isinstance(fact, os.PathLike) else fact for name, fact in facts.items()}
    return template.format_map(quoted | programs)


def command_line(root: str | os.PathLike[str] | None, arguments: str = "", *, program: str = "wald") -> str:
    """Return a command to type, with ``--root`` quoted for the shell; ``root`` is None if unknown."""
    option = "" if root is None else f" --root {quote(root)}"
    return f"{program}{option} {arguments}".rstrip()


def quote(path: str | os.PathLike[str]) -> str:
    """Quote a path or text for the shell."""
    return shlex.quote(os.fspath(path))


def room_commands(*paths: str | os.PathLike[str], error: OSError | None = None) -> str:
    """Return commands that show space and inodes, or raise the file size limit."""
    if error is not None and error.errno == errno.EFBIG:
        return "ulimit -f unlimited, or LimitFSIZE=infinity in a unit"
    at = "".join(f" {quote(path)}" for path in paths)
    return f"df -h{at}; df -i{at}"


def user_name(user_id: int) -> str:
    """Return the user's name, or else the number as text."""
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def group_name(group_id: int) -> str:
    """Return the OS group's name, or else the number as text."""
    import grp

    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


def _permission_denied(path: Path) -> str:
    """Return a command that grants access, or the user to run as."""
    at, me = quote(path), os.geteuid()
    try:
        status, directory = path.stat(), path.parent.stat()
    except OSError:  # the file was removed in the meantime
        return f"ls -ld {at}"
    if me == 0:
        return f"lsattr -d {at}; ls -ld {at}"  # no mode keeps root out
    if me == status.st_uid:
        return f"chmod u+rwX {at}; ls -ld {at}"
    if status.st_uid == 0 and directory.st_uid == me:  # root ran a program on this user's log
        return f"chown {user_name(me)} {at}, as root; ls -ld {at}"
    user = user_name(status.st_uid)
    if not status.st_mode & stat.S_IRWXG or status.st_gid in {os.getegid(), *os.getgroups()}:
        return f"run it as user {user}; ls -ld {at}"
    return f"run it as user {user}, or in group {group_name(status.st_gid)}; ls -ld {at}"


def _records_missing(
    root: Path,
    *,
    first: int,
    last: int,
    route: str,
    group: str | None,
    archive: str | None,
    archived: int,
    stop: str | None,
    form: str,
    command: tuple[str, str],
) -> str:
    """Return commands that restore reclaimed records from an archive, or continue after them.

    ``archived`` is the last archived record, ``stop`` the reader's last sequence or time, and ``command`` the reader's
    words before and after the range.
    """
    ways = []
    if archive is not None:
        ways.append(f"wald-archive restore {quote(archive)} {route} --from {first} --to {archived}{form}")
    if group is not None:
        ways.append(f"{command_line(root, f'cursor set {route} {last} --group {group}')} skips them")
    elif stop is None or not stop.isdecimal() or int(stop) > last:
        before, after = command
        span = f" --from {last + 1}" + (f" --to {quote(stop)}" if stop else "")
        ways.append(f"{command_line(root, before + span + after)} reads the rest")
    return "; ".join(ways) or f"{command_line(root, f'where {first}')} shows when and why"


def _route_retired_at_daemon(root: Path | None, route: str, socket: Path) -> str:
    adding, (owner, is_owner) = command_line(root, f"route add {route}"), _owner(socket)
    if is_owner:
        return f"{adding} reactivates it"
    return f"{adding} reactivates it; only {owner} and the writers in [routes.{route}] may do that"


def _request_denied(words: list[str], route: str, socket: Path) -> str:
    settings, (owner, is_owner) = f"writers in [routes.{route}] of the daemon's config", _owner(socket)
    match words:
        case "PUB", *_:
            return f"add the user to {settings}, and kill -HUP the daemon"
        case "ROUTE", "ADD", _, *options if any(option.startswith("mode=") for option in options):
            return "use --mode 0600, or leave it out" if is_owner else f"leave out --mode, or run it as {owner}"
        case "ROUTE", "ADD", _, *options if any(option.startswith("consumers=") for option in options):
            joining = f"usermod --append --groups GROUP {owner.removeprefix('user ')}, and restart the daemon"
            return joining if is_owner else f"leave out --consumers, or run it as {owner}"
        case "ROUTE", "ADD", _, *options if "fifo" in options:
            return f"run it as {owner}"
        case _:
            return f"run it as {owner}, or one of the {settings}"


def _owner(socket: Path) -> tuple[str, bool]:
    """Return the daemon's user, and True if this process has that user's rights."""
    try:
        owner = socket.stat().st_uid
    except OSError:
        return "the user that runs the daemon", False
    return f"user {user_name(owner)}", os.geteuid() in (0, owner)


def _room_and(root: Path | None, socket: Path, command: str) -> str:
    free = room_commands(socket.parent)
    return free if root is None else f"{free}; {command_line(root, command)}"


def _daemon_in_the_way(lock: Path, holders: list[int]) -> str:
    processes = " ".join(map(str, holders))
    stopping = f"kill {processes}" if processes else f"end the process that fuser -v {quote(lock)} shows"
    return f"stop the daemon: systemctl stop wald.socket wald, if systemd runs it; otherwise {stopping}"


_IDENTITY_UNREADABLE = "stop the daemon and wald-reclaim; then {wald} repair restores it from the segments"
_NOTHING_LOST = "nothing was acknowledged after that, and no acknowledged record is lost"
PROGRAMS = {"wald": "wald", "wald_reclaim": "wald-reclaim"}

TEMPLATES: dict[str, str | Callable[..., str]] = {
    "": "",
    # any file
    "wrong-type-of-file": "ls -ld {path}; move it away, and restore the original",
    "not-a-regular-file": "ls -l {path}; move it away, and restore the original",
    "symbolic-link": "rm {path}, and move its target there, or mount it there: mount --bind {target} {path}",
    "permission-denied": _permission_denied,
    "newer-format": "install a newer wald: docs/install.md",
    # root and identity
    "no-log": "{wald} run creates one",
    "no-log-to-open": "findmnt -T {root} shows whether its file system is mounted; {wald} init creates one",
    "not-a-log": "--root takes the directory of a log, which has a log.json; to find one: find {root} -name log.json",
    "not-a-directory": "--root takes the path of a directory, which need not exist",
    "not-empty": "--root takes a new or an empty directory",
    "identity-missing": f"log.json is missing: {_IDENTITY_UNREADABLE}",
    "identity-unreadable": _IDENTITY_UNREADABLE,
    "root-unreadable": "ls -l {root}",
    "segments-directory-gone": "ls -l {root}; restore it from a backup",
    "clock-step-damaged": "restore {path} from a backup",
    "ledger-damaged": "restore it from a backup; or, without a daemon, {wald} repair restarts it with its intact lines",
    "too-many-cursor-files": "to see who owns them: ls -l {directory}",
    "ledger-locked": "fuser -v {path} names it; if that is a service: systemctl stop {owner}",
    # routes and cursor owners
    "no-such-route": "{wald} routes lists them; {wald} route add {route} creates it",
    "fifo-is-link": "chmod {mode:04o} {target}",
    "cursor-left-by-other-user": "run this command as {user} who created the file; ls -l {path}",
    "file-of-other-user": "rm {path}, which another user has left; ls -l {path}",
    "cursor-owner-needed": "run it as user {user}; or, as {user}, allow your group to keep cursors here: "
    "{wald} route add {route} --consumers GROUP",
    "cursor-group-needed": "usermod --append --groups {group} {user}, and log in again; ls -ld {directory}",
    "group-unavailable": "usermod --append --groups {group} {user}, and restart the daemon",
    # segments and head
    "sealed-segment-damaged": "wald inspect --content {path} shows its readable part; "
    "restore the file from an archive or a backup",
    "raw-segment-damaged": "wald inspect --content {path} shows its contents",
    "segment-truncated": "restore it from a backup; otherwise, {wald} repair gives up the lost records",
    "segment-misnamed": "move it to where it belongs, or out of {directory} if it is a copy",
    "segment-of-other-log": "move it out of {directory}",
    "segment-gone": "ls -l {directory}",
    "segment-file-missing": "ls -l {directory}; restore the file from an archive or a backup",
    "no-segment": "findmnt -T {path} shows whether it is mounted; mount it or restore it from a backup; "
    "otherwise, {wald} repair --accept-loss gives up these records",
    "segments-directory-empty": "to see whether it is mounted: findmnt -T {segments}",
    "no-segment-at-start": "findmnt -T {path} shows whether it is mounted; mount it or restore it from a backup, "
    "and restart the daemon; otherwise, {wald} repair --accept-loss gives up these records",
    "head-damaged": "{wald} repair rebuilds it from the segments, as does the next start of the daemon",
    "no-readable-head": "send a record to the running daemon, or start it: {wald} run",
    "log-gone": "findmnt -T {root}; ls -la {root}; restart this program once the log is back",
    "other-log": "restart this program to use it, or move the right log back",
    # "instead" is for programs that keep their positions elsewhere.
    "older-copy": lambda instead: instead or "restart this program: it then reads its positions from disk",
    # daemon start and lock
    "daemon-is-running": "stop it first, or send records to it: {wald} append ROUTE",
    "daemon-in-the-way": _daemon_in_the_way,
    "daemon-taken-over": "nothing was acknowledged after that; let the newer one run",
    "lock-file-removed": f"{_NOTHING_LOST}; keep tmp cleaners away from {{root}}, and restart the daemon",
    "lock-file-replaced": f"{_NOTHING_LOST}; if you restored the log from a backup, restart the daemon",
    "file-system-without-locks": "this file system has no locks: use a local one, or start only one daemon",
    "root-gone": "ls -ld {root}; put it back, or mount it; then restart the daemon",
    "foreign-file-in-place": lambda path, target: (
        f"{f'mv {quote(path)} {quote(target)}' if target else 'move it to where it belongs'}; then restart the daemon"
    ),
    "newest-segment-misnamed": "{wald} repair moves each file to its place; then restart the daemon",
    "segments-misnamed": "{wald} repair moves each file to its place",
    "newest-segment-refused": "move it out of {directory}, or restore its name; then restart the daemon",
    "append-times-ahead": "date -u; if the clock is wrong, correct it; if it is right, run wald clock step",
    "log-fills-disk": "{wald} explain names the groups that are behind; {wald_reclaim} deletes the rest",
    "other-files-fill-disk": "df -h {disk}; df -i {disk}; du -xhd1 around it shows what fills the disk; "
    "quota -v shows the limits",
    # positions and unreadable records
    "sequence-below-one": "sequences start at 1",
    "limit-below-zero": "--limit takes 0 or more",
    "not-a-time": lambda option, examples: ", ".join(f"{option} {example}" for example in examples),
    "start-unknown": "earliest, end, cursor, a sequence or a time",
    "start-appended-after-the-end": "record {first} is the first one there that was appended then or later",
    "stop-appended-before-the-start": "record {last} is the last one that was appended before then",
    "record-not-issued": "{wald} read{routes} --from end --follow waits for the next",
    "records-lost": "{wald} verify lists all damage",
    "records-lost-behind-cursor": "{wald} verify lists all damage; "
    "{wald} cursor set {route} {last} --group {group} continues after it",
    "records-missing": _records_missing,
    "on-missing-unknown": 'on_missing must be "error" or "skip"',
    # cursors and retention
    "illegal-name": "use a letter or digit, then up to {more} of letters, digits, '.', '_' and '-'",
    "group-is-new": "to remove the group: {wald} cursor remove {route} --group {group}",
    "work-group-is-new": "to remove the group: {wald} group remove {route} {group}",
    "cursor-not-permitted": "chmod a+r {path}",
    "cursor-misnamed": "rename or remove the file: ls -l {path}",
    "records-released": "to restore them: {wald_reclaim}",
    "records-deleted": "to see why: {wald} where {record}",
    "no-cursor": "{wald} cursor list {route}",
    "cursor-of-other-user": "use another group; {wald} cursor remove {route} --group {group} removes this one; "
    "root may move it with cursor set",
    "cursor-unusable": "{wald} cursor set {route} SEQUENCE --group {group} --rewind",
    "cursor-below-zero": "0 means that nothing has been processed",
    "cursor-beyond-head": "{wald} head shows the last durable record",
    "rewind-needed": "{wald} cursor set {route} {sequence} --group {group} --rewind",
    "journal-in-the-way": "rm {path}, while they do not run; "
    "then {wald} cursor set {route} {sequence} --group {group} --rewind",
    "journal-left-over": "{wald} group remove {route} {group} removes it",
    "cursor-is-a-directory": "ls -lR {path}; rm -r {path}, as root",
    "unsealed-segment-damaged": "wald inspect --content {path} shows its readable part; "
    "RECLAIM judges it once it is sealed",
    "lost-routes-unknown": "put a whole copy in its place; or, without a daemon, "
    "{wald} repair --accept-loss gives up its lost records",
    # inspect, repair and restore
    "file-unreadable": "ls -l {path}",
    "no-such-file": "ls {directory}",
    "directory-to-dump": "ls {path}; wald inspect --content {path}/FILE",
    "not-a-file-of-a-log": "--content shows segments, their indexes, head, transfers, log.json, cursors, ledgers "
    "and recovery reports",
    "identity-uncertain": "move the other log's files elsewhere; then run {wald} repair",
    "copy-differs": "report this as a bug; nothing was changed",
    "directory-for-restore-needed": "--into takes a new or an empty directory",
    "restore-unfinished": "rm -r {path}; then run the same command again",
    # producers and records
    "values-are-not-a-list": "send(route, [value])",
    "column-is-not-a-list": "{name} must be a list with one entry per value",
    "column-of-another-length": "{name} must have one entry per value",
    "neither-bytes-nor-text": "pass bytes or str",
    "text-without-utf-8": "pass bytes",
    "time-is-not-valid": "time.time_ns()",
    "event-time-is-not-valid": "time.time_ns(), or a datetime with a zone",
    "due-time-is-not-valid": "pass nanoseconds, such as time.time_ns() + 300 * 10**9, or a datetime",
    "headers-are-not-a-mapping": '{{"content-type": "text/csv"}}',
    "line-is-not-json": "each line must be a JSON value",
    "line-is-not-a-record": 'each line must look like {{"key": "a", "value": "b"}}',
    "payload-without-newline": "append b'\\n'",
    "record-too-large": "write it to the route's FIFO, or split it",
    "producer-of-the-parent": "create another Producer in the child, with another id",
    "producer-has-ended": "create another Producer; acknowledged() and unanswered report the state of its records",
    # requests to a daemon
    "route-missing-at-daemon": "{wald} route add {route} creates it; {wald} routes lists them",
    "route-retired-at-daemon": _route_retired_at_daemon,
    "request-denied": _request_denied,
    "request-too-large": "raise request_max_bytes, or write the record to the route's FIFO",
    "request-refused": "wald append --help",
    "producer-out-of-step": "use another producer id; {wald} read {route} shows the records that arrived",
    "no-daemon": lambda root, socket: (
        command_line(root, "run") if root else f"ls -l {quote(socket)}; start the daemon that listens there"
    ),
    "daemon-hangs": lambda root, socket: (
        f"ps -o pid,stat,wchan,args -p $(fuser {quote(root / 'lock' if root else socket)} 2>&-)"
    ),
    "daemon-over-quota": lambda root, socket: command_line(root, "explain") if root else f"STAT to {socket}",
    "daemon-lacks-room": lambda root, socket: _room_and(root, socket, "explain"),
    "daemon-not-available": lambda root, socket: _room_and(root, socket, "head"),
    # settings
    "file-is-not-text": "file {path}",
    "file-is-not-toml": "edit {path}; {reason}",
    "no-such-setting": lambda nearest, help_command: (
        f"did you mean {nearest[0]!r}?" if nearest else f"{help_command} lists every setting"
    ),
    "setting-is-not-valid": "{help_command} lists every setting",
    "setting-is-not-a-table": "write [{table}]",
    "routes-are-not-tables": "write [routes.NAME]",
    "setting-is-not-a-list-of-users": 'write names or numbers, as in ["root", 33]; getent passwd lists users',
    "setting-misplaced": "move {key} {home}",
    "fifo-mode-too-open": 'set mode = "{mode:04o}", or remove writers',
    "address-is-not-free": 'use a free "127.0.0.1:PORT"',
    # running daemon
    "daemon-cannot-start": lambda root, error: (
        f"{room_commands(root, error=error)}; ls -ld {quote(root)}; "
        f"{command_line(root, program='wald-reclaim')} makes room without it"
    ),
    "disk-failed": lambda root, segments, error: (
        f"{room_commands(segments, error=error)}; dmesg; then {command_line(root, 'verify')}, and restart the daemon"
    ),
    "head-cannot-be-written": lambda root, head, error: (
        f"ls -l {quote(head)}; {room_commands(root, error=error)}; then restart the daemon"
    ),
    "inotify-unavailable": "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536",
    "segments-unmounted": "findmnt -T {segments}; mount it again or move it back, and restart the daemon",
    "active-segment-gone": "df -h {segments}; make room, or restore the missing files; then {wald} verify",
    "records-of-truncated-segment": "{wald} verify shows which",
    "disk-too-small": "WALD_SEGMENT_MAX_BYTES={segment} WALD_FREE_SPACE_MIN={reserve}",
    "route-retired": "{wald} route add {route} reactivates it",
    "route-over-quota": "{wald} explain",
    "stdin-beside-fifo": "--stdin with another route, or write to the FIFO: producer > {fifo}",
    "stdin-feeds-route": "use another route",
    "stdin-is-no-pipe": "producer | {wald} run --stdin {route}",
    "fifo-of-two-routes": "rm {path}; {wald} route add {route} --fifo",
    "not-a-fifo": "{wald} route add {route} --fifo",
    "fifo-displaced": "{wald} append {route} {path} && rm {path}",
    "fifo-replaced": "end the producers of a FIFO before it is replaced",
    "too-many-fifos": "use the socket",
    "cannot-listen": "WALD_SOCKET=PATH sets another path, of at most {limit} bytes; ls -ld {directory} {path}",
    "socket-replaced": "fuser {path}; ls -l {path}; remove it, and the daemon recreates its socket",
    "socket-of-systemd-gone": "systemctl restart wald.socket",
    "sockets-of-another-kind": "keep one ListenStream=PATH in the socket unit, and remove Accept=yes",
    "settings-of-a-socket-of-systemd": "systemctl edit wald.socket: ListenStream=, SocketMode=",
}

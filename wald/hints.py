"""Hints: the command to type, or the action to take, for each error case.

An error has a message, a case and facts: ``Refused("…: beyond the end", case="cursor-beyond-head", root=root)``. Each
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
    "to create a log: wald --root '/srv/my log' run"
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
    return shlex.quote(os.fspath(path))


def room_commands(*paths: str | os.PathLike[str], error: OSError | None = None) -> str:
    """Return commands that show space and inodes, or raise the file size limit."""
    if error is not None and error.errno == errno.EFBIG:
        return "ulimit -f unlimited, or LimitFSIZE=infinity in a unit"
    at = "".join(f" {quote(path)}" for path in paths)
    return f"df -h{at}; df -i{at}"


def user_name(user_id: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def group_name(group_id: int) -> str:
    import grp

    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


def _permission_denied(path: Path) -> str:
    """Return a command that grants access, or the user to run as."""
    file, user_id = quote(path), os.geteuid()
    listing = f"ls -ld {file}"
    try:
        status, directory = path.stat(), path.parent.stat()
    except OSError:  # the file was removed in the meantime
        return listing
    if user_id == 0:
        return f"lsattr -d {file}; {listing}"  # no mode denies root access
    if user_id == status.st_uid:
        return f"chmod u+rwX {file}; {listing}"
    if status.st_uid == 0 and directory.st_uid == user_id:  # root ran a program on this user's log
        return f"as root: chown {user_name(user_id)} {file}; {listing}"
    owner = user_name(status.st_uid)
    if not status.st_mode & stat.S_IRWXG or status.st_gid in {os.getegid(), *os.getgroups()}:
        return f"run this program as user {owner}; {listing}"
    return f"run this program as user {owner}, or as a member of group {group_name(status.st_gid)}; {listing}"


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
    hints = []
    if archive is not None:
        restore = f"wald-archive restore {quote(archive)} {route} --from {first} --to {archived}{form}"
        hints.append(f"to restore them: {restore}")
    if group is not None:
        hints.append(f"to skip them: {command_line(root, f'cursor set {route} {last} --group {group}')}")
    elif stop is None or not stop.isdecimal() or int(stop) > last:
        before, after = command
        options = f" --from {last + 1}" + (f" --to {quote(stop)}" if stop else "")
        hints.append(f"to read the rest: {command_line(root, before + options + after)}")
    return "; ".join(hints) or f"to see when and why: {command_line(root, f'where {first}')}"


def _route_retired_at_daemon(root: Path | None, route: str, socket: Path) -> str:
    command, (owner, is_owner) = command_line(root, f"route add {route}"), _describe_owner(socket)
    if is_owner:
        return f"to reactivate the route: {command}"
    return f"as {owner}, or a user in writers of [routes.{route}], reactivate the route: {command}"


def _request_denied(words: list[str], route: str, socket: Path) -> str:
    writers, (owner, is_owner) = f"writers in [routes.{route}] of the daemon's configuration", _describe_owner(socket)
    match words:
        case "PUB", *_:
            return f"add this user to {writers}, and send SIGHUP to the daemon"
        case "ROUTE", "ADD", _, *options if any(option.startswith("mode=") for option in options):
            return "use --mode 0600, or omit --mode" if is_owner else f"omit --mode, or run this command as {owner}"
        case "ROUTE", "ADD", _, *options if any(option.startswith("consumers=") for option in options):
            join = f"usermod --append --groups GROUP {owner.removeprefix('user ')}; then restart the daemon"
            return join if is_owner else f"omit --consumers, or run this command as {owner}"
        case "ROUTE", "ADD", _, *options if "fifo" in options:
            return f"run this command as {owner}"
        case _:
            return f"run this command as {owner}, or as a user listed under {writers}"


def _describe_owner(socket: Path) -> tuple[str, bool]:
    """Describe the daemon's user; also return whether this process has those rights."""
    try:
        owner = socket.stat().st_uid
    except OSError:
        return "the user that runs the daemon", False
    return f"user {user_name(owner)}", os.geteuid() in (0, owner)


def _room_commands_and(root: Path | None, socket: Path, command: str) -> str:
    commands = room_commands(socket.parent)
    return commands if root is None else f"{commands}; {command_line(root, command)}"


def _daemon_in_the_way(lock: Path, pids: list[int]) -> str:
    stopping = f"kill {' '.join(map(str, pids))}" if pids else f"end the process that fuser -v {quote(lock)} shows"
    return f"stop the daemon: systemctl stop wald.socket wald, if systemd runs it; otherwise {stopping}"


_IDENTITY_UNREADABLE = "stop the daemon and wald-reclaim; then restore log.json from the segments: {wald} repair"
_NOTHING_LOST = "nothing has been acknowledged since, and no acknowledged record is lost"
PROGRAMS = {"wald": "wald", "wald_reclaim": "wald-reclaim"}

TEMPLATES: dict[str, str | Callable[..., str]] = {
    "": "",
    # any file
    "wrong-type-of-file": "ls -ld {path}; move this entry away, and restore the original",
    "not-a-regular-file": "ls -l {path}; move this file away, and restore the original",
    "symbolic-link": "rm {path}; then move {target} there, or: mkdir {path} && mount --bind {target} {path}",
    "permission-denied": _permission_denied,
    "newer-format": "install a newer wald; see docs/install.md",
    # root and identity
    "no-log": "to create a log: {wald} run",
    "no-log-to-open": "to see whether the file system is mounted: findmnt -T {root}; to create a log: {wald} init",
    "not-a-log": "pass the directory that contains log.json as --root; to find log.json: find {root} -name log.json",
    "not-a-directory": "pass a new or an existing directory as --root",
    "not-empty": "pass a new or an empty directory as --root",
    "identity-missing": f"log.json is missing; {_IDENTITY_UNREADABLE}",
    "identity-unreadable": _IDENTITY_UNREADABLE,
    "root-unreadable": "ls -l {root}",
    "segments-directory-gone": "ls -l {root}; restore the directory from a backup",
    "clock-step-damaged": "restore {path} from a backup",
    "ledger-damaged": "restore the ledger from a backup; or stop the daemon and keep the intact lines: {wald} repair",
    "too-many-cursor-files": "to see who owns the files: ls -l {directory}",
    "ledger-locked": "to find the process: fuser -v {path}; to stop a service: systemctl stop {owner}",
    # routes and cursor owners
    "no-such-route": "to list all routes: {wald} route list; to create this one: {wald} route add {route}",
    "fifo-is-link": "chmod {mode:04o} {target}",
    "cursor-left-by-other-user": "run this command as {user} who created the file; ls -l {path}",
    "file-of-other-user": "ls -l {path}; to remove the other user's file: rm {path}",
    "cursor-owner-needed": "run this command as user {user}; or, as {user}, allow an OS group to keep cursors here: "
    "{wald} route add {route} --consumers GROUP",
    "cursor-group-needed": "usermod --append --groups {group} {user}; then log in again; ls -ld {directory}",
    "group-unavailable": "usermod --append --groups {group} {user}; then restart the daemon",
    # segments and head
    "sealed-segment-damaged": "restore the file from an archive or a backup; "
    "to see its readable part: wald inspect --content {path}",
    "raw-segment-damaged": "to see its contents: wald inspect --content {path}",
    "segment-truncated": "restore the segment from a backup; or give up the lost records: {wald} repair",
    "segment-misnamed": "rename the file, or move it out of {directory} if it is a copy",
    "segment-of-other-log": "move the file out of {directory}",
    "segment-gone": "ls -l {directory}",
    "segment-file-missing": "ls -l {directory}; restore the file from an archive or a backup",
    "no-segment": "mount the file system or restore the segments from a backup; "
    "to see what is mounted: findmnt -T {path}; to give up these records: {wald} repair --accept-loss",
    "segments-directory-empty": "to see what is mounted there: findmnt -T {segments}",
    "no-segment-at-start": "mount the file system or restore the segments from a backup, and restart the daemon; "
    "to see what is mounted: findmnt -T {path}; to give up these records: {wald} repair --accept-loss",
    "head-damaged": "restart the daemon, which rebuilds the head from the segments; or stop it and run {wald} repair",
    "no-readable-head": "send a record to the running daemon, or start the daemon: {wald} run",
    "log-gone": "findmnt -T {root}; ls -la {root}; restart this program once the log is back",
    "other-log": "restart this program to use the new log, or move the original log back",
    # "instead" is for programs that keep their positions elsewhere.
    "older-copy": lambda instead: instead or "restart this program, so that it reads its positions from disk",
    # daemon start and lock
    "daemon-is-running": "stop the running daemon, or send records to it: {wald} append ROUTE",
    "daemon-in-the-way": _daemon_in_the_way,
    "daemon-taken-over": "let the newer daemon run; this one has acknowledged nothing since",
    "lock-file-removed": f"{_NOTHING_LOST}; keep tmp cleaners away from {{root}}, and restart the daemon",
    "lock-file-replaced": f"{_NOTHING_LOST}; if you restored the log from a backup, restart the daemon",
    "file-system-without-locks": "use a local file system, which supports locks, or start only one daemon",
    "root-gone": "ls -ld {root}; move the log back or mount it, and restart the daemon",
    "foreign-file-in-place": lambda path, target: (
        f"{f'mv {quote(path)} {quote(target)}' if target else 'move the file to where it belongs'}; "
        "then restart the daemon"
    ),
    "newest-segment-misnamed": "to restore the file names: {wald} repair; then restart the daemon",
    "segments-misnamed": "to restore the file names: {wald} repair",
    "newest-segment-refused": "move the file out of {directory}, or restore its name; then restart the daemon",
    "append-times-ahead": "check the clock: date -u; if it is wrong, set it; if it is right, run wald clock step",
    "log-fills-disk": "to see which groups are behind: {wald} explain; to delete unpinned segments: {wald_reclaim}",
    "other-files-fill-disk": "df -h {disk}; df -i {disk}; quota -v; to find large directories: du -xhd1 MOUNTPOINT",
    # positions and unreadable records
    "sequence-below-one": "use a sequence of 1 or more",
    "limit-below-zero": "use a limit of 0 or more",
    "not-a-time": lambda option, examples: ", ".join(f"{option} {example}" for example in examples),
    "start-unknown": 'use "earliest", "end", "cursor", a sequence or a time',
    "start-appended-after-the-end": "start before record {first}, the first one appended at or after that time",
    "stop-appended-before-the-start": "stop after record {last}, the last one appended before then",
    "record-not-issued": "to wait for the next record: {wald} read{routes} --from end --follow",
    "records-lost": "to list all damage: {wald} verify",
    "records-lost-behind-cursor": "to list all damage: {wald} verify; "
    "to skip the damage: {wald} cursor set {route} {last} --group {group}",
    "records-missing": _records_missing,
    "on-missing-unknown": 'pass "error", "skip" or a function',
    # cursors and retention
    "illegal-name": "use a letter or digit, followed by up to {more} letters, digits, '.', '_' or '-'",
    "group-is-new": "to remove the group: {wald} cursor remove {route} --group {group}",
    "work-group-is-new": "to remove the group: {wald} group remove {route} {group}",
    "cursor-not-permitted": "chmod a+r {path}",
    "cursor-misnamed": "rename or remove the file",
    "records-released": "to restore them: {wald_reclaim}",
    "records-deleted": "to see why: {wald} where {record}",
    "no-cursor": "{wald} cursor list {route}",
    "cursor-of-other-user": "use another group, or remove this one: {wald} cursor remove {route} --group {group}; "
    "to move the cursor, run cursor set as root",
    "cursor-unusable": "{wald} cursor set {route} SEQUENCE --group {group} --rewind",
    "cursor-below-zero": "use 0 if no record has been processed",
    "cursor-beyond-head": "to see the last durable record: {wald} head",
    "rewind-needed": "{wald} cursor set {route} {sequence} --group {group} --rewind",
    "journal-in-the-way": "stop the workers; rm {path}; {wald} cursor set {route} {sequence} --group {group} --rewind",
    "journal-left-over": "to remove the group: {wald} group remove {route} {group}",
    "cursor-is-a-directory": "ls -lR {path}; as root: rm -r {path}",
    "unsealed-segment-damaged": "let the daemon seal the segment; to see its contents: wald inspect --content {path}",
    "lost-routes-unknown": "replace the segment with an intact copy; "
    "or stop the daemon, and give up the lost records: {wald} repair --accept-loss",
    # inspect, repair and restore
    "file-unreadable": "ls -l {path}",
    "no-such-file": "ls {directory}",
    "directory-to-dump": "ls {path}; wald inspect --content {path}/FILE",
    "not-a-file-of-a-log": "pass a segment, index, cursor, ledger, recovery report, head, transfers or log.json",
    "identity-uncertain": "move the other log's files elsewhere; then run {wald} repair",
    "copy-differs": "report this bug; nothing was changed",
    "directory-for-restore-needed": "pass a new or an empty directory as --into",
    "restore-unfinished": "rm -r {path}; then run the same command again",
    # producers and records
    "values-are-not-a-list": "send(route, [value])",
    "column-is-not-a-list": "pass {name} as a list with one entry per value",
    "unequal-lengths": "pass {name} with one entry per value",
    "neither-bytes-nor-text": "pass bytes or str",
    "text-without-utf-8": "pass bytes",
    "time-is-not-valid": "pass time.time_ns(), or a datetime with a time zone",
    "due-time-is-not-valid": "pass nanoseconds, such as time.time_ns() + 300 * 10**9, or a datetime",
    "headers-are-not-a-mapping": 'pass a mapping such as {{"content-type": "text/csv"}}',
    "line-is-not-json": "write one JSON value on each line",
    "line-is-not-a-record": 'write an object such as {{"key": "a", "value": "b"}} on each line',
    "payload-without-newline": "append b'\\n'",
    "record-too-large": "write the record to the route's FIFO, or split it",
    "producer-of-the-parent": "create a new Producer in the child, with a different id",
    "producer-has-ended": "create a new Producer; see acknowledged() and unanswered for the state of the records",
    # requests to a daemon
    "route-missing-at-daemon": "to create the route: {wald} route add {route}; to list all routes: {wald} route list",
    "route-retired-at-daemon": _route_retired_at_daemon,
    "request-denied": _request_denied,
    "request-too-large": "raise request_max_bytes, or write the record to the route's FIFO",
    "request-refused": "wald append --help",
    "producer-out-of-step": "use another producer id; to see the records that arrived: {wald} read {route}",
    "no-daemon": lambda root, socket: command_line(root, "run") if root else f"ls -l {quote(socket)}; start its daemon",
    "daemon-hangs": lambda root, socket: (
        f"ps -o pid,stat,wchan,args -p $(fuser {quote(root / 'lock' if root else socket)} 2>&-)"
    ),
    "daemon-over-quota": lambda root, socket: command_line(root, "explain") if root else f"send STAT to {socket}",
    "daemon-lacks-room": lambda root, socket: _room_commands_and(root, socket, "explain"),
    "daemon-not-available": lambda root, socket: _room_commands_and(root, socket, "head"),
    # settings
    "file-is-not-text": "save the file as UTF-8; to see its encoding: file {path}",
    "file-is-not-toml": "edit {path}: {reason}",
    "no-such-setting": lambda nearest, help_command: f"did you mean {nearest[0]!r}?" if nearest else help_command,
    "setting-is-not-valid": "{help_command}",
    "setting-is-not-a-table": "write a table: [{table}]",
    "routes-are-not-tables": "write a table for each route: [routes.NAME]",
    "setting-is-not-a-list-of-users": 'write names or numbers, as in ["root", 33]; to list all users: getent passwd',
    "setting-misplaced": "move {key} {home}",
    "fifo-mode-too-open": 'set mode = "{mode:04o}", or remove writers',
    "address-is-not-free": 'use a free port, as in "127.0.0.1:PORT"',
    # running daemon
    "daemon-cannot-start": lambda root, error: (
        f"{room_commands(root, error=error)}; ls -ld {quote(root)}; {command_line(root, program='wald-reclaim')}"
    ),
    "disk-failed": lambda root, segments, error: (
        f"{room_commands(segments, error=error)}; dmesg; then {command_line(root, 'verify')}, and restart the daemon"
    ),
    "head-cannot-be-written": lambda root, head, error: (
        f"ls -l {quote(head)}; {room_commands(root, error=error)}; then restart the daemon"
    ),
    "inotify-unavailable": "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536",
    "segments-unmounted": "findmnt -T {segments}; mount the directory or move it back, and restart the daemon",
    "active-segment-gone": "df -h {segments}; free some space, or restore the missing files; then {wald} verify",
    "records-of-truncated-segment": "to see which: {wald} verify",
    "disk-too-small": "set WALD_SEGMENT_MAX_BYTES={segment} WALD_FREE_SPACE_MIN={reserve}",
    "route-retired": "to reactivate the route: {wald} route add {route}",
    "route-over-quota": "{wald} explain",
    "stdin-beside-fifo": "use --stdin with another route, or write to the FIFO: producer > {fifo}",
    "stdin-feeds-route": "use another route for stdin or for the FIFO",
    "stdin-is-no-pipe": "producer | {wald} run --stdin {route}",
    "fifo-of-two-routes": "rm {path}; {wald} route add {route} --fifo",
    "not-a-fifo": "{wald} route add {route} --fifo",
    "fifo-displaced": "{wald} append {route} {path} && rm {path}",
    "fifo-replaced": "before you replace a FIFO, stop its producers",
    "too-many-fifos": "send records over the socket instead",
    "cannot-listen": "set another path of at most {limit} bytes: WALD_SOCKET=PATH; ls -ld {directory} {path}",
    "socket-replaced": "fuser {path}; ls -l {path}; then rm {path}, and the daemon recreates its socket",
    "socket-of-systemd-gone": "systemctl restart wald.socket",
    "sockets-of-another-kind": "keep one ListenStream=PATH in the socket unit, and remove Accept=yes",
    "settings-of-a-socket-of-systemd": "systemctl edit wald.socket; set ListenStream= and SocketMode= there",
}

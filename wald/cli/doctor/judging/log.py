"""The log and its directory: what is there, rights, socket, daemon and settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wald.cli.doctor.checks import Check, Outcome, Rule, otherwise

SOCKET_PATH_BYTES = 107


class Kind(StrEnum):
    """What is at the path of the root."""

    LOG = "log"
    EMPTY = "empty"
    ABSENT = "absent"
    UNFIT = "unfit"
    """No log can be there, or the one that is there cannot be opened."""
    HIDDEN = "hidden"
    """This user may not look, so there may be a log."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is at the path of the root.

    Attributes:
        at: the directory that is examined: the root, or the nearest one above it.
        error, hint: of one that is unfit or hidden.
        removed: scratch directories of killed doctors, which were removed.
    """

    kind: Kind
    at: str
    error: str = ""
    hint: str = ""
    removed: int = 0


PLACE: Check[Place] = Check(
    "root",
    "what is at the path of the root",
    (),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "{f.error}", "{f.hint}"),
        Rule(
            Outcome.OK,
            lambda f: f.kind is Kind.ABSENT,
            "nothing is here yet; {f.at} is examined, in which it would be made",
        ),
        Rule(Outcome.OK, lambda f: f.kind is Kind.EMPTY, "an empty directory, which can become a log"),
        Rule(Outcome.OK, otherwise, "a log"),
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings file and the variables; ``error`` is the message of the daemon."""

    path: str
    error: str = ""
    hint: str = ""


SETTINGS: Check[Settings] = Check(
    "settings",
    "the file of --config and the variables WALD_…",
    (),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "{f.error}", "{f.hint}"),
        Rule(Outcome.OK, lambda f: not f.path, "no file was named; the variables and the defaults are valid"),
        Rule(Outcome.OK, otherwise, "{f.path} is valid"),
    ),
)


@dataclass(frozen=True, slots=True)
class User:
    """The user that examines, and the one that the log belongs to."""

    user: str
    owner: str
    may_write: bool
    is_read_only: bool = False


USER: Check[User] = Check(
    "user",
    "whether this user is the one that the daemon runs as",
    (),
    (
        Rule(
            Outcome.SKIPPED,
            lambda f: f.is_read_only,
            "the file system is mounted read-only, so nothing was tried out",
        ),
        Rule(
            Outcome.UNKNOWN,
            lambda f: not f.may_write,
            "user {f.user} may not write here, so nothing was tried out; the owner is {f.owner}",
            "runuser -u {f.owner} -- {wald} doctor",
        ),
        Rule(
            Outcome.UNKNOWN,
            lambda f: f.user != f.owner,
            "this is user {f.user}, and limits and rights of the owner, {f.owner}, may differ",
            "runuser -u {f.owner} -- {wald} doctor",
        ),
        Rule(Outcome.OK, otherwise, "user {f.user}, who owns the directory"),
    ),
)


@dataclass(frozen=True, slots=True)
class Rights:
    """Modes and owners of the directory and of those above it.

    Attributes:
        mode: octal.
        is_open: whether users outside its group may write to the directory itself.
        open_above: the directories above it that a user outside the group may rename it in.
        strange_above: those that belong to a user who is neither root nor the owner.
    """

    mode: str
    owner: str
    group: str
    is_open: bool = False
    open_above: tuple[str, ...] = ()
    strange_above: tuple[str, ...] = ()

    @property
    def above(self) -> str:
        return ", ".join(self.open_above or self.strange_above)


RIGHTS: Check[Rights] = Check(
    "rights",
    "who may change or replace the directory: its mode, and those above it",
    (2, 10),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.is_open,
            "mode {f.mode}: every user may put files here, and remove those of the log",
            "chmod o-w {at}",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.open_above,
            "every user may rename what is in {f.above}, and so replace the log",
            "chmod o-w {f.above}, or chmod +t",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.strange_above,
            "{f.above} belongs to a user who is neither root nor {f.owner}, and may replace the log",
            "chown root {f.above}, or put the root elsewhere",
        ),
        Rule(Outcome.OK, otherwise, "mode {f.mode}, {f.owner}:{f.group}; no other user may replace it"),
    ),
)


@dataclass(frozen=True, slots=True)
class SocketPath:
    """The path of the daemon's socket."""

    path: str
    path_bytes: int


SOCKET: Check[SocketPath] = Check(
    "socket",
    "whether the path of the socket fits into an address",
    (),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.path_bytes > SOCKET_PATH_BYTES,
            "{f.path} has {f.path_bytes} bytes, and a socket may have 107: the daemon does not start",
            "export WALD_SOCKET=/run/wald.sock, for the daemon and for commands; or a shorter root",
        ),
        Rule(Outcome.OK, otherwise, "{f.path}, {f.path_bytes} of 107 bytes"),
    ),
)


@dataclass(frozen=True, slots=True)
class Running:
    """The daemon that holds the root.

    Attributes:
        holder: as its lock file has it; "" if none holds it.
        answers: whether it answered STAT in time; None if this user may not ask it.
        degraded_by: what keeps it from taking input; "" if nothing does.
    """

    holder: str = ""
    answers: bool | None = None
    degraded_by: str = ""


RUNNING: Check[Running] = Check(
    "daemon",
    "which daemon holds the root, and whether it answers",
    (9, 10),
    (
        Rule(Outcome.OK, lambda f: not f.holder, "no daemon holds the root"),
        Rule(
            Outcome.UNKNOWN,
            lambda f: f.answers is None,
            "{f.holder}; this user may not ask it",
            "join the group of the socket: ls -l {root}",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: not f.answers,
            "{f.holder}, and it does not answer: it starts, hangs, or listens elsewhere",
            "{wald} head; journalctl -u wald; or name its socket with --socket",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.degraded_by,
            "{f.holder}; it takes no input, because of {f.degraded_by}",
            "{wald} explain; df -h {at}",
        ),
        Rule(Outcome.OK, otherwise, "{f.holder}; it answers"),
    ),
)


@dataclass(frozen=True, slots=True)
class Files:
    """What is in the log's directories and is not wald's.

    Attributes:
        examined: how many names were looked at.
        unsafe: what another user could have planted or may change, each with the reason.
        unsafe_cursors: likewise cursors, and directories in which cursors are.
        strange: names that wald does not know.
        troubles: of FIFOs, as `wald explain` has them.
        is_complete: whether all names were looked at.
    """

    examined: int
    unsafe: tuple[str, ...] = ()
    unsafe_cursors: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    is_complete: bool = True

    @property
    def unsafe_named(self) -> str:
        return _named(self.unsafe)

    @property
    def unsafe_cursors_named(self) -> str:
        return _named(self.unsafe_cursors)

    @property
    def strange_named(self) -> str:
        return _named(self.strange)

    @property
    def troubles_named(self) -> str:
        return _named(self.troubles)


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more


FILES: Check[Files] = Check(
    "files",
    "links, devices, foreign owners and modes in the log's directories; names that are not wald's",
    (2, 8),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.unsafe_cursors,
            "{f.unsafe_cursors_named}",
            "leave it in place and mend it with chown or chmod, a cursor with {wald} cursor set --rewind: "
            "wald-reclaim deletes what a group without a cursor has not read",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.unsafe,
            "{f.unsafe_named}",
            "ls -la {root}, and move away what you have not put there",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.strange,
            "not wald's: {f.strange_named}",
            "move it out of {root}; nothing deletes it, and it fills the disk",
        ),
        Rule(Outcome.WARN, lambda f: f.troubles, "{f.troubles_named}", "{wald} explain"),
        Rule(Outcome.UNKNOWN, lambda f: not f.is_complete, "{f.examined} names examined, and there are more"),
        Rule(Outcome.OK, otherwise, "{f.examined} names, all of them wald's"),
    ),
)

"""Permissions: every row of the table in docs/cli.md, tried by the owner, a member of the group and a stranger."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pages import rows
from running import TIMEOUT_SECONDS, Daemon, command, eventually, output_of, run, sidecar
from users import MEMBER, OWNER, STRANGER, User, daemon_of, needs_root, with_root

from wald.errors import NotPermitted

pytestmark = needs_root

USERS = (OWNER, MEMBER, STRANGER)
TABLE = {what: reported for what, *reported in rows("docs/cli.md", "## Who may do what")}
SETTINGS = f"[routes.owners]\nwriters = [{OWNER.user_id}]\n[routes.members]\nwriters = [{MEMBER.user_id}]\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon of ``OWNER`` with every kind of file in its root."""
    with daemon_of(OWNER, SETTINGS) as running:
        for words in ("ROUTE ADD a fifo", "ROUTE ADD b", "ROUTE ADD gone", "ROUTE RETIRE gone"):
            assert running.ask(words).startswith("OK ")
        output_of("append", "a", "--root", running.root, stdin=b"x\n" * 100)
        assert running.ask("CUT").startswith("OK ")
        draining = sidecar("drain", "a", "--exit-at-end", "--", "true")
        for line in (command("cursor", "set", "a", 1), sidecar("reclaim"), draining):
            assert run([*OWNER.prefix, *with_root(line, running.root)]).returncode == 0
        first = running.root / f"segments/{1:020d}.wal.zst"
        eventually(lambda: list(first.parent.glob(f"{1:020d}.*")) == [first])  # sealed; the raw file is gone
        yield running


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    before = os.getgroups()
    os.setgroups([])
    os.setegid(user.group_id)
    os.seteuid(user.user_id)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def may(user: User, act: Callable[[], object]) -> bool:
    """Return True if the operating system and the daemon let ``user`` do it."""
    try:
        with acting_as(user):
            answer = act()
    except PermissionError:
        return False
    return not str(answer).startswith("ERR denied")


def asking(daemon: Daemon, request: str) -> Callable[[], str]:
    def ask() -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            connection.connect(os.fspath(daemon.socket_path))
            connection.sendall(request.encode())
            with connection.makefile("r") as answers:
                return answers.readline()

    return ask


def files(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


def directories(root: Path) -> list[Path]:
    return [root, *(path for path in sorted(root.rglob("*")) if path.is_dir())]


def opening(path: Path, flags: int) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags | os.O_NONBLOCK))


def holding(path: Path) -> Callable[[], None]:
    def hold() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)

    return hold


def making(directory: Path) -> Callable[[], None]:
    def make() -> None:
        made, moved = directory / "made", directory / "moved"
        made.touch()
        made.rename(moved)
        moved.unlink()

    return make


def is_lock(path: Path) -> bool:
    return path.name == "lock" or path.suffix in (".lock", ".drain", ".command")


def acts(daemon: Daemon, what: str) -> list[Callable[[], object]]:
    """Return every way to perform the action of a row."""
    root = daemon.root
    fifo = root / "routes/a/in"
    match what:
        case "`PING`, `HEAD`, `STAT`, `CUT`, `PUB`":
            return [asking(daemon, f"{line}\n") for line in ("PING", "HEAD", "STAT", "CUT", "PUB a 2\nx")]
        case "`ROUTE ADD`, also with `fifo`":
            return [asking(daemon, f"ROUTE ADD {words}\n") for words in ("a", "a fifo", "b", "c fifo")]
        case "`ROUTE ADD` with `mode=` or `consumers=`; with `fifo` for a route with `writers`":
            return [
                asking(daemon, f"ROUTE ADD {words}\n") for words in ("a fifo mode=0620", "a consumers=", "owners fifo")
            ]
        case "`ROUTE RETIRE` of a route without `writers`, and taking it back":
            return [asking(daemon, f"ROUTE {words}\n") for words in ("RETIRE b", "ADD gone", "RETIRE gone")]
        case "reading a file":
            return [opening(path, os.O_RDONLY) for path in files(root) if not is_lock(path)]
        case "writing, making, renaming or removing a file":
            opened = [opening(path, os.O_WRONLY) for path in files(root)]
            return [*opened, *(making(directory) for directory in directories(root))]
        case "holding a lock":
            return [holding(path) for path in files(root) if is_lock(path)]
        case "writing to a FIFO":
            return [opening(fifo, os.O_WRONLY)]
        case "reading from a FIFO":
            return [opening(fifo, os.O_RDONLY)]
    return []


LINES = {
    "`wald read`, `head`, `where`, `show`, `history`, `status`, `route list`, `explain`, `top`, `metrics`, "
    "`verify`, `cursor get`, `cursor show`, `cursor list`": [
        command("read", "a", "--grep", ""),
        command("status", "--latency"),
        command("top", "--once"),
        *(command(name) for name in ("head", "history", "status", "explain", "metrics", "verify")),
        *(command(name, what) for name, what in (("read", "a"), ("where", 1), ("show", 1), ("route", "list"))),
        *(command("cursor", *words) for words in (("get", "a"), ("show", "a"), ("list",))),
    ],
    "`wald append`, `cut`, `route add`, while a daemon runs": [
        *(command(*words) for words in (("append", "a"), ("cut",), ("route", "add", "a")))
    ],
    "`wald run`, `repair`, `cursor set`, `cursor skip`, `route retire`, `verify --record`; "
    "`wald-reclaim`, `wald-drain`, `wald-archive`": [
        command("run"),
        command("cursor", "set", "a", 1, "--rewind"),
        command("cursor", "skip", "a", 1, "--group", "skipping"),
        command("route", "retire", "b"),
        command("verify", "--record"),
        command("repair"),
        sidecar("reclaim"),
        sidecar("drain", "a", "--exit-at-end", "--", "true"),
        sidecar("archive", "pack", "a"),
    ],
}
NAMED = "`PUB` to a route with `writers`"


def test_every_row_is_tried_also_that_of_routes_with_writers(daemon: Daemon) -> None:
    # Every row is tried.
    assert [what for what in TABLE if what not in LINES and what != NAMED and not acts(daemon, what)] == []
    assert [what for what in LINES if what not in TABLE] == []

    # A route with writers.
    assert TABLE[NAMED] == ["if named", "if named", "no"]
    for route, expected in (("owners", [True, False, False]), ("members", [False, True, False])):
        assert [may(user, asking(daemon, f"PUB {route} 2\nx\n")) for user in USERS] == expected


@pytest.mark.parametrize("what", [what for what in TABLE if what not in LINES and what != NAMED])
def test_a_verb_or_a_file(daemon: Daemon, what: str) -> None:
    for act in acts(daemon, what):
        tried = {user: may(user, act) for user in reversed(USERS)}  # the owner goes last: its actions may change files
        assert [["no", "yes"][tried[user]] for user in USERS] == TABLE[what]


@pytest.mark.slow
@pytest.mark.parametrize("what", LINES)
def test_a_command(daemon: Daemon, what: str) -> None:
    for line in LINES[what]:
        whole = with_root(line, daemon.root)
        codes = [run([*user.prefix, *whole], stdin=b"x\n").returncode for user in USERS]
        assert [["yes", "no"][code == NotPermitted.exit_code] for code in codes] == TABLE[what], (line[2:], codes)

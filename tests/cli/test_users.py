"""Permissions of a route's cursor owners: every row of the table in docs/users.md, tried by five real users."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import rows
from running import Daemon, command, run, sidecar
from users import ALICE, BOB, CONSUMERS, HOST, MEMBER, STRANGER, User, daemon_of, needs_root

from wald.errors import NotFound, NotPermitted, Refused

pytestmark = needs_root

LOCKS = (".lock", ".drain", ".command", ".ask")  # private, since opening a file allows locking it
USERS = (HOST, ALICE, MEMBER, STRANGER)
TABLE = {what: said for what, *said in rows("docs/users.md", "## Who may do what in a route with cursor owners")}
SETTINGS = f"[routes.a]\nfifo = true\nconsumers = {CONSUMERS}\n[routes.b]\n[routes.gone]\n"


class Log:
    """A log of ``HOST`` with a running daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.root = daemon.root
        self.route = daemon.root / "routes/a"
        self.cursors = self.route / "cursors"

    def as_user(self, user: User, *line: object) -> tuple[int, str]:
        """Run a command; return its exit code and stderr."""
        done = run([*user.prefix, *map(str, line)], stdin=b"")
        return done.returncode, done.stderr.decode()

    def wald(self, user: User, *words: object) -> tuple[int, str]:
        return self.as_user(user, *command(*words, "--root", self.root))

    def does(self, user: User, *words: object) -> None:
        code, stderr = self.wald(user, *words)
        assert code == 0, stderr


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with daemon_of(HOST, SETTINGS) as daemon:
        log = Log(daemon)
        assert run([*HOST.prefix, *command("append", "a", "--root", log.root)], stdin=b"x\n" * 9).returncode == 0
        assert daemon.ask("CUT").startswith("OK ")
        log.does(HOST, "cursor", "set", "a", 1, "--group", "before")
        log.does(ALICE, "cursor", "set", "a", 1, "--group", "alice")
        log.does(BOB, "cursor", "set", "a", 1, "--group", "bob")
        yield log


def shell(script: str, *paths: Path) -> list[str]:
    return ["sh", "-euc", script, "sh", *map(str, paths)]


def setting(log: Log, group: str, *, route: str = "a") -> list[str]:
    return command("cursor", "set", route, 1, "--group", group, "--root", log.root)


def removing(log: Log, group: str) -> list[str]:
    return command("cursor", "remove", "a", "--group", group, "--root", log.root)


def changes(directory: Path, *names: str) -> list[list[str]]:
    """Return commands that create a name in a directory in every way, and rename existing names."""
    scratch = directory / "scratch"
    makes = ("touch", "mkdir", "mkfifo", "ln -s /etc/passwd")
    lines = [shell(f'{make} "$1"; rm -r "$1"', scratch) for make in makes]
    for name in names:
        path = directory / name
        lines.append(shell('mv "$1" "$2" && mv "$2" "$1"', path, scratch))
    return lines


def acts(log: Log, what: str, user: User) -> list[list[str]]:
    """Return the commands that perform the action of a row."""
    root, mine = log.root, user.name
    match what:
        case "reading segments, the head, ledgers, and all cursors":
            read = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix not in LOCKS]
            read = [path for path in read if path.name != "lock"]
            return [
                ["cat", *map(str, read)],
                command("explain", "--root", root),
                command("cursor", "list", "--root", root),
            ]
        case "`wald cursor set` of a new group":
            return [setting(log, f"new-{mine}")]
        case "`wald cursor set`, `cursor remove` of their own group":
            return [setting(log, mine), removing(log, mine), setting(log, mine)]
        case "`wald cursor remove` of another cursor owner's group":
            return [removing(log, "bob")]
        case "`wald cursor set` of another cursor owner's group (root may)":
            return [setting(log, "bob")]
        case "`wald cursor set`, `cursor remove` of a group of the daemon's user":
            return [setting(log, "before"), removing(log, "before")]
        case "`wald cursor skip` for their own group":
            skipping = command("cursor", "skip", "a", 9, "--through", "--group", mine, "--root", log.root)
            return [skipping]
        case "`wald-drain` and `wald.Consumer` for their own group":
            draining = sidecar("drain", "a", "--root", root, "--group", f"d-{mine}", "--exit-at-end", "--", "true")
            reading = command("read", "a", "--root", root, "--group", f"r-{mine}", "--commit")
            consuming = f"import wald\nwith wald.Consumer('{root}', 'a', 'c-{mine}') as c:\n    assert len([*c]) == 9"
            return [draining, reading, [command()[0], "-c", consuming]]
        case "`wald cursor set` in a route without `consumers`":
            return [setting(log, mine, route="b")]
        case "making, renaming or removing the FIFO, `retired`, or another name in `routes/R`":
            return changes(log.route, "in", "cursors")
        case "making, renaming or removing a route, a segment, or another name in the root":
            found = [*changes(root / "routes", "a"), *changes(root, "head", "log.json", "routes", "segments")]
            names = [path.name for path in (root / "segments").iterdir()][:1]
            return [*found, *changes(root / "segments", *names), *changes(root / "ledger", "segments.jsonl")]
        case "renaming or removing another user's file in `routes/R/cursors`":
            cursor = log.cursors / "bob.cursor"
            return [shell('mv "$1" "$1.moved" && mv "$1.moved" "$1"', cursor)]
        case "`wald route add --consumers`":
            return [command("route", "add", "a", "--consumers", CONSUMERS, "--root", root)]
    return []


@pytest.mark.parametrize("what", TABLE)
def test_a_row(log: Log, what: str) -> None:
    for user in reversed(USERS):  # the daemon's user goes last and may change files
        lines = acts(log, what, user)
        assert lines, what
        tried = {" ".join(line[-6:]): log.as_user(user, *line) for line in lines}
        allowed = TABLE[what][USERS.index(user)] == "yes"
        wrong = {line: done for line, done in tried.items() if (done[0] == 0) != allowed}
        assert not wrong, (user.name, allowed, wrong)
        assert not [err for _, err in tried.values() if "Traceback" in err and "PermissionError" not in err]
        if what.startswith("`wald cursor") and not allowed:
            refused = Refused if user is HOST else NotPermitted
            assert {code for code, _ in tried.values()} - {NotFound.exit_code} == {refused.exit_code}
    if "remove` of another cursor owner's group" in what:
        log.does(BOB, "cursor", "set", "a", 1, "--group", "bob")
    if what.endswith("group of the daemon's user"):
        log.does(HOST, "cursor", "set", "a", 1, "--group", "before")

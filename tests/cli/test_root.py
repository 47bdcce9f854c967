"""Programs run by root on another user's log: new files belong to that user, whose programs continue to work."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, command, run, sidecar
from users import CONSUMERS, HOST, OWNER, User, needs_root, place_of_owner, with_root

from wald.files import modes
from wald.files.disk import Disk

pytestmark = needs_root

ROOT = User("root", 0, 0)
PROGRAMS = {
    "route add": command("route", "add", "new", "--fifo", "--consumers", CONSUMERS),
    "route retire": command("route", "retire", "b"),
    "append": command("append", "a"),
    "cut": command("cut"),
    "cursor set": command("cursor", "set", "a", 1, "--group", "g"),
    "verify --record": command("verify", "--record"),
    "reclaim": sidecar("reclaim", "--grace", 0),
    "drain": sidecar("drain", "a", "--group", "d", "--exit-at-end", "--", "true"),
    "archive": sidecar("archive", "pack", "a", "--group", "p"),
    "archive elsewhere": sidecar("archive", "pack", "a", "--group", "q", "--dest", "../cold"),
}
MAKES_NOTHING = ("append", "cut")  # the daemon makes the files


class Log:
    """A log of ``OWNER`` below ``place``, a directory of the same user."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "log"

    def paths(self) -> set[Path]:
        return set(self.place.rglob("*")) - {self.root.with_name("log.log")}  # the test's log file

    def does(self, user: User, line: list[str]) -> None:
        """Run a program as ``user``."""
        line = with_root([str(self.place / "cold") if word == "../cold" else word for word in line], self.root)
        done = run([*(user.prefix if user != ROOT else []), *line], stdin=b"x\n" * 3)
        assert done.returncode == 0, (line, done.stderr.decode())

    def all_continues(self) -> None:
        """Run every program as ``OWNER``; a file that belongs to root would make one fail."""
        for line in PROGRAMS.values():
            self.does(OWNER, line)


@pytest.fixture
def log() -> Iterator[Log]:
    with place_of_owner() as place:
        (place / "cold").mkdir()
        os.chown(place / "cold", OWNER.user_id, OWNER.group_id)
        yield Log(place)


def foreign(log: Log) -> set[Path]:
    """Return the paths that do not belong to ``OWNER``."""
    status = {path: path.lstat() for path in log.paths()}
    groups = {OWNER.group_id, CONSUMERS}
    return {path for path, each in status.items() if each.st_uid != OWNER.user_id or each.st_gid not in groups}


def test_the_owner_continues_after_root_has_run_each_program(log: Log) -> None:
    """Root runs each program first, so root creates all of its files."""
    with Daemon(log.root, prefix=HOST.prefix) as daemon:
        for words in ("ROUTE ADD a", "ROUTE ADD b", "PUB a 2\nx", "CUT"):
            assert daemon.ask(words).startswith("OK ")
        for name, line in PROGRAMS.items():
            before = log.paths()
            log.does(ROOT, line)
            assert log.paths() != before or name in MAKES_NOTHING, name
            assert foreign(log) == set(), name
        log.all_continues()
        assert daemon.stop() == 0
        daemon.start_again()
        assert daemon.stop() == 0


def test_the_owner_continues_with_a_log_that_root_has_made(log: Log) -> None:
    log.does(ROOT, command("init"))
    assert (log.root / "log.json").exists()
    log.does(ROOT, command("route", "add", "a", "--fifo"))
    log.does(ROOT, command("route", "retire", "a"))
    assert foreign(log) == set()
    with Daemon(log.root, prefix=OWNER.prefix) as daemon:
        assert daemon.ask("PUB a 2\nx").startswith("ERR no-route")
        assert daemon.stop() == 0


def test_the_owner_continues_after_a_daemon_of_root(log: Log) -> None:
    """The owner's programs can also connect to root's daemon while it runs."""
    with Daemon(log.root, prefix=OWNER.prefix) as daemon:
        assert daemon.stop() == 0
    with Daemon(log.root) as daemon:
        assert daemon.ask("ROUTE ADD a fifo").startswith("OK ")
        log.does(OWNER, command("append", "a"))
        assert daemon.ask("CUT").startswith("OK ")
        log.does(OWNER, command("append", "a"))
        assert foreign(log) == set()
        daemon.kill()
    assert foreign(log) == set()
    with Daemon(log.root, prefix=OWNER.prefix) as daemon:
        assert daemon.ask("PUB a 2\nx").startswith("OK ")
        assert daemon.stop() == 0


def test_what_root_makes_on_its_own_log_stays_its_own(tmp_path: Path) -> None:
    with Daemon(tmp_path / "log") as daemon:
        assert daemon.ask("ROUTE ADD a fifo").startswith("OK ")
        assert daemon.stop() == 0
    assert {path.lstat().st_uid for path in tmp_path.rglob("*")} == {0}


def test_only_what_is_made_in_a_directory_gets_its_owner(log: Log) -> None:
    # A directory with a group of its own gives it.
    for mode in (0o2750, 0o750):
        place = log.place / f"{mode:o}"
        place.mkdir()
        os.chown(place, OWNER.user_id, CONSUMERS)
        place.chmod(mode)
        Disk().make_directory(place / "below")
        Disk().replace(place / "below" / "file", b"x")
        for path in (place / "below", place / "below" / "file"):
            assert (path.stat().st_uid, path.stat().st_gid) == (OWNER.user_id, CONSUMERS)
        assert (place / "below").stat().st_mode & 0o7777 == mode

    # What the owner puts in place of a directory is not given away.
    secret = log.place / "secret"
    secret.mkdir()
    (log.place / "link").symlink_to(secret)
    os.chown(log.place / "link", OWNER.user_id, OWNER.group_id, follow_symlinks=False)
    Disk().replace(log.place / "link" / "file", b"x")
    assert (secret / "file").stat().st_uid == 0

    # A file that is there keeps its owner.
    there = log.place / "file"
    there.touch(0o600)
    for opening in (Disk().open_append, Disk().open_or_create, Disk().open_lock):
        os.close(opening(there))
    assert there.stat().st_uid == 0


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_socket_that_was_replaced_is_not_given_away(log: Log, what: str) -> None:
    """A symbolic or hard link to root's file replaces the socket before its owner is changed."""
    secret, path = log.place / "secret", log.place / "socket"
    secret.touch(0o600)
    if what == "file":
        os.link(secret, path)
    else:
        path.symlink_to(secret)
    modes.set_socket_owner(path)
    assert secret.stat().st_uid == 0
    assert path.lstat().st_uid == 0

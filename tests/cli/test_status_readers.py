"""``wald status``: readers get the same answer as the log's owner, although they may not open the lock."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Daemon, command, output_of, run
from users import MEMBER, OWNER, User, daemon_of, needs_root

pytestmark = needs_root

GOOD, DOWN, WARNING = 0, 6, 14
APART = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def log() -> Iterator[Daemon]:
    """A daemon of ``OWNER`` that runs again after being killed."""
    with daemon_of(OWNER) as daemon:
        output_of("route", "add", "a", "--root", daemon.root)
        output_of("append", "a", "--root", daemon.root, stdin=b"x\n")
        daemon.kill()
        daemon.start_again()
        yield daemon


def status(user: User, root: Path, *arguments: object, apart: bool = False) -> tuple[int, dict[str, Any]]:
    """Return exit code and answer; ``apart``: in another PID namespace, where the daemon's lock is not listed."""
    line = [*user.prefix, *command("status", "--root", root, "--json", *arguments)]
    done = run([*APART, *line] if apart else line)
    if b"unshare" in done.stderr:
        pytest.skip("this machine lets nobody make PID namespaces")
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def answers(root: Path) -> list[tuple[object, ...]]:
    """Return the answers for the owner and the reader, without ages and free space."""
    found = [status(user, root) for user in (OWNER, MEMBER)]
    return [(code, *(each[key] for key in ("verdict", "findings", "daemon", "last_crash"))) for code, each in found]


def test_a_running_daemon_is_good_to_a_reader_too(log: Daemon) -> None:
    # A running daemon is good to a reader too.
    owners, readers = answers(log.root)
    assert readers == owners
    assert readers[:3] == (GOOD, "good", [])
    assert status(MEMBER, log.root, "--settings") == status(OWNER, log.root, "--settings")
    assert status(MEMBER, log.root, "--settings")[1]["settings"]

    # A reader of top sees which daemon runs.
    shown = [run([*user.prefix, *command("top", "--once", "--root", log.root)]).stdout for user in (OWNER, MEMBER)]
    assert [f"pid {log.process.pid} on ".encode() in each for each in shown] == [True, True], shown


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_daemon_that_has_ended_is_dead_to_a_reader_too(log: Daemon, end: str) -> None:
    log.stop() if end == "stopped" else log.kill()
    owners, readers = answers(log.root)

    assert readers == owners
    assert readers[:2] == (DOWN, "down")
    assert status(MEMBER, log.root)[1]["daemon"]["life"] == "dead"


def test_a_reader_sees_that_a_daemon_starts_and_that_the_one_before_has_crashed(log: Daemon) -> None:
    """The starting daemon has touched the lock but not yet written its report."""
    log.kill()
    with (log.root / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signed_ns = time.time_ns()
        os.utime(log.root / "lock", ns=(signed_ns, signed_ns))
        code, found = status(MEMBER, log.root)

    assert (code, found["daemon"]["life"], found["daemon"]["epoch"]) == (WARNING, "starts", None)
    assert found["last_crash"]["epoch"] == 2


def test_a_daemon_of_another_pid_namespace_is_good_to_a_reader_and_one_without_rights_not_called_down(
    log: Daemon,
) -> None:
    # A daemon of another pid namespace is good to a reader.
    code, found = status(MEMBER, log.root, apart=True)
    assert (code, found["daemon"]["life"], found["daemon"]["epoch"]) == (GOOD, "runs", 2), found
    assert found["last_crash"]["epoch"] == 1

    # A daemon that a reader may not ask is not called down.
    log.socket_path.chmod(0o600)
    code, found = status(MEMBER, log.root)
    assert (code, found["daemon"]["life"], found["daemon"]["epoch"]) == (WARNING, "runs", 2)
    code, found = status(MEMBER, log.root, apart=True)
    assert (code, found["daemon"]["life"], found["last_crash"]["epoch"]) == (WARNING, "unknown", 1)
    assert "it is unknown whether a daemon runs" in found["findings"][0]["message"]


def test_a_reader_does_not_ask_in_the_place_of_a_daemon_that_was_stopped(log: Daemon) -> None:
    """Under systemd, the socket has a listener, and a request would start the daemon."""
    log.stop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(log.socket_path))
        listener.listen(1)
        log.socket_path.chmod(0o666)
        assert status(MEMBER, log.root)[1]["daemon"]["life"] == "dead"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()

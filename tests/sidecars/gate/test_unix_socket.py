"""The unix socket: an existing file that is not a socket is kept, and errors name the option."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon, eventually, refused, run, sidecar

from wald.errors import InvalidInput


def refusal(root: Path, path: object, *more: str) -> tuple[int, str, str]:
    """Return the error of a gate that listens only on the path."""
    return refused(run(sidecar("gate", "--root", root, "--listen", "", "--uds", path, *more)))


def test_a_file_in_the_place_of_the_socket_stays(daemon: Daemon, tmp_path: Path) -> None:
    precious, link, dangling = tmp_path / "tokens", tmp_path / "link", tmp_path / "dangling"
    precious.write_text("precious")
    link.symlink_to(precious)
    dangling.symlink_to(tmp_path / "none")
    for path, more in ((precious, ()), (precious, ("--check",)), (link, ()), (dangling, ())):
        code, message, hint = refusal(daemon.root, path, *more)
        assert (code, message) == (InvalidInput.exit_code, f"--uds {path}: the file there is not a socket")
        assert hint.startswith(f"ls -ld {path}")
        assert path.is_symlink() is (path != precious)
        assert precious.read_text() == "precious"
    for name, said in (
        ("none/gate.sock", "the directory {}/none does not exist"),
        (".", "the file there is not a socket"),
        ("x" * 108, "the path is longer than 107 bytes"),
    ):
        code, message, hint = refusal(daemon.root, tmp_path / name)
        assert (code, message) == (InvalidInput.exit_code, f"--uds {tmp_path / name}: {said.format(tmp_path)}")
        assert hint


def test_what_takes_the_place_of_the_socket_stays_at_the_end(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        path.unlink()
        path.write_text("precious")
        assert gate.stop() == 0
    assert path.read_text() == "precious"


def test_a_socket_that_cannot_be_made_again_at_once_is_made_again_later(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        limits = resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        path.unlink()
        eventually(lambda: "cannot be recreated yet" in gate.log)
        resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, limits)
        eventually(path.is_socket)


def test_a_socket_that_was_left_is_taken_over_and_one_that_answers_is_not(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        gate.kill()
        assert path.is_socket()
        gate.start()

        assert refusal(daemon.root, path) == (
            InvalidInput.exit_code,
            f"--uds {path}: another process listens there",
            f"fuser {path}",
        )
        done = run(sidecar("gate", "--root", daemon.root, "--listen", "", "--uds", path, "--check"))  # as for a reload
        assert done.returncode == 0
        assert gate.stop() == 0
    assert not path.exists()


def test_a_removed_socket_is_made_again(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        for _ in range(2):
            path.unlink()
            eventually(lambda: listens(path))
        eventually(lambda: gate.log.count("the socket was removed; recreated") == 2)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert gate.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("instead", ["a file", "another socket"])
def test_what_takes_the_place_of_the_socket_is_reported_until_it_is_gone(
    daemon: Daemon, tmp_path: Path, instead: str
) -> None:
    path, other = tmp_path / "gate.sock", tmp_path / "other"
    with Gate(daemon.root, "--uds", path) as gate, socket.socket(socket.AF_UNIX) as listener:
        if instead == "a file":
            other.write_bytes(b"precious")
        else:
            listener.bind(os.fspath(other))
            listener.listen()
        other.rename(path)
        eventually(lambda: f"--uds {path}: " in gate.log)
        assert path.is_socket() == (instead != "a file")
        path.unlink()
        eventually(lambda: "; recreated" in gate.log)
        assert listens(path)
        assert gate.stop() == 0


def listens(path: Path) -> bool:
    """Return True if a process listens at the path."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(os.fspath(path)) == 0

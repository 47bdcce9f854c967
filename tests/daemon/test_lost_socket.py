"""Tmp cleaners remove files of a running daemon: the socket is made again; a lost lock ends it with the right words."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Client, Daemon, eventually, output_of

Start = Callable[..., Daemon]


def test_a_removed_socket_is_made_again(start: Start, root: Path) -> None:
    """It keeps its mode, the connections that are open stay, and a stop removes it."""
    daemon = start(socket_mode="0600")
    daemon.ask("ROUTE ADD a")
    with Client(daemon.socket_path) as before:
        for _ in range(2):
            assert before.ask(b"PUB a 2\nx\n").startswith("OK ")
            daemon.socket_path.unlink()
            output_of("append", "a", "--root", root, stdin=b"y\n")
        assert before.ask(b"PUB a 2\nz\n").startswith("OK ")
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    assert daemon.log.count("the socket was removed; the daemon recreated it") == 2
    assert daemon.stop() == 0
    assert not daemon.socket_path.exists()
    assert values(root) == [b"x", b"y", b"x", b"y", b"z"]
    assert_sound(root)


def test_one_whose_directory_is_removed_is_made_again_once_it_is_back(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    daemon = start(socket=directory / "s", ready=False)
    eventually(lambda: '"ready"' in daemon.log)
    shutil.rmtree(directory)
    eventually(lambda: "cannot listen" in daemon.log)
    directory.mkdir()
    with Client(eventually_there(directory / "s")) as client:
        assert client.ask(b"PING\n").startswith("OK")
    assert daemon.log.count("cannot listen") == 1
    assert daemon.stop() == 0


def test_a_dead_socket_in_its_place_is_replaced(start: Start) -> None:
    daemon = start()
    dead = daemon.socket_path.with_name("dead")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(dead))
    dead.rename(daemon.socket_path)
    eventually(lambda: "; the daemon recreated it" in daemon.log)
    assert daemon.ask("PING").startswith("OK")
    assert daemon.stop() == 0


@pytest.mark.parametrize("instead", ["another", "a file"])
def test_what_is_not_a_dead_socket_stays(start: Start, root: Path, instead: str) -> None:
    """It is reported once, and the daemon listens again once it is gone."""
    daemon = start()
    other = root / "other"
    with socket.socket(socket.AF_UNIX) as listener:
        if instead == "a file":
            other.write_bytes(b"precious")
        else:
            listener.bind(os.fspath(other))
            listener.listen()
        other.rename(daemon.socket_path)
        eventually(lambda: f"the socket was replaced by {instead}" in daemon.log)
        assert stat.S_ISSOCK(daemon.socket_path.stat().st_mode) == (instead == "another")
        daemon.socket_path.unlink()
        eventually(lambda: "; the daemon recreated it" in daemon.log)
        assert daemon.ask("PING").startswith("OK")
    assert daemon.log.count("the socket was replaced by") == 1
    assert daemon.stop() == 0


def test_a_removed_lock_ends_the_daemon_and_names_the_lock(start: Start, root: Path) -> None:
    daemon = start()
    (root / "lock").unlink()
    assert daemon.wait() == 3
    assert f"wald: {root}/lock: the lock file was removed while the daemon was running" in daemon.log
    assert "another daemon" not in daemon.log
    daemon.start_again()
    assert daemon.stop() == 0
    assert_sound(root)


def test_a_lock_that_is_restored_from_a_copy_is_no_other_daemon(start: Start, root: Path) -> None:
    daemon = start()
    shutil.copy2(root / "lock", root / "copy")
    (root / "copy").rename(root / "lock")
    assert daemon.wait() == 5
    assert "the lock file of this daemon was replaced by a copy" in daemon.log
    assert "another daemon" not in daemon.log


def test_an_emptied_root_is_not_another_daemon(start: Start, root: Path) -> None:
    """Its mount point is left, as after an unmount."""
    daemon = start()
    root.rename(root.with_name("away"))
    root.mkdir()
    assert daemon.wait() == 3
    assert "the log is gone" in daemon.log or "the root is gone" in daemon.log
    assert "another daemon" not in daemon.log


def eventually_there(path: Path) -> Path:
    eventually(path.is_socket)
    return path

"""The segment that is written to keeps its name, whoever takes it: what was acknowledged is found by the next start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, errors, values
from running import Client, Daemon, eventually

from wald.store.directory import Root, list_segments

Start = Callable[..., Daemon]


def removed(path: Path) -> None:
    path.unlink()


def moved_away(path: Path) -> None:
    path.rename(path.parent.parent / "away")


def replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"a stranger")


def all_removed(path: Path) -> None:
    """The file for the next cut, too."""
    for each in path.parent.iterdir():
        each.unlink()


TAKEN = [removed, moved_away, replaced, all_removed]


def active(root: Path) -> Path:
    return list_segments(Root(root)).segments[-1].path


@pytest.fixture
def daemon(start: Start, root: Path) -> Daemon:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
    return daemon


@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_acknowledged_after_it_is_there_after_a_kill(
    daemon: Daemon, root: Path, taken: Callable[[Path], None]
) -> None:
    path = active(root)
    taken(path)
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
    daemon.kill()
    assert f'"path": "{path}"' in daemon.log
    assert "active segment removed or replaced" in daemon.log
    daemon.start_again()

    assert values(root) == [b"x", b"y"]
    assert daemon.stop() == 0
    assert_sound(root)
    assert [each.read_bytes() for each in (root / "quarantine").iterdir()] == [b"a stranger"] * (taken is replaced)


def test_an_idle_daemon_puts_it_back(daemon: Daemon, root: Path) -> None:
    path = active(root)
    path.unlink()
    eventually(path.exists)
    daemon.kill()
    daemon.start_again()

    assert values(root) == [b"x"]
    assert daemon.stop() == 0


@pytest.mark.parametrize("end", ["CUT", "stop"])
def test_a_segment_that_is_completed_without_its_name_gets_it_first(daemon: Daemon, root: Path, end: str) -> None:
    active(root).unlink()
    if end == "CUT":
        assert daemon.ask("CUT").startswith("OK")
    assert daemon.stop() == 0

    assert values(root) == [b"x"]
    assert_sound(root)


def test_nothing_is_acknowledged_where_it_cannot_be_put_back(daemon: Daemon, root: Path) -> None:
    shutil.move(root / "segments", root / "away")
    with Client(daemon.socket_path) as client:
        assert not client.ask(b"PUB a 2\ny\n").startswith("OK")
    assert daemon.wait() == 7
    assert "it cannot be put back" in daemon.log
    shutil.move(root / "away", root / "segments")
    daemon.start_again()

    assert values(root) == [b"x"]
    assert errors(root) == []
    assert daemon.stop() == 0

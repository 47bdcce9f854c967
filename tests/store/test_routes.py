"""Routes are directories: made, retired and taken back, and doing it twice is doing it once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from wald.errors import InvalidInput, NotFound
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.routes import FIFO_MODE, add_route, displaced_files, has_fifo, retire_route

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(tmp_path / "log", Disk(), now=NOW)


@pytest.mark.parametrize("times", [1, 3])
def test_a_route_is_a_directory(root: Root, times: int) -> None:
    for _ in range(times):
        add_route(root, Disk(), "web")
    assert root.route_names() == ["web"]
    assert os.listdir(root.route("web")) == ["cursors"]
    assert not has_fifo(root, "web")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "x" * 200, "a\0b", "-x", "a b", "ä"])
def test_an_illegal_name_makes_nothing(root: Root, name: str) -> None:
    before = sorted(root.path.rglob("*"))
    for fifo in (False, True):
        with pytest.raises(InvalidInput):
            add_route(root, Disk(), name, fifo=fifo)
    with pytest.raises(InvalidInput):
        retire_route(root, Disk(), name, now=NOW)
    assert sorted(root.path.rglob("*")) == before


@pytest.mark.parametrize("mode", [FIFO_MODE, 0o666, 0o600])
def test_a_fifo_has_the_mode_that_was_asked_for_whatever_the_umask(root: Root, mode: int) -> None:
    old = os.umask(0o077)
    try:
        for _ in range(2):
            add_route(root, Disk(), "web", fifo=True, mode=mode)
    finally:
        os.umask(old)
    assert has_fifo(root, "web")
    assert stat.S_IMODE(root.fifo("web").stat().st_mode) == mode


def test_a_route_can_be_given_a_fifo_later_and_keeps_it(root: Root) -> None:
    add_route(root, Disk(), "web")
    add_route(root, Disk(), "web", fifo=True)
    number = root.fifo("web").stat().st_ino
    add_route(root, Disk(), "web", fifo=True)
    add_route(root, Disk(), "web")
    assert root.fifo("web").stat().st_ino == number


def test_what_stands_where_the_fifo_belongs_is_kept_beside_it(root: Root) -> None:
    add_route(root, Disk(), "web")
    for content in (b"somebody's", b"another's"):
        root.fifo("web").unlink(missing_ok=True)
        root.fifo("web").write_bytes(content)
        add_route(root, Disk(), "web", fifo=True)
        assert has_fifo(root, "web")
    root.fifo("web").unlink()
    root.fifo("web").symlink_to("nowhere")
    add_route(root, Disk(), "web", fifo=True)

    found = displaced_files(root, "web")
    assert [path.name for path in found] == ["in.found-1", "in.found-2", "in.found-3"]
    assert [path.read_bytes() for path in found[:2]] == [b"somebody's", b"another's"]
    assert found[2].is_symlink()


@pytest.mark.parametrize("fifo", [False, True])
def test_a_retired_route_stays_and_is_taken_back_by_adding_it(root: Root, fifo: bool) -> None:
    add_route(root, Disk(), "web", fifo=fifo)
    retire_route(root, Disk(), "web", now=NOW)
    assert root.retired("web").read_text() == f"{NOW}\n"
    retire_route(root, Disk(), "web", now="later")
    assert root.retired("web").read_text() == f"{NOW}\n"
    assert root.route_names() == ["web"]
    assert has_fifo(root, "web") == fifo
    add_route(root, Disk(), "web")
    assert not root.retired("web").exists()
    assert has_fifo(root, "web") == fifo


def test_a_route_that_is_not_there_cannot_be_retired(root: Root) -> None:
    with pytest.raises(NotFound, match="'web'"):
        retire_route(root, Disk(), "web", now=NOW)
    assert root.route_names() == []


def test_the_name_is_on_disk_before_anything_can_be_written_to_it(root: Root) -> None:
    class Watching(Disk):
        synced: list[str] = []  # noqa: RUF012

        def sync_directory(self, path: Path) -> None:
            self.synced.append(path.name)

    disk = Watching()
    add_route(root, disk, "web", fifo=True)
    assert disk.synced == ["routes", "web"]

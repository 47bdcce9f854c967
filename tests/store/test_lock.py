"""The daemon's lock: it refuses a second daemon, names the first one's pid, and gives each run a higher epoch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from logs import Built

from wald.errors import Locked
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.files.locks import is_locked
from wald.writing.daemon_lock import Lock, describe_daemon, read_signature

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(tmp_path / "log", Disk(), now=NOW)


def take(root: Root) -> Lock:
    return Lock(root, Disk(), now=NOW)


def test_a_second_writer_is_told_who_the_first_is(root: Root) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    lock = take(root)
    who = rf"{re.escape(str(root.lock))}: .*pid {os.getpid()} on .+, epoch 1, since {NOW}"
    for _ in range(3):
        with pytest.raises(Locked, match=who):
            take(root)
    assert lock.is_ours()
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_second_writer_changes_nothing(root: Root) -> None:
    lock = take(root)
    reported = root.lock.read_bytes()
    with pytest.raises(Locked):
        take(root)
    assert root.lock.read_bytes() == reported
    lock.release()


def test_it_ends_with_its_holder(root: Root) -> None:
    assert not is_locked(root.lock, Disk())
    lock = take(root)
    assert is_locked(root.lock, Disk())
    lock.release()
    assert not is_locked(root.lock, Disk())
    take(root).release()


def test_each_life_has_a_larger_epoch(root: Root) -> None:
    for epoch in range(1, 5):
        lock = take(root)
        assert lock.epoch == epoch
        assert f"epoch {epoch}" in describe_daemon(read_signature(root))
        lock.release()


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"[]", b'{"epoch": "9"}'])
@pytest.mark.parametrize("known", ["segment", "head"])
def test_the_epoch_grows_though_the_lock_file_is_lost(root: Root, content: bytes | None, known: str) -> None:
    """The head and the newest segment know it too."""
    built = Built(root.path, epoch=7)
    built.lines("web", [b"1"])
    if known == "head":
        for segment in list_segments(root).segments:
            segment.path.write_bytes(b"not a header")
    else:
        root.head.write_bytes(b"not a head")
    if content is not None:
        root.lock.write_bytes(content)
    lock = take(root)
    assert lock.epoch == 8
    lock.release()


def test_who_holds_it_is_not_said_by_a_file_that_does_not_say(root: Root) -> None:
    for reported in (b"", b"nonsense", b"[]"):
        root.lock.write_bytes(reported)
        assert describe_daemon(read_signature(root)) == "the lock file does not name it"


class TestLost:
    """A writer that was not turned away although there is another one."""

    def test_somebody_deleted_the_file(self, root: Root) -> None:
        lock = take(root)
        root.lock.unlink()
        assert not lock.is_ours()
        lock.release()

    def test_somebody_deleted_the_file_and_another_started(self, root: Root) -> None:
        first = take(root)
        root.lock.unlink()
        second = take(root)
        assert not first.is_ours()
        assert second.is_ours()
        first.release()
        second.release()

    def test_the_file_system_let_another_one_have_it_too(self, root: Root) -> None:
        class Unlocked(Disk):
            def lock(self, descriptor: int, *, shared: bool = False) -> bool:
                return True

        first = take(root)
        second = Lock(root, Unlocked(), now=NOW)
        assert second.epoch == first.epoch + 1
        assert not first.is_ours()
        assert second.is_ours()
        first.release()
        second.release()

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
    before = root.lock.read_bytes()
    who = rf"{re.escape(str(root.lock))}: .*pid {os.getpid()} on .+, epoch 1, since {NOW}"
    for _ in range(3):
        with pytest.raises(Locked, match=who):
            take(root)
    assert lock.is_ours()
    assert root.lock.read_bytes() == before
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_ends_with_its_holder_and_each_life_has_a_larger_epoch(root: Root) -> None:
    for epoch in range(1, 5):
        assert not is_locked(root.lock, Disk())
        lock = take(root)
        assert is_locked(root.lock, Disk())
        assert lock.epoch == epoch
        assert f"epoch {epoch}" in describe_daemon(read_signature(root))
        lock.release()


@pytest.mark.parametrize("known", ["segment", "head"])
def test_the_epoch_grows_though_the_lock_file_is_lost(root: Root, known: str) -> None:
    """The head and the newest segment know it too."""
    built = Built(root.path, epoch=7)
    built.lines("web", [b"1"])
    if known == "head":
        for segment in list_segments(root).segments:
            segment.path.write_bytes(b"not a header")
    else:
        root.head.write_bytes(b"not a head")
    for content in (None, b"", b"nonsense", b"[]", b'{"epoch": "9"}'):
        root.lock.unlink(missing_ok=True)
        if content is not None:
            root.lock.write_bytes(content)
        lock = take(root)
        assert lock.epoch == 8
        lock.release()


def test_who_holds_it_is_not_said_by_a_file_that_does_not_say(root: Root) -> None:
    for reported in (b"", b"nonsense", b"[]"):
        root.lock.write_bytes(reported)
        assert describe_daemon(read_signature(root)) == "the lock file does not name it"


def test_a_writer_that_was_not_turned_away_takes_it_from_the_first(root: Root) -> None:
    """Somebody deleted the file, or the file system let another one have it too."""

    class Unlocked(Disk):
        def lock(self, descriptor: int, *, shared: bool = False) -> bool:
            return True

    first = take(root)
    root.lock.unlink()
    assert not first.is_ours()
    second = take(root)
    assert (first.is_ours(), second.is_ours()) == (False, True)
    third = Lock(root, Unlocked(), now=NOW)
    assert third.epoch == second.epoch + 1
    assert (second.is_ours(), third.is_ours()) == (False, True)
    for lock in (first, second, third):
        lock.release()

"""Number of listings of ``segments/``, which may have many thousands of entries; an audit hook counts them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from logs import Built

_counted: list[tuple[str, list[str]]] = []
"""Directories of which listings are counted now, each with the listings."""


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.scandir", "os.listdir") and _counted:
        for directory, listings in _counted:
            if os.fspath(arguments[0]) == directory:  # type: ignore[call-overload]
                listings.append(event)


sys.addaudithook(_hook)


@contextmanager
def listings_of(directory: Path) -> Iterator[list[str]]:
    """Record the listings of a directory by this process."""
    entry: tuple[str, list[str]] = (str(directory), [])
    _counted.append(entry)
    try:
        yield entry[1]
    finally:
        _counted.remove(entry)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Three sealed segments and the active one, whose directory has not changed for a while."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2", b"3"):
        built.lines("a", [value])
        built.cut()
    built.seal()
    built.log.set_cursor("a", 1)
    built.lines("a", [b"4"])
    settle(built)
    return built


def settle(built: Built) -> None:
    """Set the directory's modification time to the past."""
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))


def test_reading_from_a_cursor_lists_the_segments_once(built: Built) -> None:
    with listings_of(built.root.segments) as listings:
        assert [record.value for record in built.log.records("a", "cursor")] == [b"2", b"3", b"4"]
    assert len(listings) == 1


def test_a_log_that_is_kept_lists_the_segments_again_only_when_their_directory_has_changed(built: Built) -> None:
    log = built.log
    with listings_of(built.root.segments) as listings:
        for _ in range(3):
            assert len(list(log.records("a"))) == 4
        assert len(listings) == 1
        built.cut()
        built.lines("a", [b"5"])
        os.utime(built.root.segments, (time.time() - 5, time.time() - 5))
        assert len(list(log.records("a"))) == 5
    assert len(listings) == 2


def test_what_changed_this_moment_is_listed_each_time(built: Built) -> None:
    """The next change may get the same time stamp."""
    built.cut()
    log = built.log
    with listings_of(built.root.segments) as listings:
        for times in range(1, 4):
            assert len(list(log.records("a"))) == 4
            assert len(listings) >= times


def test_a_follower_lists_nothing_while_the_active_segment_grows(built: Built) -> None:
    following = built.log.records("a", follow=True)
    assert [next(following).value for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    with listings_of(built.root.segments) as listings:
        for number in range(20):
            built.lines("a", [b"%d" % number])
            assert next(following).value == b"%d" % number
    assert listings == []

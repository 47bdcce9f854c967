"""Views of a log, the number of listings they need, and their cost with many segments."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from effort import steps
from logs import Built

from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.listing import Segment, list_segments
from wald.format.batch import StoredBatch
from wald.format.names import Kind
from wald.retention.cursor_moves import reclaimed_above
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.view import SegmentGone, View


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 and 2 in a cut segment each, record 3 in the active one."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2"):
        built.lines("a", [value], cut=True)
    built.lines("a", [b"3"])
    return built


def payload(view: View, segment: Segment) -> bytes:
    """The payload of the first batch of records in a segment."""
    with closing(view.open(segment)) as opened:
        met = opened.batches(FIRST_BATCH, view.limit(segment))
        return next(bytes(found.payload) for found in met if isinstance(found, StoredBatch) and found.header.count)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.INDEX])
def test_a_segment_is_opened_under_every_name_that_it_may_have_by_now(built: Built, kind: Kind) -> None:
    view = built.view
    if kind.form is Kind.SEALED:
        built.seal()
    built.path(1, kind.form).rename(built.path(1, kind))

    assert payload(view, view.segments[0]) == b"1\n"


def test_a_name_that_is_changed_back_in_between_is_found(built: Built) -> None:
    built.seal()
    view = built.view
    sealed = built.path(1, Kind.SEALED)
    sealed.rename(built.path(1, Kind.DELETING))
    tried = []

    def action(segment: Segment) -> Kind:
        tried.append(segment.kind)
        if segment.kind is Kind.DELETING and tried.count(Kind.DELETING) == 1:
            segment.path.rename(sealed)  # taken back between two tries
        segment.path.stat()
        return segment.kind

    assert view.follow(view.segments[0], action) is Kind.SEALED


def test_a_segment_that_is_listed_and_has_no_file_is_damage(built: Built) -> None:
    """Some file systems have damaged directories."""
    view = built.view

    with pytest.raises(Damaged, match="the directory lists the segment, but the file does not exist"):
        view.without(SegmentGone("gone", hint=""), view.segments[0])


def test_a_view_is_renewed_with_the_head_and_the_segments_of_now(built: Built) -> None:
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    view = built.view.including_released()
    built.lines("a", [b"4"])
    later = view.renewed()
    assert (later.bound.sequence, later.listing) == (4, view.listing)
    built.seal()
    built.reclaim(1, keep=True)
    later = later.renewed()
    assert [segment.kind for segment in later.segments] == [Kind.RELEASED, Kind.SEALED, Kind.RAW]


def test_changes_are_listed_though_the_time_of_the_directory_is_coarse_or_old(built: Built) -> None:
    """ext4 with inodes of 128 bytes has whole seconds; a network file system may return a cached time."""
    second = int(time.time()) - 1
    os.utime(built.root.segments, (second, second))
    view = built.view.renewed()
    built.seal()
    os.utime(built.root.segments, (second, second))
    assert [segment.kind for segment in view.renewed().segments] == [Kind.SEALED, Kind.SEALED, Kind.RAW]

    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    view = built.view.renewed()
    built.cut()
    built.lines("a", [b"4"])
    os.utime(built.root.segments, (before, before))
    assert [segment.base_sequence for segment in view.renewed().segments] == [1, 2, 3, 4]  # the head's is there


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
def listed(tmp_path: Path) -> Built:
    """Three sealed segments and the active one, whose directory has not changed for a while."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2", b"3"):
        built.lines("a", [value], cut=True)
    built.seal()
    built.log.set_cursor("a", 1)
    built.lines("a", [b"4"])
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    return built


def test_a_log_lists_the_segments_again_only_when_their_directory_has_changed(listed: Built) -> None:
    """What changed this moment is listed each time: the next change may get the same time stamp."""
    with listings_of(listed.root.segments) as listings:
        assert [record.value for record in listed.log.records("a", "cursor")] == [b"2", b"3", b"4"]
        assert len(listings) == 1
        log = listed.log
        for _ in range(3):
            assert len(list(log.records("a"))) == 4
        assert len(listings) == 2
        listed.cut()
        listed.lines("a", [b"5"])
        os.utime(listed.root.segments, (time.time() - 5, time.time() - 5))
        assert len(list(log.records("a"))) == 5
        assert len(listings) == 3
        listed.cut()
        for times in range(4, 7):
            assert len(list(log.records("a"))) == 5
            assert len(listings) >= times


def test_a_follower_lists_nothing_while_the_active_segment_grows(listed: Built) -> None:
    following = listed.log.records("a", follow=True)
    assert [next(following).value for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    with listings_of(listed.root.segments) as listings:
        for number in range(20):
            listed.lines("a", [b"%d" % number])
            assert next(following).value == b"%d" % number
    assert listings == []


def many(path: Path, segments: int) -> Built:
    log = Built(path)
    for number in range(segments):
        log.lines("a", [b"%d" % number])
        log.lines("b", [b"other"], cut=True)
    return log


def test_the_way_through_them_is_linear(tmp_path: Path) -> None:
    costs = []
    for segments in (10, 60):
        log = many(tmp_path / str(segments), segments)
        log.seal()
        costs.append(steps(lambda log=log: list(log.log.records("a"))))  # type: ignore[misc]

    assert costs[1] < 6 * costs[0]


def passing_by(log: Built) -> object:
    return list(log.log.records("b", on_missing="skip"))


def verifying(log: Built) -> object:
    return list(verify(log.root))


@pytest.mark.parametrize("work", [passing_by, verifying])
def test_the_way_past_as_many_holes_is_linear(tmp_path: Path, work: Callable[[Built], object]) -> None:
    costs = []
    for segments in (10, 60):
        log = many(tmp_path / str(segments), segments)
        log.seal()
        for segment in list_segments(log.root).segments[:-1:2]:
            log.reclaim(segment.base_sequence)
        costs.append(steps(partial(work, log)))

    assert costs[1] < 7.5 * costs[0]


def test_cuts_between_all_looks_keep_nobody_from_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut and sealed faster than the directory is read."""
    log = many(tmp_path / "log", 2)
    log.log.set_cursor("a", 1)
    looks, scandir = 0, os.scandir

    def look(path: Path) -> Iterator[os.DirEntry[str]]:
        nonlocal looks
        looks += 1
        assert looks < 10
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", scandir)
            log.lines("a", [b"one more"])
            log.cut(seal=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)

    assert reclaimed_above(log.root, log.log.cursor("a"), log_id=log.log_id) == ""

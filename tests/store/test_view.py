"""Views of a log: segments keep opening under new names, and a deleted segment is gone."""

from __future__ import annotations

import gc
import os
import time
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from logs import Built

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import StoredBatch
from wald.format.names import Kind
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.view import SegmentGone, State, View


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 and 2 in a cut segment each, record 3 in the active one."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2"):
        built.lines("a", [value])
        built.cut()
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


def test_a_segment_without_a_file_is_gone(built: Built) -> None:
    view = built.view
    built.path(1, Kind.RAW).unlink()

    with pytest.raises(SegmentGone) as caught:
        view.open(view.segments[0])
    assert [segment.base_sequence for segment in view.without(caught.value, view.segments[0]).segments] == [2, 3]


def test_a_segment_that_is_gone_keeps_no_file_of_its_reader_open(built: Built) -> None:
    """Nothing waits for the collector of cycles."""

    class Reader:
        def __call__(self, segment: Segment) -> None:
            segment.path.stat()

    view, reader = built.view, Reader()
    alive = weakref.ref(reader)
    built.path(1, Kind.RAW).unlink()
    gc.disable()
    try:
        with pytest.raises(SegmentGone) as caught:
            view.follow(view.segments[0], reader)
        del caught, reader
        assert alive() is None
    finally:
        gc.enable()


def test_a_segment_that_is_listed_and_has_no_file_is_damage(built: Built) -> None:
    """Some file systems have damaged directories."""
    view = built.view

    with pytest.raises(Damaged, match="the directory lists the segment, but the file does not exist"):
        view.without(SegmentGone("gone", hint=""), view.segments[0])


def test_a_view_tells_how_far_each_segment_has_come(built: Built) -> None:
    assert [built.view.state(segment) for segment in built.view.segments] == [State.CUT, State.CUT, State.ACTIVE]
    built.seal()
    built.reclaim(1, keep=True)
    view = built.view
    assert [view.state(segment) for segment in view.including_released().segments] == [
        State.RELEASED,
        State.SEALED,
        State.ACTIVE,
    ]


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


def test_changes_within_one_second_are_listed_where_times_are_whole_seconds(built: Built) -> None:
    """For example, ext4 with inodes of 128 bytes."""
    second = int(time.time()) - 1
    os.utime(built.root.segments, (second, second))
    view = built.view.renewed()
    built.seal()
    os.utime(built.root.segments, (second, second))

    assert [segment.kind for segment in view.renewed().segments] == [Kind.SEALED, Kind.SEALED, Kind.RAW]


def test_the_segment_of_the_head_is_listed_even_if_the_time_of_the_directory_is_an_old_one(built: Built) -> None:
    """A network file system may return a cached time."""
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    view = built.view.renewed()
    built.cut()
    built.lines("a", [b"4"])
    os.utime(built.root.segments, (before, before))

    assert [segment.base_sequence for segment in view.renewed().segments] == [1, 2, 3, 4]


def test_a_view_is_completed_with_segments_whose_deletion_was_undone(built: Built) -> None:
    built.seal()
    built.reclaim(1, keep=True)
    whole = built.view.including_released()
    short = replace(whole, listing=replace(whole.listing, segments=whole.segments[1:]))
    public = replace(short, with_released=False)
    assert short.including_restored(1, 1).segments == whole.segments
    assert short.including_restored(2, 9) is short
    assert public.including_restored(1, 1) is public

    path = built.root.segment(1, Kind.RELEASED)
    path.rename(built.root.segment(1, Kind.SEALED))
    assert [segment.base_sequence for segment in public.including_restored(1, 1).segments] == [1, 2, 3]

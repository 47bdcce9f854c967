"""Thousands of small segments, as a flood of cuts leaves them: ten times as many cost ten times as much."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from effort import steps
from logs import Built

from wald.checking.verifier import verify
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.retention.cursor_moves import reclaimed_above
from wald.segments.reader import SealedSegment


def built(path: Path, segments: int) -> Built:
    log = Built(path)
    for number in range(segments):
        log.lines("a", [b"%d" % number])
        log.lines("b", [b"other"])
        log.cut()
    return log


def test_the_way_through_them_is_linear(tmp_path: Path) -> None:
    costs = []
    for segments in (10, 100):
        log = built(tmp_path / str(segments), segments)
        log.seal()
        costs.append(steps(lambda log=log: list(log.log.records("a"))))  # type: ignore[misc]

    assert costs[1] < 10 * costs[0]


def passing_by(log: Built) -> object:
    return list(log.log.records("b", on_missing="skip"))


def verifying(log: Built) -> object:
    return list(verify(log.root))


@pytest.mark.parametrize("work", [passing_by, verifying])
def test_the_way_past_as_many_holes_is_linear(tmp_path: Path, work: Callable[[Built], object]) -> None:
    costs = []
    for segments in (10, 100):
        log = built(tmp_path / str(segments), segments)
        log.seal()
        for segment in list_segments(log.root).segments[:-1:2]:
            log.reclaim(segment.base_sequence)
        costs.append(steps(partial(work, log)))

    assert costs[1] < 12 * costs[0]


def test_one_that_was_sealed_since_it_was_listed_is_opened(tmp_path: Path) -> None:
    """To list thousands of names again takes longer than to seal the next one."""
    log = built(tmp_path / "log", 2)
    view = log.view
    raw = view.segments[0]
    assert raw.kind is Kind.RAW
    log.seal()
    opened = view.open(raw)

    assert isinstance(opened, SealedSegment)
    opened.close()


def test_cuts_between_all_looks_keep_nobody_from_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut and sealed faster than the directory is read."""
    log = built(tmp_path / "log", 2)
    log.log.set_cursor("a", 1)
    looks, scandir = 0, os.scandir

    def look(path: Path) -> Iterator[os.DirEntry[str]]:
        nonlocal looks
        looks += 1
        assert looks < 10
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", scandir)
            log.lines("a", [b"one more"])
            log.cut()
            log.seal()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)

    assert reclaimed_above(log.root, log.log.cursor("a"), log_id=log.log_id) == ""

"""Two that work on the same files, in every order in which their calls can follow one another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from interleaving import Lock, PausingDisk, Schedule, interleavings
from logs import Built

from wald.format.names import Kind

NAMING = ("create", "allocate", "rename", "unlink")  # steps that the other thread can see


def scheduled(path: Path, schedule: Schedule) -> Built:
    """A log of which the writer pauses where it meets its other thread; it holds one record."""
    built = Built(path, disk=PausingDisk(schedule, *NAMING), segment_max_bytes=1 << 16)
    built.writer._preallocator._mutex = Lock(schedule)  # type: ignore[assignment]
    built.lines("a", [b"0"])
    return built


def assert_the_active_file_is_the_named_one(built: Built) -> None:
    named = built.path(built.writer.base_sequence, Kind.RAW).stat()
    opened = os.fstat(built.writer._descriptor)
    assert (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def cutting(built: Built, rounds: int) -> Callable[[], None]:
    """Return the steps of a commit round."""

    def work() -> None:
        for number in range(1, rounds + 1):
            built.cut()
            assert_the_active_file_is_the_named_one(built)
            built.lines("a", [b"%d" % number])

    return work


def preparing(built: Built, rounds: int) -> Callable[[], None]:
    """Return the steps of the background thread."""

    def work() -> None:
        for _ in range(rounds):
            built.writer.prepare_spare()

    return work


@pytest.mark.parametrize("spare", [False, True], ids=["without a spare", "with a spare"])
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_cuts_while_spares_are_made_lose_nothing(tmp_path: Path, rounds: int, spare: bool) -> None:
    orders = 0
    for orders, schedule in enumerate(interleavings(), start=1):
        built = scheduled(tmp_path / str(orders), schedule)
        if spare:
            built.writer.prepare_spare()
        schedule.run(cutting(built, rounds), preparing(built, rounds))
        assert values(built.root.path) == [b"%d" % number for number in range(rounds + 1)]
        built.writer.close()
        assert not list(built.root.segments.glob("*.tmp"))
        assert_sound(built.root.path)
    assert orders >= 10


def test_a_file_that_two_replace_at_once_is_wholly_what_one_of_them_wrote(tmp_path: Path) -> None:
    """Threads here; processes that have the same id in their containers are no different."""
    for schedule in interleavings():
        disk = PausingDisk(schedule, "create", "write", "rename")
        path = tmp_path / "file"
        schedule.run(lambda: disk.replace(path, b"one"), lambda: disk.replace(path, b"another"))  # noqa: B023
        assert path.read_bytes() in (b"one", b"another")
        assert os.listdir(tmp_path) == ["file"]

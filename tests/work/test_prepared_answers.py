"""Answers prepared during a sync: returned once the sync is done, or discarded."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from leasing import group, sequences, tries
from logs import Built
from running import TIMEOUT_SECONDS

from wald import aio
from wald.work.deliveries import Refusal
from wald.work.owner import Leased, Share


class Disk:
    """Disk whose next sync is delayed and then succeeds or fails."""

    def __init__(self) -> None:
        self._sync = os.fdatasync
        self._goes_on = threading.Event()
        self.is_busy = threading.Event()
        self.fails = False

    def sync(self, descriptor: int) -> None:
        self.is_busy.set()
        assert self._goes_on.wait(TIMEOUT_SECONDS)
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(descriptor)

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Disk]]:
    """Delay the next sync."""
    disk = Disk()

    def begin() -> Disk:
        monkeypatch.setattr("os.fdatasync", disk.sync)
        return disk

    yield begin
    disk.go_on()


class Maker:
    """Callback that returns the leased sequences as a list."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []

    def __call__(self, shares: Iterable[Share], refused: Sequence[Refusal]) -> tuple[list[int], Sequence[Refusal]]:
        self.made.append(sequences(Leased(shares, refused)))
        return self.made[-1], refused


async def made(maker: Maker) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not maker.made:
            await asyncio.sleep(0.001)


async def test_it_is_made_before_the_sync_is_over_and_given_out_after_it(
    built: Built, hold: Callable[[], Disk]
) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    maker = Maker()
    async with aio.WorkGroup(built.root.path, "a", "g") as work:
        assert sequences(await work.lease("x", 1, wait=30)) == [1]
        disk = hold()
        leasing = asyncio.create_task(work.lease_as(maker, "x", 1, done=[1, 3]))
        await made(maker)
        assert await asyncio.to_thread(disk.is_busy.wait, TIMEOUT_SECONDS)  # its thread may start later
        await asyncio.sleep(0)
        assert not leasing.done()
        disk.go_on()
        assert await leasing == ([2], [Refusal(3, "")])
        assert maker.made == [[2]]


async def test_after_a_sync_that_fails_it_is_not_given_out(built: Built, hold: Callable[[], Disk]) -> None:
    built.lines("a", [b"1", b"2"])
    maker = Maker()

    async def lease_twice() -> None:
        async with aio.WorkGroup(built.root.path, "a", "g") as work:
            assert sequences(await work.lease("x", 1, wait=30)) == [1]
            disk = hold()
            leasing = asyncio.create_task(work.lease_as(maker, "x", 1, done=[1]))
            await made(maker)
            disk.fails = True
            disk.go_on()
            with pytest.raises(OSError, match="Input/output error"):
                await leasing
            assert work.has_failed
            with pytest.raises(OSError, match="Input/output error"):
                await work.lease_as(maker, "x", 1)

    with pytest.raises(OSError, match="Input/output error"):
        await lease_twice()
    assert maker.made == [[2]]


async def test_a_task_that_is_cancelled_meanwhile_gives_back_what_it_was_leased(
    built: Built, hold: Callable[[], Disk]
) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    maker = Maker()
    async with aio.WorkGroup(built.root.path, "a", "g") as work:
        assert sequences(await work.lease("x", 1, wait=30)) == [1]
        disk = hold()
        leasing = asyncio.create_task(work.lease_as(maker, "gone", 2, 1 << 20, 10_000, done=[1]))
        await made(maker)
        leasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        disk.go_on()
        again = await work.lease("y", wait=30)
        assert (sequences(again), tries(again)) == ([2, 3], [2, 2])


async def test_an_error_in_making_it_is_that_of_the_task_alone(built: Built) -> None:
    built.lines("a", [b"1", b"2"])

    def fail(_shares: Iterable[Share], _refused: Sequence[Refusal]) -> None:
        raise ValueError("cannot be made")

    async with aio.WorkGroup(built.root.path, "a", "g") as work:
        for done in ([], [1]):
            with pytest.raises(ValueError, match="cannot be made"):
                await work.lease_as(fail, "x", 1, wait=30, done=done)
        assert [(each.first, each.last) for each in await work.pending()] == [(2, 2)]
    with group(built) as again:
        assert tries(again.lease("x", wait=30)) == [2]


async def test_without_anything_done_it_is_made_at_once(built: Built, hold: Callable[[], Disk]) -> None:
    built.lines("a", [b"1"])
    maker = Maker()
    async with aio.WorkGroup(built.root.path, "a", "g") as work:
        disk = hold()
        assert await work.lease_as(maker, "x", wait=30) == ([1], ())
        assert not disk.is_busy.is_set()
        disk.go_on()

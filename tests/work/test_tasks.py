"""Tasks of an event loop as workers: a commit round serves many of them, and answers are prepared during its sync."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from leasing import group, sequences, tries, values
from logs import Built
from running import TIMEOUT_SECONDS, eventually

from wald import aio
from wald.errors import InvalidInput, Locked, NotFound
from wald.work.deliveries import Refusal
from wald.work.owner import Leased, Share

MANY = 500
FOR_EVER = float("inf")


def workers(built: Built) -> aio.WorkGroup:
    return aio.WorkGroup(built.root.path, "a", "g")


def has_leased(built: Built, worker: str) -> bool:
    """True if the owner has written the lease. No task runs during this call."""
    return f'"{worker}"'.encode() in (built.root.cursor_directory("a") / "g.work").read_bytes()


async def sent() -> None:
    """Let the tasks submit their requests; no task runs before the next round of the event loop."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_many_tasks_wait_without_threads_and_each_gets_a_record(built: Built) -> None:
    built.lines("a", [b"first"])
    built.log.set_cursor("a", 1, "g")
    async with workers(built) as work:
        assert await work.lease("x") == []
        before = threading.active_count()
        waiting = [asyncio.create_task(work.lease(f"w{n}", 1, wait=FOR_EVER)) for n in range(MANY)]
        await sent()
        assert threading.active_count() == before
        built.lines("a", [b"%d" % number for number in range(MANY)])
        got = await asyncio.gather(*waiting)
        assert sorted(s for each in got for s in sequences(each)) == list(range(2, MANY + 2))
        refused = await asyncio.gather(*(work.ack(f"w{n}", sequences(each)) for n, each in enumerate(got)))
        assert refused == [[]] * MANY
        assert work.floor == MANY + 1


async def test_tasks_can_do_what_threads_can(built: Built) -> None:
    built.lines("a", [b"%d" % number for number in range(8)])
    async with workers(built) as work:
        got = await work.lease("x", 6, wait=30)
        assert values(got) == [b"%d" % number for number in range(6)]
        assert await work.ack("y", [1]) == [Refusal(1, "x")]
        assert await work.extend("x", [1], 100) == []
        assert await work.nack("x", [1], reason="odd", tries=3) == []
        assert await work.failed(1) == ("odd", 3)
        assert (await work.lease("y", 1, done=[2])).refused == [Refusal(2, "x")]
        assert await work.release("y") == 1
        assert tries(await work.lease("x", 1, done=[2])) == [3]
        assert [(each.first, each.last) for each in await work.pending()] == [(1, 1), (3, 6)]
        assert await work.claim(1000) == 0
        assert await work.skip(8, 8) == 1
        assert await work.give_up("x", [3], "no use") == []
        assert await work.release("x") == 4
        assert (work.floor, work.given_up) == (0, 0)
    with group(built) as work:
        assert sequences(work.lease("x", wait=30)) == [1, 4, 5, 6, 7]


async def test_a_worker_settles_its_jobs(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    async with workers(built) as work:
        settled = []
        async for job in work.worker("x", max_records=2, wait=0):
            match job.value:
                case b"1":
                    settled.append(await job.ack())
                case b"2":
                    settled.append(await job.nack(delay=3600))
                case _:
                    settled += [await job.extend(), await job.give_up("odd")]
        assert settled == [True] * 4
        assert work.floor == 1


async def test_a_cancelled_task_that_waits_gets_nothing(built: Built) -> None:
    built.lines("a", [b"first"])
    built.log.set_cursor("a", 1, "g")
    async with workers(built) as work:
        waiting = asyncio.create_task(work.lease("gone", wait=FOR_EVER))
        await sent()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        built.lines("a", [b"second"])
        assert tries(await work.lease("y", wait=30)) == [1]


async def test_after_a_task_was_cancelled_the_threads_are_answered(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    async with workers(built) as work:
        await work.lease("x", wait=30)
        for sequence in (1, 2):
            waiting = asyncio.create_task(work.lease("y", wait=FOR_EVER))
            await sent()
            waiting.cancel()
            await asyncio.wait([waiting])
            await work.claim(3600)  # the commit round that withdraws the lease is over
            assert await work.skip(sequence, sequence) == 1  # asks in a thread, like the owner


async def test_what_was_leased_to_a_task_that_is_cancelled_comes_again_at_once(built: Built) -> None:
    """The task is cancelled after the lease and before it gets the record."""
    built.lines("a", [b"1", b"2"])
    async with workers(built) as work:
        leasing = asyncio.create_task(work.lease("gone", 1, lease_for=10_000, wait=FOR_EVER))
        await sent()
        eventually(lambda: has_leased(built, "gone"))
        leasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        assert values(await work.lease("y", wait=30)) == [b"1", b"2"]
        assert [each.worker for each in await work.pending()] == ["y"]


async def test_an_acknowledgement_of_a_task_that_is_cancelled_is_carried_out(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    async with workers(built) as work:
        assert len(await work.lease("x", wait=30)) == 2
        acknowledging = asyncio.create_task(work.ack("x", [1]))
        leasing = asyncio.create_task(work.lease("x", wait=FOR_EVER, done=[2]))
        await asyncio.sleep(0)
        for task in (acknowledging, leasing):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await work.pending() == []
        assert work.floor == 2


async def test_a_group_that_is_closed_gives_those_who_wait_nothing_and_takes_no_more(built: Built) -> None:
    built.lines("a", [b"1"])
    async with workers(built) as work:
        assert len(await work.lease("x", wait=30)) == 1
        waiting = [asyncio.create_task(work.lease("x", wait=FOR_EVER)) for _ in range(3)]
        await sent()
        await work.pending()  # so that the earlier requests have been submitted
    assert await asyncio.gather(*waiting) == [[], [], []]
    with pytest.raises(ValueError, match="closed"):
        await work.ack("x", [1])


async def test_an_error_is_raised_in_the_task_that_asks(built: Built) -> None:
    built.lines("a", [b"1"])
    async with workers(built) as work:
        with pytest.raises(InvalidInput):
            await work.lease("x", 0)
        with pytest.raises(NotFound):
            await work.skip(5, 6)
        with pytest.raises(Locked):
            async with workers(built):
                raise AssertionError("opened twice")
        assert len(await work.lease("x", wait=30)) == 1
    with pytest.raises(RuntimeError, match="async with"):
        await workers(built).ack("x", [1])


async def test_a_group_that_is_cancelled_while_it_is_opened_is_free_again(built: Built) -> None:
    built.lines("a", [b"1"])
    for _ in range(20):
        opening = asyncio.create_task(workers(built).__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    def opens() -> bool:
        try:
            group(built).close()
        except Locked:
            return False
        return True

    await asyncio.to_thread(eventually, opens)


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

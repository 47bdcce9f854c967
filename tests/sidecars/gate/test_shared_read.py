"""Concurrent requests for the same data share one disk read; none gets a read that began before the request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from wald_gate.state import SharedRead


def test_a_read_serves_all_that_waited_and_none_that_came_after_it_began() -> None:
    asyncio.run(_share())


async def _share() -> None:
    began, goes_on, reads = Event(), Event(), 0

    def read() -> int:
        nonlocal reads
        reads += 1
        found = reads
        began.set()
        assert goes_on.wait(10)
        return found

    with ThreadPoolExecutor(1) as threads:
        shared = SharedRead(read, threads)
        early = asyncio.create_task(shared.result())
        await asyncio.to_thread(began.wait, 10)
        late = [asyncio.create_task(shared.result()) for _ in range(8)]
        await asyncio.sleep(0)
        late.pop().cancel()
        goes_on.set()
        assert await early == 1
        assert await asyncio.gather(*late) == [2] * 7
        assert await shared.result() == 3


def test_an_error_is_raised_for_each_request() -> None:
    asyncio.run(_fail())


async def _fail() -> None:
    def read() -> int:
        raise OSError("gone")

    with ThreadPoolExecutor(1) as threads:
        shared = SharedRead(read, threads)
        for each in await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True):
            assert isinstance(each, OSError)
        with pytest.raises(OSError, match="gone"):
            await shared.result()

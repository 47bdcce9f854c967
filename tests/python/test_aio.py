"""The asyncio variants behave like the synchronous ones and do not block the event loop."""

import asyncio
import os
import signal
import threading
import tracemalloc
from pathlib import Path

import pytest
from logs import Built
from peer import Peer, ok
from running import TIMEOUT_SECONDS, Daemon, eventually

import wald
from wald import aio
from wald.client.producer import Durable
from wald.errors import NotFound, NotPermitted, Refused, Unavailable
from wald.format.protocol import Publish


async def test_what_is_sent_is_consumed(daemon: Daemon) -> None:
    async with aio.Producer(daemon.root) as producer:
        await producer.send("a", ["one", "two"], keys=["k", None])
        assert await producer.flush() == [Durable(1, 2)]
        await producer.send("a", ["three"], not_before=[10**18])
    assert await producer.acknowledged() == [Durable(3, 3)]
    async with aio.Consumer(daemon.root, "a") as consumer:
        found = [(record.key, record.value, record.headers) async for record in consumer]
    due = b'{"wald.not-before":"1000000000000000000"}'
    assert found == [(b"k", b"one", None), (None, b"two", None), (None, b"three", due)]
    assert wald.open(daemon.root).cursor("a").sequence == 3


async def test_tasks_may_share_a_producer_and_receipts_wait_for_their_records(daemon: Daemon) -> None:
    async with aio.Producer(daemon.root) as producer:
        receipts = await asyncio.gather(*(producer.send("a", [str(number), "x"]) for number in range(20)))
        assert await receipts[19] == [39, 40]
        assert receipts[0].done()
        assert await producer.flush() == [Durable(2 * number + 1, 2 * number + 2) for number in range(19)]
        assert await receipts[3] == [7, 8]
    assert [record.value for record in wald.open(daemon.root).records("a")][::2] == [b"%d" % n for n in range(20)]


@pytest.mark.parametrize("steps", range(4))
async def test_a_task_that_is_cancelled_while_its_producer_closes_is_cancelled(daemon: Daemon, steps: int) -> None:
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def send() -> None:
        async with aio.Producer(daemon.root) as producer:
            await (await producer.send("a", ["one"]))
            sent.set()
        await go_on.wait()

    task = asyncio.create_task(send())
    await sent.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=1)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_call_that_has_not_begun_is_carried_out(daemon: Daemon) -> None:
    """A send, or the flush at the end of a block, must not depend on the thread being free."""
    try:
        async with aio.Producer(daemon.root) as producer:
            await producer.send("a", ["first"])
            await producer.flush()
            os.kill(daemon.process.pid, signal.SIGSTOP)
            await producer.send("a", ["under way"])
            flush = asyncio.create_task(producer.flush())
            await asyncio.sleep(0)  # pass its call to the thread
            send = asyncio.create_task(producer.send("a", ["behind it"]))
            await asyncio.sleep(0)  # pass its call to the thread
            send.cancel()
            with pytest.raises(asyncio.CancelledError):
                await send
            os.kill(daemon.process.pid, signal.SIGCONT)
            await flush
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    found = [record.value for record in wald.open(daemon.root).records("a")]
    assert found == [b"first", b"under way", b"behind it"]


async def test_what_is_unanswered_can_be_asked_while_a_flush_waits(daemon: Daemon) -> None:
    """The event loop does not wait for the daemon."""
    async with aio.Producer(daemon.root) as producer:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        await producer.send("a", ["one", "two"])
        flush = asyncio.create_task(producer.flush())
        await asyncio.sleep(0.1)
        # Without this, a blocked property would wait for the flush, and the flush for the daemon.
        waker = threading.Timer(TIMEOUT_SECONDS, os.kill, (daemon.process.pid, signal.SIGCONT))
        waker.start()
        assert producer.unanswered == 2
        assert waker.is_alive()
        waker.cancel()
        os.kill(daemon.process.pid, signal.SIGCONT)
        assert await flush == [Durable(1, 2)]
        assert producer.unanswered == 0


@pytest.mark.parametrize("code", [b"full", b""])
async def test_refused_and_lost_requests_are_sent_again_in_order(tmp_path: Path, code: bytes) -> None:
    """The peer rejects every seventh request or closes the connection, and rejects a gap."""
    stored: list[int] = []

    def answer(number: int, request: Publish) -> bytes:
        sequence = request.producer_sequence
        if number % 7 == 5:
            return b"ERR %s not now\n" % code if code else b""
        if stored and sequence > stored[-1] + 1:
            return b"ERR gap not yet\n"
        if sequence not in stored:
            stored.append(sequence)
        return ok(request)

    with Peer(tmp_path / "peer.sock", answer):
        async with aio.Producer(tmp_path / "peer.sock") as producer:
            receipts = [await producer.publish("a", b"x\n") for _ in range(30)]
            assert [await receipt for receipt in receipts] == [[number] for number in range(1, 31)]
    assert stored == list(range(1, 31))


async def test_a_producer_ends_with_an_error_that_does_not_pass(tmp_path: Path) -> None:
    sent = threading.Event()

    def answer(number: int, request: Publish) -> bytes:
        assert sent.wait(TIMEOUT_SECONDS)
        return ok(request) if number < 5 else b"ERR denied no\n"

    with Peer(tmp_path / "peer.sock", answer):
        async with aio.Producer(tmp_path / "peer.sock") as producer:
            receipts = [await producer.publish("a", b"x\n") for _ in range(7)]
            sent.set()
            with pytest.raises(NotPermitted):
                await receipts[4]
            for late in (receipts[5], producer.publish("a", b"x\n")):
                with pytest.raises(Refused, match="has ended: no"):
                    await late
            assert producer.unanswered == 0
            assert await receipts[0] == [1]
            assert await producer.acknowledged() == [Durable(number, number) for number in (2, 3, 4)]


async def test_a_producer_sends_nothing_after_a_permanent_error(tmp_path: Path) -> None:
    sent = threading.Event()
    numbers: list[int] = []

    def answer(_: int, request: Publish) -> bytes:
        assert sent.wait(TIMEOUT_SECONDS)
        numbers.append(request.producer_sequence)
        return b"ERR no-route no\n" if len(numbers) == 1 else ok(request)

    with Peer(tmp_path / "peer.sock", answer):
        async with aio.Producer(tmp_path / "peer.sock") as producer:
            receipts = [await producer.publish(route, b"x\n") for route in ("nothing", *4 * ["orders"])]
            sent.set()
            results = await asyncio.gather(*receipts, return_exceptions=True)
            assert [type(result) for result in results] == [NotFound, *4 * [Refused]]
            await asyncio.sleep(0.3)  # long enough to reconnect
    assert numbers == [1]


async def test_a_daemon_that_returns_too_late_receives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "peer.sock"
    late: list[int] = []

    def answer_late(_: int, request: Publish) -> bytes:
        late.append(request.producer_sequence)
        return ok(request)

    peer = Peer(path, lambda number, request: ok(request) if number == 1 else b"")
    async with aio.Producer(path, retry_for=0.3) as producer:
        assert await (await producer.publish("a", b"x\n")) == [1]
        receipts = [await producer.publish("a", b"x\n") for _ in range(3)]
        await asyncio.to_thread(peer.close)
        path.unlink()
        results = await asyncio.gather(*receipts, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable, Refused, Refused]
        peer = Peer(path, answer_late)
        await asyncio.sleep(1)  # the longest pause before a reconnect
    await asyncio.to_thread(peer.close)
    assert late == []


async def test_a_busy_event_loop_does_not_give_up_requests_sent_since(tmp_path: Path) -> None:
    """The answer to the first request is in the socket when the timer expires."""
    sent, answered, answer_rest = threading.Event(), threading.Event(), threading.Event()

    def answer(number: int, request: Publish) -> bytes:
        assert (sent if number == 1 else answer_rest).wait(TIMEOUT_SECONDS)
        answered.set()
        return ok(request)

    with Peer(tmp_path / "peer.sock", answer):
        loop = asyncio.get_running_loop()
        async with aio.Producer(tmp_path / "peer.sock", retry_for=1) as producer:
            receipts = [await producer.publish("a", b"x\n") for _ in range(4)]
            (tmp_path / "peer.sock").unlink()  # the producer learns at once that it cannot ask for the reason
            sent.set()
            deadline = loop.time() + 1.1
            eventually(lambda: answered.is_set() and loop.time() > deadline)
            while not receipts[0].done():
                await asyncio.sleep(0)
            given_up = [task for task in asyncio.all_tasks() if task.get_name() == "wald-aio-give-up"]
            await asyncio.wait(given_up)
            answer_rest.set()
            assert [task.exception() for task in given_up] == [None]
            assert [await receipt for receipt in receipts] == [[number] for number in range(1, 5)]


async def test_acknowledged_payloads_are_freed(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with Peer(tmp_path / "peer.sock", lambda _, request: ok(request)):
            async with aio.Producer(tmp_path / "peer.sock") as producer:
                receipts = [await producer.publish("a", b"x" * 100_000 + b"\n") for _ in range(100)]
                assert await receipts[-1] == [100]
                assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


async def test_a_daemon_that_does_not_answer_is_given_up_by_every_task(daemon: Daemon) -> None:
    """More tasks wait than requests may be in flight."""
    try:
        async with aio.Producer(daemon.root, retry_for=0.3) as producer:
            await producer.send("a", ["first"])
            await producer.flush()
            os.kill(daemon.process.pid, signal.SIGSTOP)
            results = await asyncio.gather(*(producer.send("a", ["x"]) for _ in range(30)), return_exceptions=True)
            assert {type(result) for result in results[8:]} == {Unavailable, Refused}
            with pytest.raises(Refused):
                await producer.flush()
            assert producer.unanswered == 8
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)


async def test_a_producer_without_a_daemon_or_outside_of_its_block_says_so(tmp_path: Path) -> None:
    for name, error in (("log", NotFound), ("absent.sock", Unavailable)):
        with pytest.raises(error):
            async with aio.Producer(tmp_path / name, connect_for=0):
                pytest.fail("it connected")
    with pytest.raises(RuntimeError, match="async with"):
        await aio.Producer(tmp_path / "log").send("a", ["x"])


async def test_waiting_for_records_leaves_the_loop_free_and_ends_when_it_is_cancelled(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    seen: list[bytes] = []

    async def consume(came: asyncio.Event) -> None:
        async with aio.Consumer(built.root.path, "a", follow=True) as consumer:
            async for record in consumer:
                seen.append(record.value)
                came.set()

    came = asyncio.Event()
    task = asyncio.create_task(consume(came))
    await came.wait()
    while len(seen) < 2:
        await asyncio.sleep(0)
    came.clear()
    built.lines("a", [b"3"])
    await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [b"1", b"2", b"3"]
    assert built.log.cursor("a").sequence in (2, 3)  # 3 if it had requested the next record


async def test_an_iterator_survives_a_timeout_and_loses_no_record(built: Built) -> None:
    """No wait blocks a commit, and a record that arrives in the meantime is delivered."""
    built.lines("a", [b"0"])
    built.log.set_cursor("a", 1)
    async with aio.Consumer(built.root.path, "a", follow=True) as consumer:
        records = aiter(consumer)
        for sequence in range(2, 12):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(records), 0.02)
            await asyncio.wait_for(consumer.commit(), TIMEOUT_SECONDS)
            assert built.log.cursor("a").sequence == sequence - 1
            waiting = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0.001 * sequence)
            built.lines("a", [b"more"])
            if sequence % 2:
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                waiting = asyncio.ensure_future(anext(records))
            assert (await asyncio.wait_for(waiting, TIMEOUT_SECONDS)).sequence == sequence


async def test_waiting_moves_the_cursor_when_its_time_has_come(built: Built) -> None:
    built.lines("a", [b"1"])
    async with aio.Consumer(built.root.path, "a", follow=True, commit_seconds=0.05) as consumer:
        records = aiter(consumer)
        await anext(records)
        waiting = asyncio.ensure_future(anext(records))
        await asyncio.to_thread(eventually, lambda: built.log.cursor("a").sequence == 1)
        waiting.cancel()


async def test_batches_are_handed_out_whole_and_a_block_left_early_leaves_the_last_one(built: Built) -> None:
    for values in ([b"1", b"2"], [b"3"], [b"4"]):
        built.lines("a", values)
    async with aio.Consumer(built.root.path, "a") as consumer:
        async for batch in consumer.batches():
            if batch.first_sequence == 3:
                break
    assert built.log.cursor("a").sequence == 2
    async with aio.Consumer(built.root.path, "a") as consumer:
        async for record in consumer:
            assert record.sequence == 3
            await consumer.commit()
            break
    assert built.log.cursor("a").sequence == 3

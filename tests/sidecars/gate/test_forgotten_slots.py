"""A key is stored once even if the daemon has evicted its slot because too many producers appeared."""

import asyncio
import json
import random
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from threading import Event

import pytest
import uvloop
from contents import values
from flooding import stopped
from forgetting import forget
from gating import Gate
from repeating import keys_of_slot, outcome, publishing, send, store
from running import TIMEOUT_SECONDS, Client, Daemon, eventually
from starlette.responses import Response

import wald as library
from wald.errors import Unavailable
from wald.format.log_state import PRODUCERS_MAX
from wald_gate.http.connection import Connection
from wald_gate.http.exchange import Exchange
from wald_gate.limits import ConnectionPool, Limits, MemoryReservation
from wald_gate.records_in import publisher
from wald_gate.records_in.append import JsonLines
from wald_gate.records_in.daemon import DaemonClient, Producer
from wald_gate.records_in.keys import KeyStore, slot_ids
from wald_gate.records_in.publisher import IdempotentPublisher
from wald_gate.settings import LimitSettings


def run(daemon: Daemon, test: Callable[[IdempotentPublisher], Awaitable[None]]) -> None:
    """Run a test with the idempotent publisher of a gate in this process."""

    async def tested() -> None:
        async with publishing(daemon) as repeats:
            await test(repeats)

    asyncio.run(tested())


async def one(repeats: IdempotentPublisher, key: int = 0, value: bytes = b"x") -> int:
    """Store a record under a key; return its sequence."""
    [sequence] = await store(repeats, key, [value])
    return sequence


@contextmanager
def stopped_for_long(daemon: Daemon, repeats: IdempotentPublisher) -> Iterator[None]:
    """Pause the daemon and shorten the timeout of these requests; others may be slow on a loaded machine."""
    patience, repeats.daemon.patience = repeats.daemon.patience, 0.5
    with stopped(daemon):
        yield
    repeats.daemon.patience = patience


def test_another_gate_has_stored_it_and_the_daemon_has_forgotten_the_slot(
    gate: Gate, daemon: Daemon, root: Path
) -> None:
    with Gate(root) as other:
        assert [send(each, f"before{number}").status for number, each in enumerate((gate, other))] == [200, 200]
        first = send(gate, "k")
        forget(daemon)

        assert outcome(send(other, "k")) == (200, True, first.body)
        assert values(root, "orders") == [b"one", b"two"] * 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_was_given_up_is_stored_later_and_the_daemon_has_forgotten_the_slot(
    daemon: Daemon, root: Path, *, is_cancelled: bool
) -> None:
    async def test(repeats: IdempotentPublisher) -> None:
        await one(repeats, 1, b"first")
        with stopped_for_long(daemon, repeats):
            storing = asyncio.create_task(one(repeats))
            if is_cancelled:
                await asyncio.to_thread(eventually, lambda: repeats.daemon._main.requests.in_flight)
                storing.cancel()
            with pytest.raises(asyncio.CancelledError if is_cancelled else Unavailable):
                await storing
        await asyncio.to_thread(eventually, lambda: b"x" in values(root, "orders"))
        await asyncio.to_thread(forget, daemon)

        assert await one(repeats) == 2
        assert await one(repeats, 2, b"last") == 2 + PRODUCERS_MAX + 1

    run(daemon, test)
    assert values(root, "orders") == [b"first", b"x", b"last"]


def test_a_slot_that_began_anew_goes_on(daemon: Daemon, root: Path) -> None:
    """A gate that found nothing of the slot after a reclaim restarted its numbers, which are lower than before."""

    async def test(repeats: IdempotentPublisher) -> None:
        for number in range(3):
            await one(repeats, 1 + number, b"%d" % number)
        await asyncio.to_thread(forget, daemon)
        slot = slot_ids(library.open(root).identity.log_id)[7]
        with Client(daemon.socket_path) as client:
            client.publish("orders", b"anew\n", f"pid={slot:x} pseq=1")
            assert client.reply().startswith("OK ")

        await one(repeats)

    run(daemon, test)
    assert values(root, "orders") == [b"0", b"1", b"2", b"anew", b"x"]


def test_requests_of_one_slot_are_given_up_together(daemon: Daemon) -> None:
    """Each request times out on its own deadline, not one after the other."""

    async def test(repeats: IdempotentPublisher) -> None:
        await one(repeats)
        with stopped_for_long(daemon, repeats):
            storing = [asyncio.create_task(one(repeats, 1 + number)) for number in range(200)]
            await asyncio.wait(storing, timeout=60)  # sequential timeouts would take 100 s
            assert {type(each.exception()) for each in storing} == {Unavailable}

        assert await one(repeats) == 1

    run(daemon, test)


def test_a_key_that_is_saved_during_a_sync_is_synced(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_SAVING_SECONDS", 0)
    reached, go_on, saved, again = Event(), Event(), Event(), Event()
    sync, save = KeyStore.sync, KeyStore.save

    def held_sync(store: KeyStore) -> None:
        if saved.is_set():
            again.set()
        reached.set()
        go_on.wait(TIMEOUT_SECONDS)
        sync(store)

    def noted_save(store: KeyStore) -> None:
        save(store)
        if reached.is_set():
            saved.set()

    async def test(repeats: IdempotentPublisher) -> None:
        await one(repeats)
        await asyncio.to_thread(reached.wait, TIMEOUT_SECONDS)
        storing = asyncio.create_task(one(repeats, 1))
        saves = repeats._saves
        while saves._next is None and (saves._running is None or saves._running.done()):
            await asyncio.sleep(0.01)
        go_on.set()
        await storing
        assert await asyncio.to_thread(again.wait, 5)

    monkeypatch.setattr(KeyStore, "sync", held_sync)
    monkeypatch.setattr(KeyStore, "save", noted_save)
    run(daemon, test)


def test_the_end_of_a_gate_does_not_wait_until_the_log_is_read(daemon: Daemon) -> None:
    forget(daemon)

    async def test(repeats: IdempotentPublisher) -> None:
        reached, go_on = Event(), Event()

        def hold() -> None:
            reached.set()
            go_on.wait(30)

        held = asyncio.create_task(repeats.in_thread(hold))
        await asyncio.to_thread(reached.wait, 30)
        storing = asyncio.create_task(one(repeats))
        await asyncio.sleep(0)
        closing = asyncio.create_task(repeats.close())
        await asyncio.sleep(0)
        go_on.set()
        await held
        await closing
        with pytest.raises(Unavailable, match="the gate is stopping"):
            await storing

    run(daemon, test)


def test_a_daemon_that_is_older_than_the_gate_is_told_of(tmp_path: Path) -> None:
    """The daemon rejects the unknown option, which is not the client's fault."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        await reader.readexactly(int(line.split()[2]))
        writer.write(b"ERR bad-request options are enc=lines|columns, pid=<hex, not 0> with pseq=<n>\n")
        await reader.read()
        writer.close()

    async def tested() -> None:
        path = tmp_path / "older.sock"
        async with await asyncio.start_unix_server(refuse, path):
            daemon = DaemonClient(tmp_path, path, patience=10)
            with pytest.raises(Unavailable, match="the daemon is older than this gate"):
                await daemon.publish_as(Producer(1, 1), "orders", b"x", seen=0, until=daemon.deadline())
            await daemon.close()

    asyncio.run(tested())


def test_two_gates_store_each_key_once_while_producers_come_and_the_daemon_stops(
    gate: Gate, daemon: Daemon, root: Path
) -> None:
    """Clients repeat each key at either gate, whatever the response; the keys share two slots."""
    keys = [*islice(keys_of_slot(0), 16), *islice(keys_of_slot(1), 16)]
    ends = Event()

    def disturb() -> None:
        while not ends.is_set():
            forget(daemon)
            with stopped(daemon):
                ends.wait(0.2)

    def send_all(seed: int) -> list[tuple[str, bytes]]:
        order = random.Random(seed)
        answers = []
        for key in order.sample(keys, len(keys)):
            while (answer := send(order.choice(gates), key, key.encode() + b"\n")).status in (409, 503):
                pass
            assert answer.status == 200, answer.body
            answers.append((key, answer.body))
        return answers

    with Gate(root) as other, ThreadPoolExecutor(5) as threads:
        gates = [gate, other]
        disturbing = threads.submit(disturb)
        try:
            answers = Counter(answer for each in threads.map(send_all, range(4)) for answer in each)
        finally:
            ends.set()
        disturbing.result()

    assert sorted(values(root, "orders")) == sorted(key.encode() for key in keys)
    assert sorted(answers.values()) == [4] * len(keys)
    assert "Traceback" not in gate.log + other.log


BIG = 1 << 20


class Silent:
    """Fake daemon that accepts requests, never answers ``PUB``, and counts.

    Attributes:
        routes: the number of PUB requests by route.
        questions: the number of STAT requests.
        busy: the busy routes in the response to STAT.
        open: the number of open connections.
    """

    def __init__(self) -> None:
        self.questions = self.open = 0
        self.busy: list[str] = []
        self.routes: Counter[str] = Counter()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read requests from a connection."""
        self.open += 1
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"STAT\n":
                    self.questions += 1
                    writer.write(b"OK %b\n" % json.dumps({"busy": self.busy}).encode())
                elif line.startswith(b"PUB "):
                    self.routes[line.split()[1].decode()] += 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1


@asynccontextmanager
async def silent(path: Path) -> AsyncIterator[Silent]:
    found = Silent()
    server = await asyncio.start_unix_server(found.take, path, limit=2 * BIG)
    async with server:
        yield found
        while found.open:
            await asyncio.sleep(0.01)


async def outcomes(asked: Sequence[asyncio.Task[object]]) -> set[type[object]]:
    return {type(answer) for answer in await asyncio.gather(*asked, return_exceptions=True)}


def test_so_many_are_sent_that_the_daemon_still_knows_each_and_asked_once_why_it_does_not_answer(
    tmp_path: Path,
) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=5)
            asked = [asyncio.create_task(gate.publish("orders", b"x\n", columns=False)) for _ in range(300)]
            while daemon.routes["orders"] < 256:
                await asyncio.sleep(0.01)
            for _ in range(20):  # time for more requests to arrive
                await asyncio.sleep(0.001)
            assert daemon.routes["orders"] == 256
            assert await outcomes(asked) == {Unavailable}
            assert daemon.questions < 10
            await gate.close()

    asyncio.run(ask())


def test_a_long_line_takes_no_thread_in_which_the_daemon_is_connected_to() -> None:
    """A task that ends only after the line is parsed occupies all of asyncio's default threads."""

    async def ask() -> None:
        parsed = Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        taken = loop.run_in_executor(None, parsed.wait, 30)
        with ThreadPoolExecutor(1) as threads:
            limits = LimitSettings(record_max_bytes=2 * BIG)
            lines = JsonLines(limits, MemoryReservation(Limits(limits)), threads)
            [line] = lines.feed(b'{"value": "%b"}\n' % (b"x" * BIG))
            [payload] = await lines.payloads(line)
            assert len(payload) > BIG
        parsed.set()
        assert await taken

    asyncio.run(ask())


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_kept_of_what_was_given_up(tmp_path: Path, is_there: bool) -> None:
    async def ask() -> None:
        async with silent(tmp_path / "socket") if is_there else nullcontext():
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=0.2)
            before, _ = tracemalloc.get_traced_memory()
            for number in range(5):
                payloads = [bytes([number]) * BIG for _ in range(5)]
                asked = [asyncio.create_task(gate.publish("orders", each, columns=False)) for each in payloads]
                assert await outcomes(asked) == {Unavailable}
                del payloads, asked
            after, _ = tracemalloc.get_traced_memory()
            assert after - before < 8 * BIG
            await gate.close()

    tracemalloc.start()
    try:
        asyncio.run(ask())
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_route_that_is_free_again_waits_for_no_other(tmp_path: Path) -> None:
    """It was queued behind more requests of the other route than are sent at a time."""

    async def ask() -> None:
        async with silent(tmp_path / "socket") as daemon:
            gate = DaemonClient(tmp_path, tmp_path / "socket", patience=20)
            daemon.busy = ["a", "b"]
            asked = [asyncio.create_task(gate.publish(route, b"x\n", columns=False)) for route in ["a"] * 300 + ["b"]]
            while daemon.routes["a"] < 512:  # on the first connection, then on the second
                await asyncio.sleep(0.01)
            assert daemon.routes["b"] == 0
            daemon.busy = ["a"]
            while not daemon.routes["b"]:
                assert not any(each.done() for each in asked)
                await asyncio.sleep(0.01)
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            await gate.close()

    asyncio.run(ask())


def test_a_head_that_cannot_be_written_is_answered_with_500() -> None:
    async def application(request: Exchange) -> None:
        await request.answer(Response(headers={"x": "a\r\nb: c"}))

    async def ask() -> bytes:
        here, there = socket.socketpair()
        logged: list[int] = []
        connection = Connection(
            application, ConnectionPool(LimitSettings()), lambda _, response, __: logged.append(response.status_code)
        )
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, here)
        reader, writer = await asyncio.open_connection(sock=there)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert logged == [500]
        return answer

    assert uvloop.run(ask()).startswith(b"HTTP/1.1 500 ")

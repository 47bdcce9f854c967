"""A key is stored once even if the daemon has evicted its slot because too many producers appeared."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event

import pytest
from contents import values
from flooding import stopped
from forgetting import forget
from gating import Gate
from repeating import outcome, send
from running import TIMEOUT_SECONDS, Client, eventually
from running import Daemon as Process

import wald as library
from wald.client.payloads import column_payloads
from wald.errors import Unavailable
from wald.format.log_state import PRODUCERS_MAX
from wald_gate.records_in import publisher
from wald_gate.records_in.daemon import DaemonClient, Producer
from wald_gate.records_in.keys import KeyStore, Slots
from wald_gate.records_in.publisher import IdempotentPublisher

KEY = bytes(16)


async def store(repeats: IdempotentPublisher, key: bytes = KEY, value: bytes = b"x") -> int:
    """Store a record under a key; return its sequence."""
    found: list[int] = []
    async with repeats.request(key, "orders", lambda durable, _, *, is_new: found.append(durable.first)) as request:
        await request.add(*column_payloads([value]), columns=True)
        await request.finish()
    return found[0]


def run(
    daemon: Process, test: Callable[[IdempotentPublisher], Awaitable[None]], *, patience: float = TIMEOUT_SECONDS
) -> None:
    """Run the idempotent publisher of a gate in this process."""

    @asynccontextmanager
    async def running() -> AsyncIterator[IdempotentPublisher]:
        to_daemon = DaemonClient(daemon.root, daemon.socket_path, patience=patience)
        repeats = IdempotentPublisher(library.open(daemon.root), to_daemon)
        try:
            yield repeats
        finally:
            await repeats.close()
            await to_daemon.close()

    async def tested() -> None:
        async with running() as repeats:
            await test(repeats)

    asyncio.run(tested())


@contextmanager
def stopped_for_long(daemon: Process, repeats: IdempotentPublisher) -> Iterator[None]:
    """Pause the daemon and shorten the timeout of these requests; others may be slow on a loaded machine."""
    patience, repeats._daemon.patience = repeats._daemon.patience, 0.5
    with stopped(daemon):
        yield
    repeats._daemon.patience = patience


def test_another_gate_has_stored_it_and_the_daemon_has_forgotten_the_slot(
    gate: Gate, daemon: Process, root: Path
) -> None:
    with Gate(root) as other:
        assert [send(each, f"before{number}").status for number, each in enumerate((gate, other))] == [200, 200]
        first = send(gate, "k")
        forget(daemon)

        assert outcome(send(other, "k")) == (200, True, first.body)
        assert values(root, "orders") == [b"one", b"two"] * 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_was_given_up_is_stored_later_and_the_daemon_has_forgotten_the_slot(
    daemon: Process, root: Path, *, is_cancelled: bool
) -> None:
    async def test(repeats: IdempotentPublisher) -> None:
        await store(repeats, KEY[:-1] + b"\1", b"first")
        with stopped_for_long(daemon, repeats):
            storing = asyncio.create_task(store(repeats))
            if is_cancelled:
                await asyncio.to_thread(eventually, lambda: repeats._daemon._main.requests.in_flight)
                storing.cancel()
            with pytest.raises(asyncio.CancelledError if is_cancelled else Unavailable):
                await storing
        await asyncio.to_thread(eventually, lambda: b"x" in values(root, "orders"))
        await asyncio.to_thread(forget, daemon)

        assert await store(repeats) == 2
        assert await store(repeats, KEY[:-1] + b"\2", b"last") == 2 + PRODUCERS_MAX + 1

    run(daemon, test)
    assert values(root, "orders") == [b"first", b"x", b"last"]


def test_a_slot_that_began_anew_goes_on(daemon: Process, root: Path) -> None:
    """A gate that found nothing of the slot after a reclaim restarted its numbers, which are lower than before."""

    async def test(repeats: IdempotentPublisher) -> None:
        for number in range(3):
            await store(repeats, KEY[:-1] + bytes([1 + number]), b"%d" % number)
        await asyncio.to_thread(forget, daemon)
        slot = Slots(library.open(root).identity.log_id).ids[0]
        with Client(daemon.socket_path) as client:
            client.publish("orders", b"anew\n", f"pid={slot:x} pseq=1")
            assert client.reply().startswith("OK ")

        await store(repeats)

    run(daemon, test)
    assert values(root, "orders") == [b"0", b"1", b"2", b"anew", b"x"]


def test_requests_of_one_slot_are_given_up_together(daemon: Process) -> None:
    """Each request times out on its own deadline, not one after the other."""

    async def test(repeats: IdempotentPublisher) -> None:
        await store(repeats)
        with stopped_for_long(daemon, repeats):
            storing = [asyncio.create_task(store(repeats, KEY[:-1] + bytes([1 + number]))) for number in range(200)]
            await asyncio.wait(storing, timeout=60)  # sequential timeouts would take 100 s
            assert {type(each.exception()) for each in storing} == {Unavailable}

        assert await store(repeats) == 1

    run(daemon, test)


def test_a_key_that_is_saved_during_a_sync_is_synced(daemon: Process, monkeypatch: pytest.MonkeyPatch) -> None:
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
        await store(repeats)
        await asyncio.to_thread(reached.wait, TIMEOUT_SECONDS)
        storing = asyncio.create_task(store(repeats, b"\1" * 16))
        while repeats._next_save is None and (repeats._last_save is None or repeats._last_save.done()):
            await asyncio.sleep(0.01)
        go_on.set()
        await storing
        assert await asyncio.to_thread(again.wait, 5)

    monkeypatch.setattr(KeyStore, "sync", held_sync)
    monkeypatch.setattr(KeyStore, "save", noted_save)
    run(daemon, test)


def test_the_end_of_a_gate_does_not_wait_until_the_log_is_read(daemon: Process) -> None:
    forget(daemon)
    read: list[bool] = []

    async def test(repeats: IdempotentPublisher) -> None:
        reached, go_on = Event(), Event()

        def hold() -> None:
            reached.set()
            go_on.wait(30)

        held = asyncio.create_task(repeats.in_thread(hold))
        await asyncio.to_thread(reached.wait, 30)
        storing = asyncio.create_task(store(repeats))
        await asyncio.sleep(0)
        closing = asyncio.create_task(repeats.close())
        await asyncio.sleep(0)
        go_on.set()
        await held
        await closing
        with pytest.raises(Unavailable, match="the gate is stopping"):
            await storing
        read.append(True)

    run(daemon, test)
    assert read == [True]


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
    gate: Gate, daemon: Process, root: Path
) -> None:
    """Clients repeat each key at either gate, whatever the response."""
    keys = [f"key-{number}" for number in range(64)]
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

    with Gate(root) as other, ThreadPoolExecutor(7) as threads:
        gates = [gate, other]
        disturbing = threads.submit(disturb)
        try:
            answers = Counter(answer for each in threads.map(send_all, range(6)) for answer in each)
        finally:
            ends.set()
        disturbing.result()

    assert sorted(values(root, "orders")) == sorted(key.encode() for key in keys)
    assert sorted(answers.values()) == [6] * len(keys)
    assert "Traceback" not in gate.log + other.log

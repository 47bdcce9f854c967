"""A key among the latest parts is remembered for one day; after that it can be stored again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from clocks import moved
from gating import Gate
from repeating import begun, outcome, release, send
from running import Daemon, eventually

import wald as library
from wald.client.payloads import column_payloads
from wald_gate.records_in import daemon as daemons
from wald_gate.records_in import keys
from wald_gate.records_in.publisher import IdempotentPublisher

LINES = b"".join(b"line %d\n" % number for number in range(40_000))  # several parts
NEW = b'{"first":5,"last":6,"count":2}'
_DIRECTORIES = count()


@contextmanager
def at(root: Path, hours: float) -> Iterator[Gate]:
    """A gate and its daemon with clocks shifted by the given number of hours."""
    env = moved(root.with_name(f"clock-{next(_DIRECTORIES)}"), hours) if hours else None
    with Daemon(root, env=env) as daemon:
        daemon.ask("ROUTE ADD orders")
        with Gate(root, env=env) as gate:
            yield gate
            gate.stop()
        daemon.stop()


def values(root: Path) -> list[bytes]:
    return [record.value for record in library.open(root).records("orders")]


@pytest.mark.parametrize("has_table", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_key_is_remembered_for_a_day(root: Path, *, has_table: bool) -> None:
    with at(root, -23) as gate:
        first = send(gate, "k")
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        assert send(gate, "new").body == b'{"first":3,"last":4,"count":2}'
    with at(root, 0) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)


@pytest.mark.parametrize("has_table", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_key_is_forgotten_after_a_day(root: Path, *, has_table: bool) -> None:
    with at(root, -25) as gate:
        send(gate, "k")
    with at(root, 0) as gate:
        send(gate, "new")
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        assert outcome(send(gate, "k")) == (200, False, NEW)
        assert outcome(send(gate, "k")) == (200, True, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("has_table", [True, False])
def test_the_day_begins_with_the_part_that_was_stored_last(root: Path, *, has_table: bool) -> None:
    """If a body was cut off and completed later, the last day of the log has only its end."""
    with at(root, -25) as gate, begun(gate, "k", LINES[:300_000], length=len(LINES)):
        eventually(lambda: values(root))
    with at(root, -23) as gate:
        whole = send(gate, "k", LINES)
        assert whole.json() == {"first": 1, "last": 40_000, "count": 40_000}
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        again = send(gate, "k", LINES)

    assert (outcome(again) if has_table else again.json()["code"]) == (
        (200, True, whole.body) if has_table else "forgotten"
    )
    assert len(values(root)) == 40_000


@pytest.mark.slow
def test_no_more_than_the_log_of_the_last_day_is_read(root: Path, tmp_path: Path) -> None:
    """The saved table ends long before; later keys that are older than one day are forgotten, too."""
    with at(root, -30) as gate:
        first = send(gate, "a")
        gate.stop()
        gate.start()
        assert outcome(send(gate, "a")) == (200, True, first.body)  # so the table covers the log to its end
    shutil.copytree(root / "gate", tmp_path / "table")
    with at(root, -25) as gate:
        send(gate, "b")
    shutil.rmtree(root / "gate")
    shutil.copytree(tmp_path / "table", root / "gate")
    with at(root, 0) as gate:
        assert outcome(send(gate, "b")) == (200, False, NEW)
        assert outcome(send(gate, "a")) == (200, True, first.body)  # remembered until newer parts arrive


@pytest.mark.slow
def test_a_clock_that_goes_back_forgets_no_key(root: Path) -> None:
    with at(root, 0) as gate:
        first = send(gate, "k")
    with at(root, -48) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)
        assert send(gate, "new").json()["first"] == 3
    with at(root, -48) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)


async def store(repeats: IdempotentPublisher, key: int, values: list[bytes]) -> list[int]:
    """Store the parts of a body and return their sequences; all keys share one slot."""
    async with repeats.request(bytes([7] + [key] * 15)) as request:
        found = []
        for value in values:
            durable, _ = await request.publish("orders", *column_payloads([value]), is_last=value == values[-1])
            found.append(durable.first)
        return found


@pytest.mark.parametrize("by_reclaim", [True, False])
def test_the_number_of_a_slot_is_known_of_what_is_not_read(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch, *, by_reclaim: bool
) -> None:
    """Another gate used the slot in the meantime, and its records are older than one day or reclaimed."""

    async def test() -> None:
        to_daemon = daemons.DaemonClient(root, daemon.socket_path, patience=30)
        one, other = (IdempotentPublisher(library.open(root), to_daemon) for _ in range(2))
        try:
            assert await store(one, 1, [b"a"]) == [1]
            assert await store(other, 2, [b"b"]) == [2]
            if by_reclaim:
                await asyncio.to_thread(release, daemon)
            else:
                monkeypatch.setattr(keys, "_KEPT_NS", 0)
            assert await store(one, 3, [b"c"]) == [3]
        finally:
            await one.close()
            await other.close()
            await to_daemon.close()

    asyncio.run(test())


def test_the_parts_that_came_last_are_remembered(daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one part of a key is among the latest, all parts of that key are remembered."""
    monkeypatch.setattr(keys, "KEPT_PARTS", 4)

    async def test() -> None:
        to_daemon = daemons.DaemonClient(root, daemon.socket_path, patience=30)
        repeats = IdempotentPublisher(library.open(root), to_daemon)
        try:
            assert await store(repeats, 1, [b"forgotten"]) == [1]
            assert await store(repeats, 2, [b"a", b"b", b"c"]) == [2, 3, 4]
            for key in range(3, 6):
                assert await store(repeats, key, [b"x"]) == [key + 2]
        finally:
            await repeats.close()
        repeats = IdempotentPublisher(library.open(root), to_daemon)
        try:
            assert await store(repeats, 2, [b"a", b"b", b"c"]) == [2, 3, 4]
            assert await store(repeats, 1, [b"forgotten"]) == [8]
        finally:
            await repeats.close()
            await to_daemon.close()

    asyncio.run(test())

"""Ownership of a work group: the gate owns it from the first request until the gate stops or nothing is pending."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill, small_file_system
from gating import BILLING, ORDERS, Gate, serving
from logs import Built
from running import Daemon, eventually, run, sidecar
from running import refused as refused_command
from tracing import hangs_in, traced

import wald
from wald.errors import Locked, NotFound
from wald_gate.groups.hosting import Groups
from wald_gate.problems import HttpError
from wald_gate.responses import Late
from wald_gate.settings import GroupSettings

NAMED = {name: GroupSettings() for name in ("a/g", "a/g1", "a/g2", "b/g")}  # named in the settings


@pytest.mark.usefixtures("billing")
def test_a_killed_gate_delivers_again_what_was_leased_and_never_what_was_acknowledged(gate: Gate) -> None:
    gate.post(ORDERS, b"".join(b"%d\n" % number for number in range(100)))
    with ThreadPoolExecutor(20) as threads:  # requests at the same time share the opening of the group
        asked = [threads.submit(gate.leased, f"w{n}", max_records=5) for n in range(20)]
        leased = {f"w{n}": each.result() for n, each in enumerate(asked)}
    assert sorted(each for sequences in leased.values() for each in sequences) == list(range(1, 101))
    for worker, sequences in leased.items():
        odd = [each for each in sequences if each % 2]
        assert gate.worked("ack", worker, sequences=odd) == {"refused": []}
    gate.kill()
    gate.start()
    late = next(worker for worker, sequences in leased.items() if 2 in sequences)
    assert gate.worked("ack", late, sequences=[2]) == {"refused": []}  # no other worker has leased it
    again = gate.worked("lease")["records"]
    assert [(record["sequence"], record["tries"]) for record in again] == [(n, 2) for n in range(4, 101, 2)]


def test_a_second_gate_and_a_drain_are_refused_while_a_gate_owns_the_group(daemon: Daemon, tmp_path: Path) -> None:
    linked = tmp_path / "other"
    linked.symlink_to(daemon.root)
    with Gate(daemon.root, anew=True) as gate, Gate(linked) as other:
        gate.post(ORDERS, b"1\n")
        gate.make_group("billing")
        assert gate.leased() == [1]
        refused = other.work("lease")
        said = refused.json()
        assert (refused.status, said["code"], refused.headers["retry-after"]) == (423, "locked", "2")
        assert said["detail"].startswith(f"process {gate.process.pid} (")
        assert said["detail"].endswith(") works on route orders for group billing")
        assert "30 s after the last request" in said["hint"]
        drain = sidecar("drain", "--root", gate.root, "orders", "--group", "billing", "--workers", "1", "--exit-at-end")
        code, message, hint = refused_command(run([*drain, "--", "true"]))
        assert (code, f"process {gate.process.pid}, " in message, "wald_gate" in message) == (5, True, True), message
        assert "a wald-gate releases the group 30 s after the last request" in hint
        assert [each["worker"] for each in other.get(f"{BILLING}/pending").lines()] == ["w1"]
        gate.kill()
        assert other.leased() == [1]


def test_a_group_of_another_process_is_taken_over_when_that_has_ended_and_left_at_the_end(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    with wald.WorkGroup(gate.root, "orders", "billing") as work:
        assert len(work.lease("elsewhere", wait=60)) == 2
        assert gate.work("lease").status == 423
        [entry] = gate.get(f"{BILLING}/pending").lines()
        assert (entry["kind"], entry["worker"]) == ("out", "elsewhere")
    assert gate.leased() == [1, 2]
    assert gate.worked("ack", sequences=[1, 2]) == {"refused": []}
    assert gate.stop() == 0
    assert wald.open(gate.root).cursor("orders", "billing").sequence == 2
    with wald.WorkGroup(gate.root, "orders", "billing") as work:
        assert work.floor == 2


@pytest.mark.usefixtures("billing")
def test_a_damaged_journal_is_an_error_until_it_is_gone_and_a_replaced_one_ends_a_wait(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n")
    assert gate.leased() == [1]
    gate.kill()
    journal = gate.root / "routes" / "orders" / "cursors" / "billing.work"
    whole = journal.read_bytes()
    journal.write_bytes(b"x" + whole[1:])
    gate.start()
    for _ in range(2):
        answer = gate.work("lease")
        assert (answer.status, answer.json()["code"]) == (500, "damaged")
    journal.write_bytes(whole)
    assert gate.leased() == [1]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(gate.work, "lease", wait=300)
        eventually(lambda: gate.metric("wald_gate_waiting_leases") == 1)
        journal.unlink()
        gate.post(ORDERS, b"2\n")
        answer = asked.result()
    assert (answer.status, answer.json()["code"]) == (503, "replaced")


def test_a_late_answer_that_fails_stays_incomplete() -> None:
    """Its status has been sent, so only the missing end tells the client."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def fail() -> bytes:
        raise Locked("taken over")

    async def answer() -> None:
        await Late(asyncio.create_task(fail()), "application/json")({}, asyncio.Queue[Any]().get, send)

    with pytest.raises(Locked):
        asyncio.run(answer())
    assert [message.get("body") for message in sent] == [None, b"\n"]
    assert sent[-1]["more_body"]


def test_a_name_that_is_misspelt_makes_no_group(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    for verb in ("lease", "ack", "nack", "extend", "release"):
        fields = {"worker": "w1"} | ({} if verb == "lease" else {"sequences": [1]})
        answer = gate.post(f"/v1/routes/orders/groups/biling/{verb}", fields)
        assert (answer.status, answer.json()["code"]) == (404, "not-found"), verb
        assert answer.json()["detail"] == "there is no group 'biling' on route orders"
        assert answer.json()["hint"] == 'PUT {"sequence": "earliest"} to /v1/routes/orders/cursors/biling creates it'
        answer = gate.post(f"/v1/routes/nowhere/groups/billing/{verb}", fields)
        assert (answer.status, answer.json()["code"]) == (404, "not-found"), verb
    assert gate.get(f"{BILLING}/pending").status == 404
    assert not list(gate.root.rglob("bil*"))
    gate.make_group("biling")
    assert gate.post("/v1/routes/orders/groups/biling/lease", {"worker": "w1"}).status == 200


@pytest.mark.usefixtures("billing")
def test_a_retired_route_is_worked_on_to_its_end(gate: Gate, daemon: Daemon) -> None:
    gate.post(ORDERS, b"1\n2\n")
    assert gate.leased(max_records=1) == [1]
    daemon.ask("ROUTE RETIRE orders")
    assert gate.leased() == [2]
    assert gate.worked("ack", sequences=[1, 2]) == {"refused": []}


def test_a_full_disk_is_said_and_the_group_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 100 << 20) as disk, serving(disk / "log") as gate:
        gate.post(ORDERS, b"".join(b"%d\n" % number for number in range(20_000)))
        gate.make_group("billing")
        assert gate.leased(max_records=1) == [1]
        fillers = (disk / f"fill-{number}" for number in count())
        acknowledged: set[int] = set()

        def is_full() -> bool:
            """Return True if the disk is full; preallocated space and space that the daemon frees last a while."""
            fill(next(fillers))
            got = gate.work("lease", max_records=100)
            if got.status == 200:
                sequences = [record["sequence"] for record in got.json()["records"]][::2]
                answer = gate.work("ack", sequences=sequences)
                if answer.status == 200:
                    acknowledged.update(sequences)
                    return False
                got = answer
            assert (got.status, got.json()["code"], "retry-after" in got.headers) == (503, "disk", True), got.body
            return True

        eventually(is_full)
        for each in disk.glob("fill-*"):
            each.unlink()
        eventually(lambda: gate.work("lease", max_records=1).status == 200)
        again = set(gate.leased("w2", max_records=10_000))
        assert again
        assert not again & acknowledged


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A log without a daemon."""
    return Built(tmp_path / "built")


def hosting(
    built: Built, main: Callable[[Groups], Coroutine[Any, Any, None]], *, groups_max: int = 64, idle: float = 600
) -> None:
    """Run ``main`` with the hosted groups of a gate."""

    async def begin() -> None:
        groups = Groups(built.log, NAMED, groups_max=groups_max, idle_seconds=idle)
        try:
            await main(groups)
        finally:
            await groups.close()

    asyncio.run(asyncio.wait_for(begin(), 120))


def is_free(built: Built, group: str) -> bool:
    """Return True if another process can own the group."""
    try:
        with wald.WorkGroup(built.root.path, "a", group):
            return True
    except Locked:
        return False


def test_a_group_that_is_idle_is_closed_once_no_consumer_has_a_record(built: Built) -> None:
    built.lines("a", [b"1", b"2"])

    async def main(groups: Groups) -> None:
        async with groups.use("a", "g") as first:
            assert len(await first.lease("w1", wait=60)) == 2
        async with groups.use("a", "g1"):
            pass
        while groups.count == 2:  # the one closed first has been idle for longer
            await asyncio.sleep(0.01)
        async with groups.use("a", "g") as work:
            assert work is first
            assert await work.ack("w1", [1, 2]) == []
        while groups.count:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(is_free, built, "g")
        async with groups.use("a", "g") as work:
            assert work.floor == 2

    hosting(built, main, idle=0.05)


async def too_many(groups: Groups, route: str, group: str) -> None:
    """Check that the group is refused because all places are taken."""
    with pytest.raises(HttpError) as refused:
        async with groups.use(route, group):
            pass
    assert (refused.value.status, refused.value.code) == (503, "too-many-groups")


def test_a_route_takes_half_of_the_places_and_what_the_settings_name_has_its_own(built: Built) -> None:
    for route in ("a", "b"):
        built.lines(route, [b"1"])
        for group in ("u1", "u2", "u3"):
            built.log.set_cursor(route, 0, group=group)

    async def main(groups: Groups) -> None:
        async with AsyncExitStack() as stack:
            for route in ("a", "b"):
                for group in ("u1", "u2"):
                    await stack.enter_async_context(groups.use(route, group))
                await too_many(groups, route, "u3")
            for name in ("a/g", "a/g1", "b/g"):
                await stack.enter_async_context(groups.use(*name.split("/")))
        async with groups.use("a", "u3"):  # the group that is idle for longest makes room
            assert await asyncio.to_thread(is_free, built, "u2")

    hosting(built, main, groups_max=4)


def test_a_group_that_cannot_be_opened_is_tried_again_by_the_next_request(built: Built) -> None:
    built.lines("a", [b"1"])

    async def main(groups: Groups) -> None:
        async def use() -> None:
            async with groups.use("b", "g"):
                pass

        found = await asyncio.gather(*(use() for _ in range(8)), return_exceptions=True)
        assert [type(each) for each in found] == [NotFound] * 8
        built.lines("b", [b"1"])
        await use()

    hosting(built, main)


FDATASYNC = 75  # the system call number on x86-64


def is_syncing(gate: Gate) -> bool:
    """Return True if a thread of the gate is in fdatasync."""
    threads = Path(f"/proc/{gate.process.pid}/task").iterdir()
    return any(hangs_in(int(thread.name), FDATASYNC) for thread in threads)


@pytest.mark.usefixtures("billing")
def test_no_answer_leaves_before_the_disk_has_what_is_done_and_none_if_the_sync_fails(
    gate: Gate, tmp_path: Path
) -> None:
    gate.post(ORDERS, b"1\n2\n3\n4\n")
    assert gate.leased(max_records=1) == [1]
    with ThreadPoolExecutor(1) as threads:
        with traced(gate.process.pid, tmp_path / "delay", "inject=fdatasync:delay_enter=60000000", threads=True):
            asked = threads.submit(gate.leased, max_records=1, done=[1])
            eventually(lambda: is_syncing(gate))
            assert gate.get("/healthz").status == 200  # the event loop runs and has built the response by now
            assert not asked.done()
        assert asked.result() == [2]
    with traced(gate.process.pid, tmp_path / "fail", "inject=fdatasync:error=EIO", threads=True):
        failed = gate.work("lease", max_records=1, done=[2])
    assert (failed.status, failed.json()["code"]) == (503, "disk")
    again = gate.worked("lease", wait=60)["records"]
    assert [(each["sequence"], each["tries"]) for each in again if each["sequence"] > 2] == [(3, 2), (4, 1)]

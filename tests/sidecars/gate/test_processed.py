"""Responses delayed until a group has processed the stored records: over HTTP and from ``wald append``."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gating import ORDERS, Answer, Gate, received
from running import Daemon, eventually, wald

import wald as library

CURSOR = "/v1/routes/orders/cursors/billing"


def put_cursor(gate: Gate, sequence: int) -> None:
    answer = gate.put(CURSOR, {"sequence": sequence})
    assert answer.status == 200, answer.body


def post(gate: Gate, body: bytes, wait: str = "60s") -> Answer:
    return gate.post(f"{ORDERS}?wait_processed=billing&wait={wait}", body)


def stored_records(gate: Gate) -> int:
    """Return the number of records on the route."""
    return len(gate.get(ORDERS).lines())


def test_the_answer_comes_when_the_cursor_of_a_stream_group_has_passed(gate: Gate) -> None:
    put_cursor(gate, 0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, gate, b"one\ntwo\n")
        eventually(lambda: stored_records(gate) == 2)
        put_cursor(gate, 1)
        assert not waiting.done()
        put_cursor(gate, 2)
        assert (waiting.result().status, waiting.result().json()) == (200, {"first": 1, "last": 2, "count": 2})


@pytest.mark.usefixtures("billing")
def test_the_answer_comes_when_workers_have_acknowledged_above_the_floor(gate: Gate) -> None:
    gate.post(ORDERS, b"stays open\n")
    assert gate.leased(max_records=1) == [1]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, gate, b"two\nthree\n")
        got = gate.leased(wait=60)
        while len(got) < 2:
            got += gate.leased(wait=60)
        gate.work("ack", sequences=[3])
        assert not waiting.done()
        gate.work("ack", sequences=[2])
        assert waiting.result().status == 200
    assert gate.get(CURSOR).json()["sequence"] == 0


def test_the_owner_may_be_another_process(gate: Gate) -> None:
    with library.WorkGroup(gate.root, "orders", "billing") as work, ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, gate, b"one\n")
        [(record, _)] = work.lease("w1", wait=60)
        work.ack("w1", [record.sequence])
        assert waiting.result().status == 200


def test_what_is_not_processed_in_time_is_stored_all_the_same(gate: Gate) -> None:
    put_cursor(gate, 0)
    answer = post(gate, b"one\n", "0.2s")
    problem = answer.json()
    assert (answer.status, problem["code"]) == (504, "not-processed")
    assert problem["stored"] == {"first": 1, "last": 1, "count": 1}
    assert "1 of 1 records" in problem["detail"]
    assert stored_records(gate) == 1
    assert '"status": 504' not in gate.log  # a 504 here is not a failure of the gate


def test_nothing_is_stored_for_a_group_that_has_not_begun_or_a_wrong_query(gate: Gate) -> None:
    answer = post(gate, b"one\n")
    assert (answer.status, answer.json()["code"]) == (404, "not-found")
    assert stored_records(gate) == 0
    assert wald("--root", gate.root, "append", "orders", "--wait-processed", "billing", stdin=b"x\n").returncode == 3
    put_cursor(gate, 0)
    for query in ("wait_processed=", "wait_processed=../x", "wait_processed=billing&wait=-1s"):
        assert gate.post(f"{ORDERS}?{query}", b"one\n").status == 400
    assert stored_records(gate) == 0


def test_the_end_of_the_group_or_of_the_gate_is_an_error_that_says_what_is_stored(gate: Gate) -> None:
    put_cursor(gate, 0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, gate, b"one\n")
        eventually(lambda: stored_records(gate) == 1)
        removed = wald("--root", gate.root, "cursor", "remove", "orders", "--group", "billing")
        assert removed.returncode == 0, removed.stderr
        answer = waiting.result()
        assert (answer.status, answer.json()["stored"]["last"]) == (404, 1)
        put_cursor(gate, 1)
        waiting = threads.submit(post, gate, b"two\n")
        eventually(lambda: stored_records(gate) == 2)
        assert gate.stop() == 0
        assert (waiting.result().status, waiting.result().json()["stored"]["count"]) == (504, 1)


def test_many_producers_wait_without_a_thread_each(gate: Gate) -> None:
    put_cursor(gate, 0)
    before = threads_of(gate)
    asked = f"POST {ORDERS}?wait_processed=billing"
    waiting = [gate.begin(asked, "Connection: close", body=b"one\n") for _ in range(60)]
    eventually(lambda: stored_records(gate) == 60)
    assert threads_of(gate) < before + 30
    put_cursor(gate, 60)
    for connection in waiting:
        with connection:
            assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_append_ends_once_the_group_has_processed_all_of_it(daemon: Daemon) -> None:
    log = library.open(daemon.root)
    log.set_cursor("orders", 0, "billing")
    late = wald(
        "--root", daemon.root, "append", "orders", "--wait-processed", "billing", "--processed-within", "0.2",
        stdin=b"one\ntwo\n",
    )  # fmt: skip
    assert (late.returncode, late.stdout) == (15, b"1 2\n")
    assert b"has not processed 2 of 2 records" in late.stderr
    with library.WorkGroup(daemon.root, "orders", "billing") as work, ThreadPoolExecutor() as threads:
        arguments = ("--root", daemon.root, "append", "orders", "--wait-processed", "billing")
        appended = threads.submit(wald, *arguments, stdin=b"three\n")
        got: list[int] = []
        while len(got) < 3:
            got += [record.sequence for record, _ in work.lease("w1", wait=60)]
        work.ack("w1", [3])
        assert (appended.result().returncode, appended.result().stdout) == (0, b"3 3\n")


def threads_of(gate: Gate) -> int:
    return len(list(Path(f"/proc/{gate.process.pid}/task").iterdir()))

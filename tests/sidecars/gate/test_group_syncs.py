"""A lease that acknowledges records is answered only after the sync, although its response is built in parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate
from running import eventually
from tracing import hangs_in, traced

pytestmark = pytest.mark.usefixtures("billing")

GROUP = "/v1/routes/orders/groups/billing"
RECORDS = "/v1/routes/orders/records"
HELD_BACK = "inject=fdatasync:delay_enter=60000000"
FDATASYNC = 75  # the system call number on x86-64


def post(gate: Gate, verb: str, **fields: Any) -> Answer:
    return gate.post(f"{GROUP}/{verb}", {"worker": "w1", **fields})


def is_syncing(gate: Gate) -> bool:
    """Return True if a thread of the gate is in fdatasync."""
    threads = Path(f"/proc/{gate.process.pid}/task").iterdir()
    return any(hangs_in(int(thread.name), FDATASYNC) for thread in threads)


def leased(answer: Answer) -> list[tuple[int, int]]:
    assert answer.status == 200, answer.body
    return [(record["sequence"], record["tries"]) for record in answer.json()["records"]]


def test_no_answer_leaves_before_the_disk_has_what_is_done(gate: Gate, tmp_path: Path) -> None:
    gate.post(RECORDS, b"1\n2\n3\n")
    assert leased(post(gate, "lease", max_records=1)) == [(1, 1)]
    with ThreadPoolExecutor(1) as threads:
        with traced(gate.process.pid, tmp_path / "trace", HELD_BACK, threads=True):
            asked = threads.submit(post, gate, "lease", max_records=1, done=[1])
            eventually(lambda: is_syncing(gate))
            assert gate.get("/healthz").status == 200  # the event loop runs and has built the response by now
            assert not asked.done()
        assert leased(asked.result()) == [(2, 1)]


def test_after_a_sync_that_fails_no_record_is_answered_and_those_leased_come_again(gate: Gate, tmp_path: Path) -> None:
    gate.post(RECORDS, b"1\n2\n3\n")
    assert leased(post(gate, "lease", max_records=1)) == [(1, 1)]
    with traced(gate.process.pid, tmp_path / "trace", "inject=fdatasync:error=EIO", threads=True):
        failed = post(gate, "lease", max_records=1, done=[1])
    assert (failed.status, failed.json()["code"]) == (503, "disk")
    again = leased(post(gate, "lease", wait=60))
    assert [each for each in again if each[0] > 1] == [(2, 2), (3, 1)]

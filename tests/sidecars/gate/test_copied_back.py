"""A gate whose log is replaced answers 503 until it is restarted, and then serves the new log."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

import pytest
from copied_back import copy, copy_back
from gating import Gate
from group_requests import GROUP, lease
from repeating import ORDERS, send
from running import Daemon, eventually, output_of

OTHER = "the log was replaced by another log"
OLDER = "the log was replaced by an older copy"
NEW = [b"new %d\n" % number for number in range(9)]


def another_log(daemon: Daemon, root: Path) -> None:
    daemon.stop()
    root.rename(root.with_name("old"))
    daemon.start_again()
    output_of("route", "add", "--root", root, "orders")


def older_copy(daemon: Daemon, root: Path) -> None:
    copy_back(daemon, root, root.with_name("copy"))


@pytest.mark.parametrize(("replace", "sentence"), [(another_log, OTHER), (older_copy, OLDER)])
def test_nothing_of_the_log_that_was_there_is_answered(
    gate: Gate, daemon: Daemon, root: Path, replace: Callable[[Daemon, Path], None], sentence: str
) -> None:
    gate.post(ORDERS, b"kept\n")
    gate.make_group("billing")
    copy(daemon, root, root.with_name("copy"))
    send(gate, "k", b"lost 2\nlost 3\n")
    left = 2
    while left:  # a lease may return only the records read ahead so far
        left -= len(lease(gate, max_records=left, wait=30))
    with gate.asked("GET", f"{ORDERS}?from=2&follow=1&format=raw") as following:
        assert following.read(len(b"lost 2\nlost 3\n")) == b"lost 2\nlost 3\n"
        replace(daemon, root)
        output_of("append", "--root", root, "orders", stdin=b"".join(NEW))
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            following.read()

    for answer in (
        gate.post(f"{GROUP}/lease", {"worker": "w1"}),
        gate.post(f"{GROUP}/ack", {"worker": "w1", "sequences": [1, 2]}),
        gate.post(ORDERS, b"x\n"),
        gate.get("/v1/head"),
    ):
        assert (answer.status, answer.json()["code"]) == (503, "replaced"), answer.body
        assert "verify" not in answer.json()["hint"]
    eventually(lambda: gate.get("/v1/routes").status == 503)  # without reads, the gate checks the log twice a second
    eventually(lambda: send(gate, "k", b"lost 2\nlost 3\n").status == 503)
    eventually(lambda: gate.get("/readyz").status == 503)
    assert gate.get("/readyz").json()["detail"] == sentence
    assert gate.get("/healthz").status == 200

    gate.stop()
    gate.start()
    there = output_of("read", "--root", root, "orders")
    assert there.endswith(b"".join(NEW))
    assert b"x\n" not in there.splitlines(keepends=True)
    assert gate.get(f"{ORDERS}?format=raw").body == there
    assert send(gate, "k", b"lost 2\nlost 3\n").json()["first"] == len(there.splitlines()) + 1

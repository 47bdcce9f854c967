"""Delayed records: sent by commands, across kills, and as dead letters."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from draining import drain
from running import Daemon, output_of

from wald.format.records import Record, not_before
from wald.log import Log
from wald.work.group import WorkGroup
from wald.work.owner import Delivery

BRIEF = "2s"  # longer than an owner needs to read the route; otherwise the tests cover less

OWNER = """
import sys
from wald.work.group import WorkGroup

work = WorkGroup(sys.argv[1], "a", "g")
while 3 not in [record.sequence for record, _ in work.lease("x", wait=60)]:
    pass
work.ack("x", [3])
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A log with a daemon, and route a."""
    with Daemon(tmp_path / "log") as daemon:
        output_of("route", "add", "a", "--root", daemon.root)
        yield daemon.root


def append(root: Path, line: bytes, *options: str) -> None:
    output_of("append", "a", *options, "--root", root, stdin=line + b"\n")


def values(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.record.value for delivery in deliveries]


def assert_due(record: Record) -> None:
    assert 0 < not_before(record.headers) <= time.time_ns()


def test_a_killed_owner_has_forgotten_no_time(root: Path) -> None:
    append(root, b"late", "--delay", "1h")
    append(root, b"soon", "--delay", BRIEF)
    append(root, b"now")
    with subprocess.Popen([sys.executable, "-c", OWNER, root], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"done\n"
        owner.kill()
    assert owner.returncode == -signal.SIGKILL

    with WorkGroup(root, "a", "g") as work:
        assert work.floor == 0
        ((soon, _),) = work.lease("x", wait=60)
        assert soon.value == b"soon"
        assert_due(soon)
        work.ack("x", [soon.sequence])
        assert work.lease("x") == []
    assert Log(root).cursor("a", "g").sequence == 0


def test_a_dead_letter_that_is_put_back_is_due_when_it_was(root: Path) -> None:
    """A stream reader ignores the delay, and its dead letter keeps the due time for workers."""
    append(root, b"late", "--delay", "1h")
    assert drain("--root", root, "a", "--tries", 1, "--exit-at-end", "--", "false").returncode == 10
    assert drain("--root", root, "redrive").returncode == 0
    first, again = Log(root).records("a")

    assert again.headers == first.headers
    with WorkGroup(root, "a", "g") as work:
        append(root, b"now")
        assert values(work.lease("x", wait=30)) == [b"now"]


def test_headers_that_are_no_time_stop_no_worker(root: Path) -> None:
    lines = b'{"headers": {"wald.not-before": "%s"}, "value": "1"}' % (b"9" * 400)
    append(root, lines, "--jsonl")
    with WorkGroup(root, "a", "g") as work:
        assert values(work.lease("x", wait=30)) == [b"1"]

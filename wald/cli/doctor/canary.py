"""One record sent through a log: connected, appended, head moved, read back, acknowledged.

The record has a separate route, which is kept: its one cursor follows each record, so the route pins nothing. If a
canary ends between the record and the cursor, the next one moves the cursor past both.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import wald
from wald.cli.connect import runs
from wald.errors import Damaged, NotPermitted, Refused, Unavailable
from wald.format.names import DEFAULT_GROUP
from wald.hints import command_line, user_name

if TYPE_CHECKING:
    from wald.log import Log

ROUTE = "wald.canary"
_EXPLAIN_SECONDS = 1.2  # for the client to find out why the daemon does not answer


@dataclass(frozen=True, slots=True)
class Step:
    """One completed step.

    Attributes:
        name: connected, appended, head, read or acknowledged.
        sequence: the record's; 0 before it has one.
    """

    name: str
    seconds: float
    sequence: int
    message: str


def send(root: Path, socket: Path | None, *, within: float) -> Iterator[Step]:
    """Send one record, and yield each step when it is complete.

    Args:
        within: seconds for all steps.
    """
    log = wald.open(root)
    if not runs(root):
        raise Unavailable(f"{log.root.lock}: no daemon runs", hint=command_line(root, "run"))
    deadline = time.monotonic() + within
    with _time_limit(within, log):
        yield from _steps(log, socket, deadline)


def _steps(log: Log, socket: Path | None, deadline: float) -> Iterator[Step]:
    from wald.client.producer import Producer

    begun = time.monotonic()
    patience = max(0.1, deadline - begun - _EXPLAIN_SECONDS)
    with Producer(socket or log.root.path, retry_for=patience, connect_for=patience) as producer:
        if not log.root.route(ROUTE).is_dir() or log.root.retired(ROUTE).exists():
            producer.command("ROUTE", "ADD", ROUTE)
        else:
            producer.command("PING")
        _require_cursor(log)
        yield Step("connected", time.monotonic() - begun, 0, f"the daemon answers, and route {ROUTE} exists")
        begun, value = time.monotonic(), os.urandom(16).hex().encode()
        producer.send(ROUTE, [value])
        sequence = producer.flush()[-1].last
    yield Step("appended", time.monotonic() - begun, sequence, f"record {sequence} is durable (OK)")
    begun = time.monotonic()
    head = log.head()
    if head is None or head.sequence < sequence:
        shown = "nothing" if head is None else f"record {head.sequence}"
        raise Damaged(
            f"{log.root.head}: the head shows {shown}, but record {sequence} was acknowledged",
            hint=command_line(log.root.path, "verify"),
        )
    yield Step("head", time.monotonic() - begun, sequence, f"the head shows record {head.sequence}")
    begun = time.monotonic()
    found = [record.value for record in log.records(ROUTE, start=sequence, stop=sequence)]
    if found != [value]:
        raise Damaged(
            f"{log.root.path}: record {sequence} was read back with another value",
            hint=command_line(log.root.path, f"where {sequence}"),
        )
    yield Step("read", time.monotonic() - begun, sequence, "read back the same value")
    begun = time.monotonic()
    try:
        log.set_cursor(ROUTE, sequence)
    except Refused:
        if log.cursor(ROUTE).effective < sequence:  # otherwise another canary has acknowledged both
            raise
    yield Step("acknowledged", time.monotonic() - begun, sequence, f"the cursor of {DEFAULT_GROUP} is at the record")


def _require_cursor(log: Log) -> None:
    """Check that this user may set the cursor, without which the record would be pinned."""
    directory = log.root.cursor_directory(ROUTE)
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        owner = user_name(directory.stat().st_uid)
        raise NotPermitted(f"{directory}: this user may not move a cursor here", hint=f"run it as user {owner}")


@contextmanager
def _time_limit(seconds: float, log: Log) -> Iterator[None]:
    """End the block when the time is over, even if it waits for a stopped daemon or for a disk that hangs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Unavailable(
            f"{log.root.path}: the canary was not acknowledged within {seconds:g} s",
            hint=f"{command_line(log.root.path, 'head')}; {command_line(log.root.path, 'explain')}; --timeout 60s",
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

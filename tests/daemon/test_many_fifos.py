"""A thousand FIFOs cost a commit round what one costs, and a check of all of them a thousand checks of one."""

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from effort import steps
from logs import Unsynced

from wald.daemon.committer import Arena, CommitRound
from wald.daemon.intake import Intake
from wald.files.identity import create_root, read_identity
from wald.files.layout import Root
from wald.files.routes import add_route
from wald.format.log_state import LogState
from wald.systemd import Systemd


@contextmanager
def reading(path: Path, fifos: int) -> Iterator[tuple[Root, Intake, select.epoll]]:
    """Yield the pipes of a daemon with ``count`` FIFOs, each read once."""
    root, disk, poller = create_root(path, Unsynced(), now=""), Unsynced(), select.epoll()
    for number in range(fifos):
        add_route(root, disk, f"r{number}", fifo=True)
    intake = Intake(root, disk, poller, Systemd({}), record_max_bytes=1 << 20)
    try:
        intake.open(None, {}, log_id=read_identity(root).log_id)
        one_round(intake)
        yield root, intake, poller
    finally:
        intake.close()
        poller.close()


def one_round(intake: Intake) -> int:
    """Count the calls of one round, and its drafts."""
    collected = CommitRound(LogState(1).producers, Arena())
    intake.check_lines(0.0)
    intake.collect(collected)
    state = intake.can_collect, intake.has_input, intake.busy_routes, intake.has_stdin_ended, intake.due_at()
    assert state[2:4] == (frozenset(), False)
    return len(collected.drafts)


def test_a_round_costs_nothing_for_idle_fifos(tmp_path: Path) -> None:
    costs = []
    for number, fifos in enumerate((2, 2, 50)):  # the first one fills caches
        with reading(tmp_path / str(number), fifos) as (root, intake, poller):
            descriptor = os.open(root.fifo("r1"), os.O_WRONLY)
            os.write(descriptor, b"line\n")
            for ready, events in poller.poll(0):
                intake.mark_ready(ready, events, 0.0)
            assert one_round(intake) == 1  # which is in its FIFO until it is settled
            costs.append(steps(lambda: one_round(intake)))
            os.close(descriptor)

    assert costs[1] == costs[2]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_check_paths_all_of_them_is_linear(tmp_path: Path, replaced: bool) -> None:
    costs = []
    for fifos in (10, 100):
        with reading(tmp_path / str(fifos), fifos) as (root, intake, _):
            if replaced:
                root.fifo("r1").unlink()
            costs.append(steps(lambda: intake.check_paths(1e9)))
            assert intake.fifos.replaced_count == replaced

    assert costs[1] < 10 * costs[0]


def test_a_replaced_pipe_that_cannot_be_reopened_yet_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free descriptor, for example; the next check reopens it."""
    with reading(tmp_path, 1) as (root, intake, poller):
        old = os.open(root.fifo("r0"), os.O_WRONLY)
        root.fifo("r0").unlink()
        opening = os.open

        def refuse(path: object, *options: Any, **others: Any) -> int:
            if str(path).startswith("/proc/self/fd/"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opening(path, *options, **others)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse)
            before = os.listdir("/proc/self/fd")
            assert intake.check_paths(1e9)
            assert os.listdir("/proc/self/fd") == before
        intake.check_paths(2e9)
        assert intake.fifos.unreadable == {}
        os.write(old, b"line\n")
        for ready, events in poller.poll(0):
            intake.mark_ready(ready, events, 0.0)
        assert one_round(intake) == 1
        os.close(old)

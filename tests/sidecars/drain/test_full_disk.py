"""A full disk while commands run: wald-drain continues once space is available, and processes nothing twice."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from draining import await_line, cursor, drain
from full_disk import fill, small_file_system
from jobs import Jobs
from logs import Built
from running import TIMEOUT_SECONDS

Start = Callable[..., subprocess.Popen[bytes]]
VALUES = [str(number) for number in range(1, 251)]  # enough for the journal to outgrow its preallocation
ONCE = dict.fromkeys(VALUES, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", 16 << 20) as at:
        yield at


@pytest.fixture
def built(disk: Path) -> Built:
    """Records 1 to 250 on route a, each with its sequence as value."""
    log = Built(disk / "log")
    log.lines("a", [value.encode() for value in VALUES])
    return log


@pytest.fixture(params=[("--workers", 2), ("--batch-records", 1)], ids=["workers", "one"])
def options(request: pytest.FixtureRequest) -> tuple[object, ...]:
    found: tuple[object, ...] = request.param
    return found


def test_it_goes_on_once_there_is_room(
    built: Built, disk: Path, jobs: Jobs, start: Start, options: tuple[object, ...]
) -> None:
    jobs.hold(1, 2)  # all workers, so that some records remain when the disk is full
    process = start(*jobs.arguments(built.root.path, *options, "--exit-at-end"))
    jobs.await_running(1)
    fill(disk / "filling")
    jobs.let_go(1, 2)
    await_line(process, "No space left on device")
    (disk / "filling").unlink()

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 250


def test_a_signal_ends_the_waiting_for_room(
    built: Built, disk: Path, jobs: Jobs, start: Start, options: tuple[object, ...]
) -> None:
    """Records processed before the signal are not processed again by the next start."""
    jobs.hold(1, 2)  # all workers, so that some records remain when the disk is full
    process = start(*jobs.arguments(built.root.path, *options, "--exit-at-end"))
    jobs.await_running(1)
    fill(disk / "filling")
    jobs.let_go(1, 2)
    await_line(process, "No space left on device")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) in (0, 7)  # 7: it was writing to the disk at that moment
    (disk / "filling").unlink()
    assert drain(*jobs.arguments(built.root.path, *options, "--exit-at-end")).returncode == 0

    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 250

"""The canary: it sends a record through the log and reports each step, pins nothing, and fails before its timeout."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import small_file_system
from mounting import MIB
from running import Daemon, command, output_of, reclaim, refused, run, wald
from users import MEMBER, OWNER, daemon_of, needs_root

from wald.cli.doctor.command import send
from wald.log import Log

STEPS = ["connected", "appended", "head", "read", "acknowledged"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "log") as running:
        yield running


def canary(root: Path, *arguments: object) -> tuple[int, str, str]:
    """Run a canary that fails; return its exit code, message and hint."""
    return refused(wald("doctor", "--canary", "--root", root, *arguments))


def test_it_reports_its_way_and_its_record_is_durable_and_holds_nothing_back(daemon: Daemon) -> None:
    for _ in range(3):
        lines = output_of("doctor", "--canary", "--root", daemon.root).decode().splitlines()
        assert [line.split()[2] for line in lines[:-1]] == STEPS
        assert all(line.split()[1] == "ms" and float(line.split()[0]) > 0 for line in lines)
    log = Log(daemon.root)

    assert [record.sequence for record in log.records("wald.canary")] == [1, 2, 3]
    assert log.cursor("wald.canary").sequence == 3
    output_of("cut", "--root", daemon.root)
    output_of("doctor", "--canary", "--root", daemon.root)
    output_of("cut", "--root", daemon.root)
    reclaim(daemon.root, "--grace", 0)
    assert len(log.view().listing.segments) <= 2  # the newest sealed segment and the active one remain


def test_two_may_be_on_their_way_at_once(daemon: Daemon) -> None:
    first = send(daemon.root, None, within=10)
    assert [next(first).name for _ in STEPS[:-1]] == STEPS[:-1]
    output_of("doctor", "--canary", "--root", daemon.root)

    assert next(first).name == "acknowledged"
    assert list(first) == []
    assert Log(daemon.root).cursor("wald.canary").sequence == 2


def test_a_record_that_an_earlier_one_left_is_acknowledged_too_and_a_retired_route_comes_back(daemon: Daemon) -> None:
    output_of("route", "add", "wald.canary", "--root", daemon.root)
    output_of("append", "wald.canary", "--root", daemon.root, stdin=b"it was killed\n")
    output_of("route", "retire", "wald.canary", "--root", daemon.root)

    output_of("doctor", "--canary", "--root", daemon.root)
    assert Log(daemon.root).cursor("wald.canary").sequence == 2
    assert not daemon.root.joinpath("routes/wald.canary/retired").exists()


def test_without_a_log_or_a_daemon_it_says_so_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert canary(tmp_path / "log")[0] == 3
    output_of("init", "--root", tmp_path / "log")
    code, message, hint = canary(tmp_path / "log")

    assert (code, "no daemon runs" in message) == (6, True)
    assert hint == f"wald --root {tmp_path}/log run"
    assert time.monotonic() - begun < 60
    assert not (tmp_path / "log/routes/wald.canary").exists()


def test_a_daemon_that_hangs_is_reported_in_time(daemon: Daemon) -> None:
    output_of("doctor", "--canary", "--root", daemon.root)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        done = wald("doctor", "--canary", "--json", "--root", daemon.root, "--timeout", "2s")
        took = time.monotonic() - begun
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    printed = json.loads(done.stdout)

    assert done.returncode == 6
    assert (printed["outcome"], printed["exit_code"], printed["steps"]) == ("fail", 6, [])
    assert "does not answer" in printed["message"]
    assert took < 2 + 30  # allowance for a loaded machine; without a timeout it would hang


def test_a_full_disk_is_reported_in_time(tmp_path: Path) -> None:
    """The daemon does not answer until there is free space, however long that takes."""
    settings = {"WALD_SEGMENT_MAX_BYTES": str(MIB), "WALD_FREE_SPACE_MIN": str(MIB)}
    with small_file_system(tmp_path / "disk", 16 * MIB) as at, Daemon(at / "log", env=settings) as daemon:
        output_of("doctor", "--canary", "--root", daemon.root)
        with (at / "filling").open("wb") as file:
            file.write(bytes(os.statvfs(at).f_bavail * os.statvfs(at).f_frsize - MIB))
        code, message, _ = canary(daemon.root, "--timeout", "3s")

    assert (code, "the disk is full" in message) == (7, True)


@needs_root
def test_a_user_who_cannot_acknowledge_sends_nothing(tmp_path: Path) -> None:
    with daemon_of(OWNER) as daemon:
        line = command("doctor", "--canary", "--root", daemon.root)
        assert run([*OWNER.prefix, *line]).returncode == 0
        code, message, hint = refused(run([*MEMBER.prefix, *line]))
        head = Log(daemon.root).head()

    assert (code, hint) == (11, f"run it as user {OWNER.user_id}")
    assert message.startswith(f"{daemon.root}/routes/wald.canary/cursors: ")
    assert head is not None
    assert head.sequence == 1

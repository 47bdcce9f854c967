"""Sidecars serve metrics over HTTP while they run."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from endpoint import free_address, get, samples_of
from running import TIMEOUT_SECONDS, Daemon, eventually, launched, output_of, run, sidecar

from wald.errors import GivenUp


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A running daemon with routes a and dead_letter."""
    with Daemon(tmp_path / "log") as running:
        for route in ("a", "dead_letter"):
            output_of("route", "add", route, "--root", running.root)
        yield running


@contextmanager
def serving(*arguments: object, code: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, then stop it; it must exit with ``code``."""
    with launched(sidecar(*map(str, arguments)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
            process.terminate()
            assert process.wait(TIMEOUT_SECONDS) == code
        finally:
            process.kill()


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and label values, the route first.

    Return nothing before the program listens.
    """
    try:
        status, text = get(address, "/metrics")
    except OSError:
        return {}
    assert status == 200
    return samples_of(text)


def test_reclaim_counts_by_rule_and_by_what_keeps_a_segment(daemon: Daemon) -> None:
    root, address = daemon.root, free_address()
    for _ in range(2):
        output_of("append", "a", "--root", root, stdin=b"x\n")
        output_of("cut", "--root", root)
    eventually(lambda: len(list(root.glob("segments/*.zst"))) == 2)
    with serving("reclaim", "--root", root, "--watch", "--grace", "0s", "--metrics", address):
        eventually(lambda: samples(address).get(("wald_reclaim_kept_segments", "unread")) == 2)
        before = samples(address)
        output_of("cursor", "set", "a", "1", "--root", root)
        eventually(lambda: samples(address).get(("wald_reclaim_deleted_segments_total",)) == 1)
        after = samples(address)

    assert before["wald_reclaim_released_segments_total", "read"] == 0
    assert before["wald_reclaim_last_pass_timestamp_seconds",] > 0
    assert after["wald_reclaim_released_segments_total", "read"] == 1
    gone_bytes = after["wald_reclaim_released_bytes_total", "read"]
    assert gone_bytes == after["wald_reclaim_deleted_bytes_total",] > 0
    assert after["wald_reclaim_failed_passes_total",] == after["wald_reclaim_lost_records_total",] == 0


def test_drain_counts_runs_records_and_dead_letters(daemon: Daemon) -> None:
    """A record that the command cannot process counts as a failure, then as a dead letter."""
    root, address = daemon.root, free_address()
    output_of("append", "a", "--root", root, stdin=b"good\nbad\n")
    command = ("sh", "-c", "! grep -q bad")
    options = ("--root", root, "--tries", "1", "--batch-records", "1", "--metrics", address)
    with serving("drain", "feed", *options, "a", "--", *command, code=GivenUp.exit_code):
        eventually(lambda: samples(address).get(("wald_drain_dead_letters_total", "a", "processed")) == 1)
        found = samples(address)

    of_group = ("a", "processed")
    assert found["wald_drain_records_total", *of_group] == 1
    assert found["wald_drain_runs_total", *of_group, "success"] == 1
    assert found["wald_drain_runs_total", *of_group, "failure"] == 1
    assert found["wald_drain_run_seconds_count", *of_group] == 2
    assert found["wald_drain_failing_seconds", *of_group] == 0
    assert found["wald_drain_last_success_timestamp_seconds", *of_group] > 0


def test_drain_shows_how_long_its_command_fails(daemon: Daemon, tmp_path: Path) -> None:
    """The time counts from the first failure until the command processes these records."""
    root, address, mended = daemon.root, free_address(), tmp_path / "mended"
    output_of("append", "a", "--root", root, stdin=b"x\n")
    with serving("drain", "feed", "--root", root, "--metrics", address, "a", "--", "test", "-e", mended):
        failing = ("wald_drain_failing_seconds", "a", "processed")
        eventually(lambda: samples(address).get(failing, 0) > 0.3)
        mended.touch()
        eventually(lambda: samples(address)[failing] == 0)


@pytest.mark.parametrize("address", ["9465", "127.0.0.1:", "127.0.0.1:99999", "256.0.0.1:9465"])
def test_a_bad_address_is_refused_before_anything_is_done(daemon: Daemon, address: str) -> None:
    done = run(sidecar("reclaim", "--root", daemon.root, "--watch", "--metrics", address))

    assert done.returncode == 2
    assert f"--metrics {address!r}: " in done.stderr.decode()
    assert "hint: use a free" in done.stderr.decode()
    assert not (daemon.root / "ledger/reclaim.jsonl").exists()


def test_a_port_that_is_taken_is_refused(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(sidecar("drain", "feed", "--root", daemon.root, "--metrics", address, "a", "--", "true"))

    assert (done.returncode, os.strerror(98) in done.stderr.decode()) == (2, True)


def test_a_single_pass_serves_nothing(daemon: Daemon) -> None:
    done = run(sidecar("reclaim", "--root", daemon.root, "--metrics", "127.0.0.1:0"))

    assert (done.returncode, b"--metrics needs --watch" in done.stderr) == (2, True)

"""Elapsed time, independent of the clock: exact within a boot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wald.files import uptime
from wald.files.uptime import Elapsed, Moment, parse_moment


def test_what_has_certainly_passed() -> None:
    """Another boot may be one of another machine, on which the root never was."""
    for moments, elapsed in [
        ([], 0),
        ([("a", 5)], 0),
        ([("a", 5), ("a", 12)], 7),
        ([("a", 5), ("a", 12), ("b", 1000)], 7),
        ([("a", 5), ("a", 12), ("b", 1000), ("b", 1003)], 10),
        ([("a", 5), ("b", 1000), ("a", 6), ("b", 1001), ("a", 7)], 0),
        ([("a", 10), ("a", 9), ("a", 11)], 1),
        ([("", 10), ("", 90)], 0),
    ]:
        clock = Elapsed()
        for boot, boottime_ns in moments[:-1]:
            clock.advance(Moment(boot, boottime_ns))
        for boot, boottime_ns in moments[-1:]:
            assert clock.until(Moment(boot, boottime_ns)) == elapsed
            assert clock.advance(Moment(boot, boottime_ns)) == elapsed


def test_now_runs_forward_and_comes_back_out_of_a_line() -> None:
    first, second = uptime.now(), uptime.now()

    assert first.boot
    assert first.boot == second.boot
    assert 0 < first.boottime_ns <= second.boottime_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert parse_moment(first.as_entry() | {"event": "sealed"}) == first
    assert parse_moment({"event": "sealed", "boot": 7, "boottime": "x"}) is None


@pytest.mark.parametrize("ahead_seconds", [300_000, -30])
def test_a_time_namespace_does_not_change_the_moment(ahead_seconds: int) -> None:
    """A container or a restored checkpoint has another CLOCK_BOOTTIME and the same id of the boot."""
    if ahead_seconds < 0 and time.clock_gettime(time.CLOCK_BOOTTIME) < -ahead_seconds:
        pytest.skip("the machine is up for less than the offset, which the kernel refuses")
    before = uptime.now()
    inside = _moment_in_namespace(ahead_seconds)
    after = uptime.now()

    assert inside.boot == before.boot
    assert before.boottime_ns <= inside.boottime_ns <= after.boottime_ns


def test_offsets_that_cannot_be_read_make_the_moment_unknown_unless_there_are_no_time_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, file = uptime.now().boot, tmp_path / "timens_offsets"
    monkeypatch.setattr(uptime, "_OFFSETS", file)
    for offsets in ("", "boottime 1", "boottime x 0\n", "monotonic 0 0\n"):
        file.write_text(offsets)
        assert uptime.now().boot == ""
    file.unlink()
    monkeypatch.setattr(uptime, "_NAMESPACES", (str(tmp_path / "time"), str(tmp_path / "time_for_children")))
    assert uptime.now().boot == expected


def _moment_in_namespace(ahead_seconds: int) -> Moment:
    """Return the moment that a process in a new time namespace reads."""
    code = "import json; from wald.files import uptime; print(json.dumps(uptime.now().as_entry()))"
    apart = ["unshare", "--user", "--map-root-user", "--time", "--boottime", str(ahead_seconds)]
    apart += ["--monotonic", str(ahead_seconds), "--fork"]
    done = subprocess.run([*apart, sys.executable, "-c", code], capture_output=True, check=False)
    if b"unshare" in done.stderr:
        pytest.skip(done.stderr.decode().strip())
    moment = parse_moment(json.loads(done.stdout))
    assert moment is not None, done.stderr
    return moment

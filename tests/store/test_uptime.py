"""Time that nobody can set: exact within a boot, and never too much across boots."""

from __future__ import annotations

import time

import pytest

from wald.store.files import uptime
from wald.store.files.uptime import Elapsed, Moment, moment_of


@pytest.mark.parametrize(
    ("moments", "elapsed"),
    [
        ([], 0),
        ([("a", 5)], 0),
        ([("a", 5), ("a", 12)], 7),
        ([("a", 5), ("a", 12), ("b", 1000)], 7),
        ([("a", 5), ("a", 12), ("b", 1000), ("b", 1003)], 10),
        ([("a", 5), ("b", 1000), ("a", 6), ("b", 1001), ("a", 7)], 0),
        ([("a", 10), ("a", 9), ("a", 11)], 1),
        ([("", 10), ("", 90)], 0),
    ],
)
def test_what_has_certainly_passed(moments: list[tuple[str, int]], elapsed: int) -> None:
    """Another boot may be one of another machine, on which the root never was."""
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
    assert moment_of(first.as_entry() | {"event": "sealed"}) == first
    assert moment_of({"event": "sealed", "boot": 7, "boottime": "x"}) is None

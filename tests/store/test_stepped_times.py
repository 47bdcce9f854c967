"""Append times that are ahead of the clock: it was set far into the future for a while, and is right again."""

from __future__ import annotations

import json
import time
from pathlib import Path

from logs import SECOND_NS, Built
from running import Daemon, eventually, wald

from wald.store.retention.backlog import Backlog
from wald.store.retention.progress import lags

HOUR_NS = 3600 * SECOND_NS
AHEAD_NS = 80 * 365 * 24 * HOUR_NS


def frozen(root: Path, *, now_ns: int) -> Built:
    """A log whose first life has an append time in the future; the next one began an hour ago, and has record 2."""
    built = Built(root, now_ns=now_ns + AHEAD_NS)
    built.lines("a", [b"of the future"])
    built.crash()
    built = Built(root, epoch=2, now_ns=now_ns - HOUR_NS)
    built.log.set_cursor("a", 1)
    built.lines("a", [b"now"])
    return built


def test_a_lag_is_measured_by_the_stamps_of_files_where_append_times_are_in_the_future(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    built = frozen(tmp_path / "root", now_ns=now_ns)
    view, cursor = built.view, built.log.cursor("a")
    backlog = Backlog(view)
    list(backlog.segments())
    for lag in (lags(view, [cursor])["a", "processed"], backlog.groups["a", "processed"].lag):
        assert lag.records == 1
        assert lag.oldest_ns is not None
        assert lag.oldest_ns > now_ns
        assert lag.seconds(now_ns) == 3600


def test_status_doctor_and_the_start_report_append_times_in_the_future(tmp_path: Path) -> None:
    root = tmp_path / "root"
    frozen(root, now_ns=time.time_ns()).crash()
    with Daemon(root) as daemon:
        eventually(lambda: "append times are ahead of the clock" in daemon.log)
        done = wald("status", "--root", root, "--json")
        found = json.loads(done.stdout)
        assert done.returncode == 14
        assert [each["message"].partition(" are ")[0] for each in found["findings"]] == ["append times"]
        assert "its append time is in the future" in wald("status", "--root", root).stdout.decode()
    checks = json.loads(wald("doctor", "--root", root, "--json").stdout)
    assert "behind the append times of the log" in json.dumps(checks)


def test_a_correction_of_the_clock_is_no_reason_to_warn(tmp_path: Path) -> None:
    built = Built(tmp_path / "root", now_ns=time.time_ns() + 5 * SECOND_NS)
    built.lines("a", [b"1"])
    assert "append times" not in wald("status", "--root", tmp_path / "root").stdout.decode()
    lag = lags(built.view, [built.log.cursor("a")])["a", "processed"]
    assert lag.seconds(time.time_ns()) == 0

"""Append times that are ahead of the clock, which was far in the future for a while, and clock steps, the way back."""

from __future__ import annotations

import itertools
import json
import random
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from contents import assert_sound, errors
from logs import SECOND_NS, START_NS, Built
from running import Daemon, eventually, output_of, wald

from wald.store.files.clock import ClockStep, add_step
from wald.store.reading.selection import Start, Stop
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


def step(built: Built, now_ns: int) -> None:
    """A clock step, as the daemon records it."""
    add_step(built.root, built.disk, ClockStep(built.last + 1, built.writer.state.append_time_ns, now_ns))
    built.now_ns = now_ns
    built.writer.step_clock(now_ns=now_ns)
    built.publish()


def stepped(root: Path, seed: int) -> tuple[Built, list[int]]:
    """A log with some clock steps among cuts and restarts, and the append time of each record in seconds."""
    chosen, built = random.Random(seed), Built(root)
    for number in range(1, 25):
        built.now_ns = START_NS + chosen.randrange(60) * SECOND_NS
        match chosen.randrange(8):
            case 0:
                step(built, built.now_ns)
            case 1 if built.writer.advanced:
                built.cut()
                built.seal(keep=chosen.randrange(2))
        built.lines("a", [b"%d" % number])
    times = [(record.append_time_ns - START_NS) // SECOND_NS for record in built.log.records("a")]
    assert len(times) == 24
    return built, times


@pytest.mark.parametrize("seed", range(6))
def test_look_ups_by_time_find_the_records_of_all_ranges(tmp_path: Path, seed: int) -> None:
    built, times = stepped(tmp_path / "root", seed)
    log = built.log
    assert_sound(tmp_path / "root")

    def moment(second: int) -> datetime:
        return datetime.fromtimestamp(START_NS / 1e9 + second, UTC)

    bounds = sorted({*times, *(each + 1 for each in times), -1})
    for since, until in itertools.combinations(bounds[:: max(1, len(bounds) // 9)], 2):
        wanted = [number for number, each in enumerate(times, start=1) if since <= each < until]
        selected: tuple[tuple[Start, Stop | None, list[int]], ...] = (
            (moment(since), moment(until), wanted),
            (moment(since), None, [number for number, each in enumerate(times, start=1) if since <= each]),
            ("earliest", moment(until), [number for number, each in enumerate(times, start=1) if each < until]),
        )
        for start, stop, expected in selected:
            assert [record.sequence for record in log.records("a", start, stop)] == expected


def test_a_step_brings_append_times_back_to_the_clock(tmp_path: Path) -> None:
    """Over a start as well; and the steps are what makes times that go back sound."""
    built = Built(tmp_path / "root", now_ns=START_NS + AHEAD_NS)
    built.lines("a", [b"of the future"])
    built.now_ns = START_NS
    built.lines("a", [b"frozen"])
    step(built, START_NS)
    step(built, START_NS - HOUR_NS)  # of nothing that was written since
    built.lines("a", [b"now"])
    built.crash()
    built = Built(tmp_path / "root", epoch=2, now_ns=START_NS)
    built.lines("a", [b"after a start"])
    years = [datetime.fromtimestamp(each.append_time_ns / 1e9, UTC).year for each in built.log.records("a")]
    assert years == [2103, 2103, 2023, 2023]
    assert_sound(tmp_path / "root")

    built.root.clock_steps.unlink()
    found = errors(tmp_path / "root")
    assert found
    assert all("before that of the batch before it" in each for each in found)
    built.root.clock_steps.write_bytes(b"nonsense\n")
    assert any("is not a clock step" in each for each in errors(tmp_path / "root"))


def test_the_way_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    frozen(root, now_ns=time.time_ns()).crash()
    with Daemon(root):
        output_of("append", "--root", root, "a", stdin=b"frozen\n")
        until = ("a", "--until", "now")
        for words in (("read", *until), ("grep", "x", *until), ("where", "--since", "1h")):
            assert b"newer records look later than they are" in wald(*words, "--root", root).stderr
        assert b"append times begin again with record 4" in output_of("clock", "step", "--root", root)
        output_of("append", "--root", root, "a", stdin=b"right\n")
        assert json.loads(output_of("clock", "step", "--root", root, "--json"))["stepped"] is False
        assert output_of("read", "--root", root, "a", "--since", "1h") == b"of the future\nnow\nfrozen\nright\n"
        recent = ("--since", "1h", "--until", "now")
        eventually(lambda: output_of("read", "--root", root, "a", *recent) == b"right\n")
        assert output_of("read", "--root", root, "a", *recent, "-n", 5) == b"right\n"
        assert output_of("read", "--root", root, "a", "--until", "now") == b"right\n"
        assert wald("status", "--root", root).returncode == 0
        output_of("verify", "--root", root)
    with Daemon(root):
        output_of("append", "--root", root, "a", stdin=b"later\n")
        eventually(lambda: output_of("read", "--root", root, "a", *recent) == b"right\nlater\n")

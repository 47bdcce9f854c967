"""Clocks that are set, clock steps that are recorded, and elapsed time, which is independent of the clock."""

import itertools
import json
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from contents import assert_sound, errors, records
from damage import flipped
from json_page import require_documented
from logs import SECOND_NS, START_NS, Built
from repairing import repair
from running import Daemon, eventually, output_of, wald
from writing import batches

from wald import open as open_log
from wald.errors import Damaged
from wald.files import uptime
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.files.uptime import ClockStep, Elapsed, Moment, add_step, parse_moment, read_steps
from wald.format.log_state import decode_state
from wald.format.names import Kind
from wald.format.times import utc
from wald.reading.selection import Start, Stop
from wald.retention.backlog import Backlog
from wald.retention.progress import measure_lags
from wald.segments.raw_scan import FIRST_BATCH, RawFile

WRONG_TIMES = b"because the clock was ahead"
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
    for lag in (measure_lags(view, [cursor])["a", "processed"], backlog.groups["a", "processed"].lag):
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
    assert "behind the last append time" in json.dumps(checks)


def step(built: Built, now_ns: int) -> None:
    """A clock step, as the daemon records it."""
    add_step(built.root, built.disk, ClockStep(built.last + 1, built.writer.state.append_time_ns, now_ns))
    built.now_ns = now_ns
    built.writer.step_clock(now_ns=now_ns)
    built.publish()


def stepped(root: Path, seed: int, *, reclaim: bool = False) -> tuple[Built, dict[int, int]]:
    """Return a log with clock steps among cuts and long lines of b, and the append times of a's records in seconds."""
    chosen, built = random.Random(seed), Built(root)
    for number in range(1, 25):
        built.now_ns = START_NS + chosen.randrange(60) * SECOND_NS
        if chosen.randrange(2):  # its last batch begins no record
            built.piece("b", b"begins ", begins=True, ends=False)
            built.piece("b", b"ends\n", begins=False, ends=True)
        match chosen.randrange(8):
            case 0:
                step(built, built.now_ns)
            case 1 if built.writer.has_advanced:
                built.cut()
                built.seal(keep=chosen.randrange(2))
        built.lines("a", [b"%d" % number])
    if reclaim:
        built.cut(seal=True)
        for segment in list_segments(built.root).segments[:-1]:
            if chosen.randrange(2):
                built.reclaim(segment.base_sequence, named=True)
    return built, {r.sequence: (r.append_time_ns - START_NS) // SECOND_NS for r in built.log.records("a")}


@pytest.mark.parametrize("seed", range(2))
def test_look_ups_by_time_find_the_records_of_all_ranges(tmp_path: Path, seed: int) -> None:
    reclaim = seed % 2 == 1
    built, times = stepped(tmp_path / "root", seed, reclaim=reclaim)
    log = built.log
    assert errors(tmp_path / "root") == []
    assert reclaim == (len(times) < 24)

    def moment(second: int) -> datetime:
        return datetime.fromtimestamp(START_NS / 1e9 + second, UTC)

    bounds = sorted({*times.values(), *(each + 1 for each in times.values()), -1})
    for since, until in itertools.combinations(bounds[:: max(1, len(bounds) // 9)], 2):
        wanted = [number for number, each in times.items() if since <= each < until]
        selected: tuple[tuple[Start, Stop | None, list[int]], ...] = (
            (moment(since), moment(until), wanted),
            (moment(since), None, [number for number, each in times.items() if since <= each]),
            ("earliest", moment(until), [number for number, each in times.items() if each < until]),
        )
        for start, stop, expected in selected:
            found = log.records("a", start, stop, on_missing="skip" if reclaim else None)
            assert [record.sequence for record in found] == expected


def reclaimable(root: Path) -> Built:
    """A log with a record of the future, and two segments behind a step; all but the active one are sealed."""
    built = Built(root, now_ns=START_NS + AHEAD_NS)
    built.lines("a", [b"of the future"])
    step(built, START_NS)
    built.lines("a", [b"now"], cut=True)
    built.lines("a", [b"later"])
    built.seal()
    return built


def test_a_reclaim_at_or_in_front_of_a_step_leaves_the_log_sound_and_later_times_miss_nothing(tmp_path: Path) -> None:
    built = reclaimable(tmp_path / "at")
    built.reclaim(2, named=True)
    assert errors(tmp_path / "at") == []
    assert repair(tmp_path / "at", accept_loss=False).actions == ()
    built = reclaimable(tmp_path / "before")
    built.reclaim(1, named=True)
    since = datetime.fromtimestamp(START_NS / 1e9 - 1, UTC)
    assert [record.value for record in built.log.records("a", since)] == [b"now", b"later"]


@pytest.mark.parametrize(
    ("damage", "fate"), [("control batch", "cut"), ("everything", "quarantine"), ("set aside", "")]
)
def test_a_start_keeps_the_clock_behind_a_step_whose_segment_is_damaged(tmp_path: Path, damage: str, fate: str) -> None:
    root = tmp_path / "root"
    built = Built(root, now_ns=START_NS + AHEAD_NS)
    built.lines("a", [b"of the future"])
    step(built, START_NS)
    built.lines("a", [b"now"])
    built.seal()
    built.crash()
    path = built.path(2, Kind.RAW)
    data = bytearray(path.read_bytes())
    behind = FIRST_BATCH + 100 if damage == "control batch" else len(data)
    data[FIRST_BATCH:behind] = bytes(byte ^ 0xFF for byte in data[FIRST_BATCH:behind])
    path.write_bytes(data)
    if damage == "set aside":
        repair(root)
    again = Built(root, epoch=2, now_ns=START_NS + HOUR_NS)
    assert again.report.fate == fate
    again.lines("a", [b"after a start"])
    assert [r.append_time_ns for r in again.log.records("a", 3)] == [START_NS + HOUR_NS + SECOND_NS]
    assert not any("earlier than that of the previous batch" in each for each in errors(root))


def test_a_step_brings_append_times_back_to_the_clock(tmp_path: Path) -> None:
    """Even across a start; the recorded steps explain append times that decrease."""
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
    assert all("earlier than that of the previous batch" in each for each in found)
    built.root.clock_steps.write_bytes(b"nonsense\n")
    assert any("is not a clock step" in each for each in errors(tmp_path / "root"))


def test_a_start_completes_a_step_that_was_interrupted(tmp_path: Path) -> None:
    built = Built(tmp_path / "root", now_ns=START_NS + AHEAD_NS)
    built.lines("a", [b"of the future"])
    add_step(built.root, built.disk, ClockStep(2, built.writer.state.append_time_ns, START_NS))
    built.crash()
    built = Built(tmp_path / "root", epoch=2, now_ns=START_NS)
    built.lines("a", [b"now"])
    assert [record.append_time_ns for record in built.log.records("a", 2)] == [START_NS + SECOND_NS]
    assert_sound(tmp_path / "root")


@pytest.mark.parametrize("again", ["start", "replace"])
def test_no_step_replaces_a_segment_that_has_only_pieces(tmp_path: Path, again: str) -> None:
    built = Built(tmp_path / "root", now_ns=START_NS + AHEAD_NS)
    built.piece("a", b"one ", begins=True, ends=False)
    built.cut()
    may_step = []
    for epoch, piece in enumerate((b"two ", b"three ", b"end\n"), start=2):
        built.piece("a", piece, begins=False, ends=piece == b"end\n")
        may_step.append(built.writer.may_step_clock)
        if again == "start":
            built.crash()
            built = Built(tmp_path / "root", epoch=epoch, now_ns=START_NS)
        else:
            built.writer.replace(now_ns=START_NS)
            built.publish()
        may_step.append(built.writer.may_step_clock)
    assert may_step == [False] * 6

    built.lines("a", [b"whole"])
    step(built, START_NS)
    assert built.last == 2
    assert [record.value for record in built.log.records("a")] == [b"one two three end", b"whole"]
    assert_sound(tmp_path / "root")


def test_the_way_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    frozen(root, now_ns=time.time_ns()).crash()
    with Daemon(root):
        output_of("append", "--root", root, "a", stdin=b"frozen\n")
        until = ("a", "--until", "now")
        for words in (("read", *until), ("read", "--grep", "x", *until), ("where", "--since", "1h")):
            assert b"newer records look later than they are" in wald(*words, "--root", root).stderr
        assert b"append times follow the clock again, from record 4" in output_of("clock", "step", "--root", root)
        output_of("append", "--root", root, "a", stdin=b"right\n")
        assert json.loads(output_of("clock", "step", "--root", root, "--json"))["stepped"] is False
        assert read_with_warning(root, "--since", "1h") == b"of the future\nnow\nfrozen\nright\n"
        recent = ("--since", "1h", "--until", "now")
        eventually(lambda: read_with_warning(root, *recent) == b"right\n")
        assert read_with_warning(root, *recent, "-n", 5) == b"right\n"
        assert read_with_warning(root, "--until", "now") == b"right\n"
        for words in (("read", "a", "--grep", "x", "--until", "now"), ("where", "--since", "1h")):
            assert WRONG_TIMES in wald(*words, "--root", root).stderr
        assert output_of("read", "--root", root, "a", "--until", "2h ago") == b""
        assert output_of("read", "--root", root, "a", "--from", 4) == b"right\n"
        assert_reported(root)
        output_of("verify", "--root", root)
    with Daemon(root):
        output_of("append", "--root", root, "a", stdin=b"later\n")
        eventually(lambda: read_with_warning(root, *recent) == b"right\nlater\n")


def read_with_warning(root: Path, *options: object) -> bytes:
    """The records of a range of times that records before the step may have."""
    done = wald("read", "--root", root, "a", *options)
    assert (done.returncode, WRONG_TIMES in done.stderr) == (0, True)
    return done.stdout


def assert_reported(root: Path) -> None:
    """Status and history show the step before record 4."""
    (step,) = read_steps(Root(root))
    before, at = utc(step.before_ns), utc(step.at_ns)
    done = wald("status", "--root", root)
    assert done.returncode == 0
    assert f"1; the latest before record 4: append times were at {before}, the clock at {at}" in done.stdout.decode()
    status = json.loads(output_of("status", "--root", root, "--json"))
    require_documented("wald status", status)
    assert [each["sequence"] for each in status["clock_steps"]] == [4]
    (line,) = (each for each in output_of("history", "--root", root).decode().splitlines() if "clock-step" in each)
    assert line.startswith(f"{at}  clock-step append times follow the clock again from record 4: they were at ")
    lines = map(json.loads, output_of("history", "--root", root, "--json").splitlines())
    (event,) = (each for each in lines if each.get("event") == "clock-step")
    assert (event["ledger"], event["line"], event["entry"]["sequence"]) == ("clock.jsonl", 1, 4)


def test_a_step_whose_earlier_records_are_gone_is_no_reason_to_warn(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"old"])
    built.cut(seal=True)
    built.lines("a", [b"new"])
    add_step(built.root, built.disk, ClockStep(built.last, built.now_ns + AHEAD_NS, built.now_ns))
    assert WRONG_TIMES in wald("read", "--root", built.root.path, "a", "--until", "now").stderr
    built.reclaim(1)
    assert WRONG_TIMES not in wald("read", "--root", built.root.path, "a", "--until", "now").stderr


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


YEAR_NS = 365 * 24 * 3600 * SECOND_NS
STEPS = {
    "forward and back": [3600 * SECOND_NS, -3600 * SECOND_NS],
    "to before 1970": [0, -60 * YEAR_NS],
    "forward": [YEAR_NS, 0],
}


def steps(path: Path, name: str, *, publish: bool = True) -> Built:
    """Return a log with a cut between two clock steps and then one commit round a second for records 3 to 6."""
    ahead, back = STEPS[name]
    built = Built(path)
    built.lines("web", [b"1"])
    built.lines("web", [b"2"])
    built.now_ns += ahead
    built.cut()
    built.now_ns += back
    for number in range(3, 7):
        built.lines("web", [b"%d" % number], publish=publish)
    return built


def spoil(built: Built, sequence: int) -> int:
    """Flip a bit in the record's batch; return the batch's position."""
    path = built.path(built.writer.base_sequence, Kind.RAW)
    offset = next(found.offset for found in batches(path)[1:] if found.header.base_sequence == sequence)
    path.write_bytes(flipped(path.read_bytes(), 8 * (offset + 73)))
    return offset


@pytest.mark.parametrize("name", STEPS)
class TestClocks:
    def test_a_healthy_log_is_sound_in_either_form_and_control_batches_hand_its_time_on(
        self, tmp_path: Path, name: str
    ) -> None:
        built = steps(tmp_path, name)
        times = [record.append_time_ns for record in records(tmp_path)]
        assert times == sorted(times)
        for segment in list_segments(built.root).segments:
            with segment.path.open("rb") as file:
                raw = RawFile(file.fileno())
                first, *others = batches(segment.path)
                reported = decode_state(raw.payload(first)).append_time_ns
            assert reported == first.header.append_time_ns
            assert all(batch.header.append_time_ns >= reported for batch in others)
        assert_sound(tmp_path)
        built.cut(seal=True)
        assert_sound(tmp_path)

    @pytest.mark.parametrize("publish", [True, False], ids=["head", "old-head"])
    def test_a_start_keeps_every_whole_record_behind_a_flipped_bit(
        self, tmp_path: Path, name: str, publish: bool
    ) -> None:
        """A power cut leaves an old head; intact batches after the damage show that they were synced."""
        built = steps(tmp_path, name, publish=publish)
        offset = spoil(built, 4)
        if publish:
            found = errors(tmp_path)
            assert ["not a batch" in line or "instead of 4" in line for line in found] == [True] * 2
        built.crash()
        built = Built(tmp_path, epoch=2, now_ns=built.now_ns)
        assert [f"offset {offset}: " in line for line in built.report.errors] == [True]
        assert built.report.trimmed_bytes == 0
        reported: list[Damaged] = []
        read = [record.value for record in open_log(tmp_path).records("web", on_damage=reported.append)]
        assert read == [b"1", b"2", b"3", b"5", b"6"]
        assert len(reported) == 1

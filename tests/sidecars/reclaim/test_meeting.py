"""``wald-reclaim`` beside a daemon and moving cursors: records stay, or the one who sets a cursor is told."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contents import errors
from faults import SteppingDisk, after_each_death
from full_disk import fill, small_file_system
from interleaving import PausingDisk, Schedule, interleavings, pausing
from logs import Built
from reclaiming import Reclaimer, bases, four_segments, ledger, reclaim, rulings
from running import Daemon, eventually, launched, output_of, refused, run, sidecar, wald
from tracing import strace

from wald.errors import InvalidInput, Locked, NotFound
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.format.names import Kind
from wald.log import Log
from wald.retention.cursors import Cursor
from wald.segments.view import State
from wald.writing.sealing import remove_temporaries, seal, segments_to_seal


class Gap(SteppingDisk):
    """Does something before its ``left``-th change, and nothing else."""

    def __init__(self, left: int, deed: Callable[[], None]) -> None:
        super().__init__()
        self.left = left
        self.deed = deed

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        if self.left == 0:
            self.deed()
        self.left -= 1


def rewind(built: Built) -> Cursor:
    return built.log.set_cursor("a", 2, rewind=True)


def new_group(built: Built) -> Cursor:
    return built.log.set_cursor("a", 2, "late")


def append_to(found: list[Cursor], set_cursor: Callable[[Built], Cursor], built: Built) -> None:
    found.append(set_cursor(built))


@pytest.mark.parametrize(("set_cursor", "looks"), [(rewind, 1), (rewind, 2), (new_group, 2)])
def test_a_cursor_set_in_any_gap_has_its_records_or_was_reported(
    tmp_path: Path, set_cursor: Callable[[Built], Cursor], looks: int
) -> None:
    """With one look the grace period is over at once; with two it ends between them."""
    reported: list[str] = []
    for number in range(100):
        built = four_segments(tmp_path / f"{number}", read=8)
        found: list[Cursor] = []
        disk = Gap(number, partial(append_to, found, set_cursor, built))
        for look in range(looks):
            reclaim(built, disk=disk, grace_ns=0 if look == looks - 1 else 10**18)
        if not found:
            break
        cursor = found[0]
        reclaim(built, grace_ns=10**18)  # the next run, as the message says
        if "to restore them" in cursor.message or not cursor.message:
            records = [record.sequence for record in built.log.records("a", "cursor", group=cursor.group)]
            assert records == [3, 5, 7], (number, cursor.message)
            assert set(bases(built.root)) >= {3, 5, 7}
        reported.append(cursor.message)
        ledger(built.root.path)
    assert number > 12
    assert any(not message for message in reported)
    assert any("to restore them" in message for message in reported)
    assert any("to see why" in message for message in reported)


def meet(root: Root, schedule: Schedule, *, now_ns: int) -> Cursor:
    """Delete the released segments while a cursor is set before them; return the cursor."""
    found: list[Cursor] = []

    def delete() -> None:
        for _ in deleter.delete(released, released, now_ns=now_ns):
            pass

    reclaimer = Reclaimer(root, PausingDisk(schedule, "rename", "unlink"))
    deleter = reclaimer.deleter()
    released = reclaimer.survey.released()
    schedule.run(delete, lambda: found.append(Log(root.path).set_cursor("a", 0, rewind=True)))
    reclaimer.ledger.close()
    return found[0]


def test_a_cursor_that_is_set_while_its_segment_goes_in_any_order_of_the_steps_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting a cursor reads names, files and the ledger; a file is deleted between any two of these."""
    built = Built(tmp_path / "released")
    built.lines("a", [b"x"])
    built.cut()
    built.seal()
    built.log.set_cursor("a", 1)
    reclaim(built, grace_ns=10**18)
    reported = []
    for number, schedule in enumerate(interleavings()):
        root = Root(shutil.copytree(built.root.path, tmp_path / f"{number}"))
        with monkeypatch.context() as patched:
            for name in (
                "wald.retention.cursor_moves.list_segments",
                "wald.retention.cursor_moves.segment_index",
                "wald.retention.cursor_moves.History",
            ):
                pausing(patched, schedule, name)
            pausing(patched, schedule, "wald_reclaim.survey.read_cursor_snapshot")
            message = meet(root, schedule, now_ns=built.now_ns).message
        if "to restore them" in message:
            reclaim(built, root=root, grace_ns=10**18)  # the next run, as the message says
            assert bases(root) == [1]
        if "to see why" not in message:
            order = [choice for choice, _ in schedule.taken]
            assert [record.sequence for record in Log(root.path).records("a", "cursor")] == [1], (order, message)
        reported.append(message)
    assert any(not message for message in reported)
    assert any("to restore them" in message for message in reported)
    assert any("to see why" in message for message in reported)


def test_of_a_segment_that_is_about_to_go_and_cannot_be_read_the_ledger_tells(tmp_path: Path) -> None:
    """It is deleted under cursors that were read before, or restored if it is read again."""
    built = four_segments(tmp_path / "root", read=8)
    reclaim(built, grace_ns=10**18)
    built.path(3, Kind.RELEASED).write_bytes(b"damaged")
    assert "records 3 to 7 of a are released" in rewind(built).message
    built.path(3, Kind.RELEASED).rename(built.path(3, Kind.DELETING))
    reported = rewind(built).message

    assert "records 5 to 7 of a are released" in reported
    assert "record 3 of a is deleted" in reported


def test_a_cursor_set_while_its_segments_wait_out_the_grace_period_gets_them_back(tmp_path: Path) -> None:
    built = four_segments(tmp_path / "root", read=8)
    reclaimer = Reclaimer(built.root, built.disk, grace_ns=10**18)
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root, Kind.RELEASED) == [1, 3, 5, 7]

    cursor = rewind(built)
    assert "records 3 to 7 of a" in cursor.message
    assert "wald-reclaim --root" in cursor.message
    assert [record.sequence for record in built.log.records("a", "cursor")] == [3, 5, 7]
    reclaimer.look(now_ns=built.now_ns)

    assert bases(built.root, Kind.RELEASED) == [1]
    assert bases(built.root) == [3, 5, 7]
    kept = [(entry["event"], entry["base"]) for entry in ledger(built.root.path)][4:]
    assert kept == [("kept", 3), ("kept", 5), ("kept", 7)]
    assert [built.log.where(sequence).state.value for sequence in (1, 3)] == ["released", "sealed"]
    reclaimer.grace_ns = 0
    built.log.set_cursor("a", 8)
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == bases(built.root, Kind.RELEASED) == []


def test_what_a_killed_run_was_about_to_delete_is_judged_again(tmp_path: Path) -> None:
    """It has its last name; a group that needs it by now gets it back."""
    built = four_segments(tmp_path / "root", read=8)
    for base in (1, 3):
        built.path(base, Kind.SEALED).rename(built.path(base, Kind.DELETING))
    cursor = rewind(built)
    assert "to see why" in cursor.message  # whether they still can be saved is not known to who sets a cursor
    reclaim(built)

    assert bases(built.root) == [3, 5, 7]
    assert bases(built.root, Kind.DELETING) == []


def test_who_moves_a_cursor_forward_is_told_nothing(tmp_path: Path) -> None:
    built = four_segments(tmp_path / "root", read=8)
    rewind(built)
    reclaim(built)

    assert built.log.set_cursor("a", 4).message == ""
    assert "records 1 to 1 of a" not in built.log.set_cursor("a", 2, rewind=True).message
    reported = built.log.set_cursor("a", 0, rewind=True).message
    assert "record 1 of a" in reported
    assert "to see why" in reported


@pytest.mark.parametrize(
    "call",
    [
        "fdatasync",
        pytest.param("rename,renameat,renameat2", marks=pytest.mark.slow),
        pytest.param("unlink,unlinkat", marks=pytest.mark.slow),
    ],
)
def test_a_cursor_set_while_a_system_call_of_reclaim_is_held_back(tmp_path: Path, call: str) -> None:
    """The command returns 0 before the call continues: its records exist, or it has named the missing ones."""
    root = tmp_path / "log"
    with Daemon(root):
        output_of("route", "add", "a", "--root", root)
        for _ in range(2):
            output_of("append", "a", "--root", root, stdin=b"x\n")
            output_of("cut", "--root", root)
        eventually(lambda: len(list((root / "segments").glob("*.zst"))) == 2)
        output_of("cursor", "set", "a", 2, "--root", root)
        trace = tmp_path / "trace"
        line = [strace(), "-f", "-o", str(trace), f"-einject={call}:delay_enter=1500000:when=1"]
        with subprocess.Popen([*line, *sidecar("reclaim", "--root", root, "--grace", "0")]) as process:
            names = tuple(call.split(","))
            eventually(lambda: trace.exists() and any(f"{name}(" in trace.read_text() for name in names))
            done = wald("cursor", "set", "a", 0, "--rewind", "--root", root)
            assert process.wait() == 0
        assert done.returncode == 0
        run(sidecar("reclaim", "--root", root, "--grace", "0"))
        read = wald("read", "a", "--from", "cursor", "--root", root)

        assert read.stdout == b"x\nx\n" or b"to see why" in done.stderr
        assert json.loads(wald("verify", "--root", root, "--json").stdout.splitlines()[-1])["good"]


_ACTIVE = 2
Work = Callable[[Root, Disk, Built], None]


@pytest.fixture
def cut_log(tmp_path: Path) -> Built:
    """Segment 1 is cut and read, and 2 is active."""
    cut_log = Built(tmp_path / "cut_log")
    cut_log.lines("a", [b"1"])
    cut_log.cut()
    cut_log.lines("a", [b"2"])
    cut_log.log.set_cursor("a", 1)
    return cut_log


def reclaim_once(root: Root, disk: Disk, cut_log: Built) -> None:
    reclaim(cut_log, root=root, disk=disk)


def seal_all(root: Root, disk: Disk, cut_log: Built) -> None:
    """Run a pass of the daemon's sealing thread."""
    segments = Ledger(root.ledger / "segments.jsonl", disk)
    try:
        for segment in segments_to_seal(root, _ACTIVE):
            with suppress(FileNotFoundError):  # it was reclaimed
                seal(root, segment, disk, segments, now=lambda: cut_log.now_ns, reserve=False)
    finally:
        segments.close()


def check(root: Root, cut_log: Built) -> None:
    """Check the ledgers now and after both have finished; the last line describes the deleted file."""
    assert set(rulings(root).values()) <= {()}
    for work in (reclaim_once, seal_all, reclaim_once):
        work(root, cut_log.disk, cut_log)
        assert set(rulings(root).values()) <= {()}

    assert sorted(path.name for path in root.segments.iterdir() if path.name < f"{_ACTIVE:020d}") == []
    deletion, sealed = ledger(root.path)[-1], read_ledger(root.ledger / "segments.jsonl").entries
    assert (deletion["event"], deletion["last"]) == ("reclaimed", 1)
    assert deletion.get("sha256") == (sealed[-1]["sha256"] if sealed else None)
    assert [line["event"] for line in sealed] in ([], ["cut", "sealed"])


@pytest.mark.slow
def test_every_order_of_the_steps_of_both_leaves_a_legal_deletion_of_what_there_was(
    cut_log: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(root: Root, schedule: Schedule) -> None:
        with monkeypatch.context() as patched:
            pausing(patched, schedule, "wald_reclaim.survey.find_being_sealed")
            schedule.run(
                partial(reclaim_once, root, PausingDisk(schedule, "rename"), cut_log),
                partial(seal_all, root, PausingDisk(schedule, "create", "rename", "unlink"), cut_log),
            )

    raw = 0
    for schedule in interleavings():
        root = Root(shutil.copytree(cut_log.root.path, tmp_path / "root"))
        meet(root, schedule)
        check(root, cut_log)
        raw += "form" in ledger(root.path)[-1]
        shutil.rmtree(root.path)
    assert raw


@pytest.mark.parametrize(("dying", "other"), [(reclaim_once, seal_all), (seal_all, reclaim_once)])
def test_one_dies_before_any_of_its_steps_and_the_other_goes_on(
    cut_log: Built, tmp_path: Path, dying: Work, other: Work
) -> None:
    root = Root(tmp_path / "root")

    def die(number: int, disk: Disk) -> None:
        shutil.copytree(cut_log.root.path, root.path)
        dying(root, disk, cut_log)

    for _ in after_each_death(die, least=5):
        if dying is seal_all:
            remove_temporaries(root, cut_log.disk)  # the next start of the daemon
        other(root, cut_log.disk, cut_log)
        check(root, cut_log)
        shutil.rmtree(root.path)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def daemon(log_path: Path) -> Iterator[Daemon]:
    """A running daemon with routes a and b."""
    with Daemon(log_path) as running:
        for route in ("a", "b"):
            output_of("route", "add", route, "--root", log_path)
        yield running


def sealed(log_path: Path) -> list[str]:
    return sorted(path.name[:20].lstrip("0") for path in (log_path / "segments").glob("*.wal.zst"))


def grow(log_path: Path, route: str, lines: int = 2) -> None:
    """Add a sealed segment with that number of records."""
    before = len(list((log_path / "ledger").glob("segments.jsonl")) and sealed(log_path))
    output_of("append", route, "--root", log_path, stdin=b"x\n" * lines)
    output_of("cut", "--root", log_path)
    eventually(lambda: len(sealed(log_path)) == before + 1 and len(list((log_path / "segments").glob("*.wal"))) == 1)


def reclaim_process(log_path: Path, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("reclaim", "--root", log_path, *arguments))


@contextmanager
def watching(log_path: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """``wald-reclaim --watch``, which has looked once."""
    line = sidecar("reclaim", "--root", log_path, "--watch", "--json", *arguments)
    with launched(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        looked = process.stdout.readline()
        assert json.loads(looked)["event"] == "pass", looked
        yield process
        if process.poll() is None:
            process.kill()


def test_it_says_what_goes_and_why_the_rest_stays(daemon: Daemon, log_path: Path) -> None:
    """A cursor that cannot be trusted is reported and holds its segment back."""
    grow(log_path, "a")
    grow(log_path, "b")
    output_of("cursor", "set", "a", 2, "--root", log_path)
    cursor = log_path / "routes/b/cursors/processed.cursor"
    cursor.write_text("99\n")
    planned = reclaim_process(log_path, "--dry-run", "--grace", "0").stdout.decode()
    assert planned.startswith("would reclaim 00000000000000000001.wal.zst: records 1 to 2, ")
    assert sealed(log_path) == ["1", "3"]
    assert not (log_path / "ledger/reclaim.jsonl").exists()

    done = reclaim_process(log_path, "--grace", "0")
    said = done.stdout.decode()
    assert (done.returncode, done.stderr.decode().count("processed.cursor: 99 is beyond the last durable record")) == (
        0,
        1,
    )
    for would, does in (
        ("would reclaim", "reclaimed"),
        ("would be marked", "now marked"),
        ("would be deleted", "deleted"),
    ):
        planned = planned.replace(would, does)
    assert said == planned
    for words in ("; kept: 1 (", "1: a group has not read it", "; pinned by one route alone: b "):
        assert words in said
    assert sealed(log_path) == ["3"]
    cursor.unlink()
    assert errors(log_path) == []


def test_it_reads_the_settings_of_the_daemon_and_an_option_goes_before_them(
    daemon: Daemon, log_path: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        grow(log_path, "a")
    config = tmp_path / "wald.toml"
    config.write_text('sync = "never"\n[retention]\ngrace = 0\n[routes.a]\nmax_records = 4\nunread = "expire"\n')
    assert reclaim_process(log_path, "--config", config, "--grace", "1h").returncode == 0
    assert sealed(log_path) == ["3", "5"]
    assert len(list((log_path / "segments").glob("*.released"))) == 1

    done = run(sidecar("reclaim", "--root", log_path), env={"WALD_CONFIG": str(config)})
    assert "deleted: 1" in done.stdout.decode()
    assert errors(log_path) == []


def test_a_hangup_makes_it_read_the_settings_again(daemon: Daemon, log_path: Path, tmp_path: Path) -> None:
    """Invalid settings are reported, and the previous ones stay effective."""
    config = tmp_path / "wald.toml"
    config.write_text("[retention]\ngrace = 0\n")
    grow(log_path, "a")
    with watching(log_path, "--config", config) as process:
        assert process.stderr is not None
        config.write_text("[retention]\ngrace = true\n")
        process.send_signal(signal.SIGHUP)
        output_of("cursor", "set", "b", 1, "--root", log_path)  # a pass
        assert b"retention.grace must be a duration" in process.stderr.readline()

        config.write_text('[retention]\ngrace = 0\n[routes.a]\nmax_records = 1\nunread = "expire"\n')
        process.send_signal(signal.SIGHUP)
        output_of("cursor", "set", "b", 2, "--root", log_path)
        eventually(lambda: sealed(log_path) == [])


def test_json_is_an_object_a_line(daemon: Daemon, log_path: Path) -> None:
    grow(log_path, "a")
    output_of("cursor", "set", "a", 2, "--root", log_path)
    done = [json.loads(line) for line in reclaim_process(log_path, "--json", "--grace", "0").stdout.splitlines()]

    assert [each["event"] for each in done] == ["reclaimed", "pass"]
    assert (done[0]["segment"], done[0]["rule"], done[0]["routes"][0]["cursors"]) == (1, "read", {"processed": 2})
    assert (done[1]["segments"], done[1]["deleted_segments"]) == (1, 1)


def test_watching_it_wakes_when_a_cursor_moves_and_when_a_segment_is_sealed(daemon: Daemon, log_path: Path) -> None:
    """Well before its next look is due."""
    grow(log_path, "a")
    with watching(log_path, "--grace", "0") as process:
        (log_path / "routes/a/cursors/processed.cursor").write_text("2\n")
        eventually(lambda: sealed(log_path) == [])
        output_of("append", "b", "--root", log_path, stdin=b"x\n")
        output_of("cursor", "set", "b", 3, "--root", log_path)
        output_of("cut", "--root", log_path)
        eventually(lambda: len(ledger(log_path)) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert errors(log_path) == []


@pytest.mark.slow
def test_a_stuck_route_never_stops_the_cut_and_costs_appends_nothing(daemon: Daemon, log_path: Path) -> None:
    """Twenty segments pile up, all of them readable; when the cursor moves, they go, and nothing else does."""
    with watching(log_path, "--grace", "0"):
        for _ in range(20):
            grow(log_path, "a", lines=1)
        assert len(sealed(log_path)) == 20
        assert output_of("read", "a", "--root", log_path).count(b"\n") == 20
        output_of("cursor", "set", "a", 15, "--root", log_path)
        eventually(lambda: len(sealed(log_path)) == 5)
    assert output_of("read", "a", "--from", "cursor", "--root", log_path).count(b"\n") == 5
    assert errors(log_path) == []


@pytest.mark.slow
def test_killed_again_and_again_it_finishes_what_it_began(daemon: Daemon, log_path: Path) -> None:
    for number in range(1, 9):
        grow(log_path, "a", lines=1)
        output_of("cursor", "set", "a", number, "--root", log_path)
    for _ in range(5):
        process = launched(sidecar("reclaim", "--root", log_path, "--grace", "0"), stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(1)  # it has carried something out
        process.kill()
        process.wait()
        process.stdout.close()
        assert errors(log_path) == []
    reclaim_process(log_path, "--grace", "0")

    assert sealed(log_path) == []
    assert sorted(entry["base"] for entry in ledger(log_path) if entry["event"] == "reclaimed") == list(range(1, 9))
    assert [json.loads(wald("where", n, "--root", log_path, "--json").stdout)["state"] for n in (1, 8)] == [
        State.RECLAIMED.value
    ] * 2


def test_a_second_one_is_told_that_there_is_a_first(daemon: Daemon, log_path: Path) -> None:
    with watching(log_path):
        code, message, hint = refused(reclaim_process(log_path))

    assert code == Locked.exit_code
    assert "another wald-reclaim is running on this root" in message
    assert "reclaim.lock" in hint


def test_invalid_options_and_a_missing_log_are_refused(daemon: Daemon) -> None:
    cases: list[tuple[Any, int, str]] = [
        (["--watch", "--dry-run"], InvalidInput.exit_code, "--watch excludes"),
        (["--unread", "expire"], InvalidInput.exit_code, "needs a limit"),
        (["--min-age", "soon"], InvalidInput.exit_code, "--min-age must be a duration"),
        (["--keep-bytes", "much"], InvalidInput.exit_code, "--keep-bytes must be a size"),
        (["--unread", "delete"], 2, "'delete' is not one of"),
        (["--root", "nowhere"], NotFound.exit_code, ""),
    ]
    for arguments, code, words in cases:
        refusal = refused(reclaim_process(daemon.root, *arguments))

        assert refusal[0] == code
        assert words in refusal[1]


def test_on_a_disk_without_a_byte_left_it_makes_room(tmp_path: Path) -> None:
    """Space for the next lines of its ledger is allocated, so read segments can be deleted on a full disk."""
    with small_file_system(tmp_path / "disk", 24 << 20) as disk:
        log_path = disk / "log"
        with Daemon(log_path, env={"WALD_SEGMENT_MAX_BYTES": "1MiB", "WALD_FREE_SPACE_MIN": "0"}):
            output_of("route", "add", "a", "--root", log_path)
            for _ in range(3):
                grow(log_path, "a")
            reclaim_process(log_path)
            output_of("cursor", "set", "a", 4, "--root", log_path)
            fill(disk / "filler")
            done = reclaim_process(log_path, "--grace", "0")

            assert done.returncode == 0, done.stderr
            assert sealed(log_path) == ["5"]
            assert [entry["base"] for entry in ledger(log_path)] == [1, 3]
            assert errors(log_path) == []


def test_a_directory_in_the_place_of_the_ledger_stops_a_pass(daemon: Daemon, log_path: Path) -> None:
    grow(log_path, "a")
    output_of("cursor", "set", "a", 2, "--root", log_path)
    (log_path / "ledger/reclaim.jsonl").mkdir()
    code, message, hint = refused(reclaim_process(log_path))

    assert (code, message) == (4, f"{log_path}/ledger/reclaim.jsonl: a directory, not a file")
    assert hint.startswith(f"ls -ld {log_path}/ledger/reclaim.jsonl")
    assert sealed(log_path) == ["1"]

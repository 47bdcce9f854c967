"""``wald-reclaim`` as a process with a running daemon: signals, kills, two at once, and its output."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from contents import errors
from full_disk import fill, small_file_system
from reclaiming import ledger
from running import Daemon, eventually, launched, output_of, refused, run, sidecar, wald

from wald.errors import InvalidInput, Locked, NotFound
from wald.segments.view import State


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with routes a and b."""
    with Daemon(root) as running:
        for route in ("a", "b"):
            output_of("route", "add", route, "--root", root)
        yield running


def sealed(root: Path) -> list[str]:
    return sorted(path.name[:20].lstrip("0") for path in (root / "segments").glob("*.wal.zst"))


def grow(root: Path, route: str, lines: int = 2) -> None:
    """Add a sealed segment with that number of records."""
    before = len(list((root / "ledger").glob("segments.jsonl")) and sealed(root))
    output_of("append", route, "--root", root, stdin=b"x\n" * lines)
    output_of("cut", "--root", root)
    eventually(lambda: len(sealed(root)) == before + 1 and len(list((root / "segments").glob("*.wal"))) == 1)


def reclaim(root: Path, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("reclaim", "--root", root, *arguments))


@contextmanager
def watching(root: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """``wald-reclaim --watch``, which has looked once."""
    line = sidecar("reclaim", "--root", root, "--watch", "--json", *arguments)
    with launched(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        looked = process.stdout.readline()
        assert json.loads(looked)["event"] == "pass", looked
        yield process
        if process.poll() is None:
            process.kill()


def test_it_says_what_goes_and_why_the_rest_stays(daemon: Daemon, root: Path) -> None:
    """A cursor that cannot be trusted is reported and holds its segment back."""
    grow(root, "a")
    grow(root, "b")
    output_of("cursor", "set", "a", 2, "--root", root)
    cursor = root / "routes/b/cursors/processed.cursor"
    cursor.write_text("99\n")
    planned = reclaim(root, "--dry-run", "--grace", "0").stdout.decode()
    assert planned.startswith("would reclaim 00000000000000000001.wal.zst: records 1 to 2, ")
    assert sealed(root) == ["1", "3"]
    assert not (root / "ledger/reclaim.jsonl").exists()

    done = reclaim(root, "--grace", "0")
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
    assert sealed(root) == ["3"]
    cursor.unlink()
    assert errors(root) == []


def test_it_reads_the_settings_of_the_daemon_and_an_option_goes_before_them(
    daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        grow(root, "a")
    config = tmp_path / "wald.toml"
    config.write_text('sync = "never"\n[retention]\ngrace = 0\n[routes.a]\nmax_records = 4\nunread = "expire"\n')
    assert reclaim(root, "--config", config, "--grace", "1h").returncode == 0
    assert sealed(root) == ["3", "5"]
    assert len(list((root / "segments").glob("*.released"))) == 1

    done = run(sidecar("reclaim", "--root", root), env={"WALD_CONFIG": str(config)})
    assert "deleted: 1" in done.stdout.decode()
    assert errors(root) == []


def test_a_hangup_makes_it_read_the_settings_again(daemon: Daemon, root: Path, tmp_path: Path) -> None:
    """Invalid settings are reported, and the previous ones stay effective."""
    config = tmp_path / "wald.toml"
    config.write_text("[retention]\ngrace = 0\n")
    grow(root, "a")
    with watching(root, "--config", config) as process:
        assert process.stderr is not None
        config.write_text("[retention]\ngrace = true\n")
        process.send_signal(signal.SIGHUP)
        output_of("cursor", "set", "b", 1, "--root", root)  # a pass
        assert b"retention.grace must be a duration" in process.stderr.readline()

        config.write_text('[retention]\ngrace = 0\n[routes.a]\nmax_records = 1\nunread = "expire"\n')
        process.send_signal(signal.SIGHUP)
        output_of("cursor", "set", "b", 2, "--root", root)
        eventually(lambda: sealed(root) == [])


def test_json_is_an_object_a_line(daemon: Daemon, root: Path) -> None:
    grow(root, "a")
    output_of("cursor", "set", "a", 2, "--root", root)
    done = [json.loads(line) for line in reclaim(root, "--json", "--grace", "0").stdout.splitlines()]

    assert [each["event"] for each in done] == ["reclaimed", "pass"]
    assert (done[0]["segment"], done[0]["rule"], done[0]["routes"][0]["cursors"]) == (1, "read", {"processed": 2})
    assert (done[1]["segments"], done[1]["deleted_segments"]) == (1, 1)


def test_watching_it_wakes_when_a_cursor_moves_and_when_a_segment_is_sealed(daemon: Daemon, root: Path) -> None:
    """Well before its next look is due."""
    grow(root, "a")
    with watching(root, "--grace", "0") as process:
        (root / "routes/a/cursors/processed.cursor").write_text("2\n")
        eventually(lambda: sealed(root) == [])
        output_of("append", "b", "--root", root, stdin=b"x\n")
        output_of("cursor", "set", "b", 3, "--root", root)
        output_of("cut", "--root", root)
        eventually(lambda: len(ledger(root)) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert errors(root) == []


@pytest.mark.slow
def test_a_stuck_route_never_stops_the_cut_and_costs_appends_nothing(daemon: Daemon, root: Path) -> None:
    """Twenty segments pile up, all of them readable; when the cursor moves, they go, and nothing else does."""
    with watching(root, "--grace", "0"):
        for _ in range(20):
            grow(root, "a", lines=1)
        assert len(sealed(root)) == 20
        assert output_of("read", "a", "--root", root).count(b"\n") == 20
        output_of("cursor", "set", "a", 15, "--root", root)
        eventually(lambda: len(sealed(root)) == 5)
    assert output_of("read", "a", "--from", "cursor", "--root", root).count(b"\n") == 5
    assert errors(root) == []


@pytest.mark.slow
def test_killed_again_and_again_it_finishes_what_it_began(daemon: Daemon, root: Path) -> None:
    for number in range(1, 9):
        grow(root, "a", lines=1)
        output_of("cursor", "set", "a", number, "--root", root)
    for _ in range(5):
        process = launched(sidecar("reclaim", "--root", root, "--grace", "0"), stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(1)  # it has carried something out
        process.kill()
        process.wait()
        process.stdout.close()
        assert errors(root) == []
    reclaim(root, "--grace", "0")

    assert sealed(root) == []
    assert sorted(entry["base"] for entry in ledger(root) if entry["event"] == "reclaimed") == list(range(1, 9))
    assert [json.loads(wald("where", n, "--root", root, "--json").stdout)["state"] for n in (1, 8)] == [
        State.RECLAIMED.value
    ] * 2


def test_a_second_one_is_told_that_there_is_a_first(daemon: Daemon, root: Path) -> None:
    with watching(root):
        code, message, hint = refused(reclaim(root))

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
        refusal = refused(reclaim(daemon.root, *arguments))

        assert refusal[0] == code
        assert words in refusal[1]


def test_on_a_disk_without_a_byte_left_it_makes_room(tmp_path: Path) -> None:
    """Space for the next lines of its ledger is allocated, so read segments can be deleted on a full disk."""
    with small_file_system(tmp_path / "disk", 24 << 20) as disk:
        root = disk / "log"
        with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "1MiB", "WALD_FREE_SPACE_MIN": "0"}):
            output_of("route", "add", "a", "--root", root)
            for _ in range(3):
                grow(root, "a")
            reclaim(root)
            output_of("cursor", "set", "a", 4, "--root", root)
            fill(disk / "filler")
            done = reclaim(root, "--grace", "0")

            assert done.returncode == 0, done.stderr
            assert sealed(root) == ["5"]
            assert [entry["base"] for entry in ledger(root)] == [1, 3]
            assert errors(root) == []


def test_a_directory_in_the_place_of_the_ledger_stops_a_pass(daemon: Daemon, root: Path) -> None:
    grow(root, "a")
    output_of("cursor", "set", "a", 2, "--root", root)
    (root / "ledger/reclaim.jsonl").mkdir()
    code, message, hint = refused(reclaim(root))

    assert (code, message) == (4, f"{root}/ledger/reclaim.jsonl: a directory, not a file")
    assert hint.startswith(f"ls -ld {root}/ledger/reclaim.jsonl")
    assert sealed(root) == ["1"]

"""``wald-archive restore --into``: a new log with the archived records, or a report of missing ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import bombs
import pytest
from archives import archive, bags, command, output_of, refusal_of
from damage import flipped
from faults import Died, DyingDisk, until_it_survives
from json_page import require_documented
from logs import Built, Unsynced
from running import Daemon, eventually, reclaim, wald
from running import output_of as wald_output_of

from wald.errors import InvalidInput, NotFound
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald_archive.codecs import Codec
from wald_archive.objects import open_destination
from wald_archive.parts import Records
from wald_archive.restore import restore_into


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Path of the new log, which a shell would split."""
    return tmp_path / "new log"


def read(root: Path, *words: object) -> list[dict[str, object]]:
    """Return records as ``wald read --format json`` prints them, without their senders, which are not archived."""
    done = wald("read", *words, "--format", "json", "--root", root)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [{key: value for key, value in record.items() if key != "sender"} for record in records]


def require_good(root: Path) -> None:
    verified = wald_output_of("verify", "--root", root).decode()
    assert verified.splitlines()[-1].endswith("0 errors"), verified
    assert wald("explain", "--root", root).returncode == 0


def restored_by(built: Built, dest: Path, new: Path, *routes: str, disk: Unsynced | DyingDisk | None = None) -> None:
    restore_into(
        open_destination(str(dest), Unsynced()),
        routes,
        new,
        disk=disk or Unsynced(),
        first=1,
        last=None,
        on_record=lambda _: None,
    )


def where(root: Path, sequence: int) -> str:
    return wald_output_of("where", sequence, "--root", root).decode()


@pytest.mark.parametrize("codec", [pytest.param("gz", marks=pytest.mark.slow), "zst"])
def test_it_reads_as_the_log_that_was_archived_and_goes_on_behind_it(tmp_path: Path, new: Path, codec: str) -> None:
    """With everything that records can be, written by a daemon, packed, deleted there, and restored."""
    old, dest = tmp_path / "old", tmp_path / "dest"
    objects = (
        b'{"value":"v","key":"k","event_time_ns":-5,"headers":{"h":"1"}}\n{"value_hex":"00ff0a","event_time_ns":7}\n'
    )
    with Daemon(old):
        wald_output_of("route", "add", "pipe", "--fifo", "--root", old)
        wald_output_of("route", "add", "web", "--root", old)
        with (old / "routes/pipe/in").open("wb") as pipe:
            pipe.write(b"one\n\n" + b"long" * 75_000 + b"\n\xff\r\nno newline")
            pipe.flush()
            for number in range(7):
                wald_output_of("append", "web", "--root", old, stdin=b"line %d\n\n" % number)
                wald_output_of("append", "web", "--jsonl", "-", "--root", old, stdin=objects)
        wald_output_of("route", "retire", "pipe", "--root", old)
        wald_output_of("append", "web", "--root", old, stdin=b"the last\n")
        before = read(old)
        output_of("pipe", "web", "--root", old, "--dest", dest, "--codec", codec, "--records-per-bundle", 3)
        wald_output_of("cut", "--root", old)
        reclaim(old, "--grace", 0)

    reported = output_of("restore", dest, "--into", new).decode()

    assert f"at {new}: records 1 to {len(before)} of log " in reported
    assert max(len(str(record.get("value"))) for record in before) == 300_000
    for route in ("pipe", "web"):
        assert read(new, route) == [record for record in before if record["route"] == route]
    require_good(new)
    with Daemon(new):
        appended = wald_output_of("append", "web", "--root", new, stdin=b"more\n").split()
        assert [int(word) for word in appended] == [len(before) + 1] * 2
        assert read(new)[:-1] == before
        require_good(new)


def test_of_one_route_the_other_sequences_are_answered(mixed: Built, dest: Path, new: Path) -> None:
    """They are reported as not restored; no reader of the route misses anything, and neither does one of all."""
    archive(mixed, dest, size=Records(4))
    archive(mixed, dest, route="b")
    before = read(mixed.root.path, "a")
    assert before[-1]["terminated"] is False

    reported = json.loads(output_of("restore", dest, "a", "--into", new, "--json"))

    require_documented("wald-archive restore", reported)
    assert (reported["records"], reported["missing"], reported["holes"]) == (14, 3, 2)
    assert (reported["from_log"], reported["log"]) == (mixed.log_id.hex(), read_identity(Root(new)).log_id.hex())
    assert read(new, "a") == before
    assert read(new) == before
    assert "not restored at 20" in where(new, 14)
    assert f"in no bundle of a in {dest}" in where(new, 14)
    require_good(new)
    with Daemon(new):
        assert wald_output_of("append", "a", "--root", new, stdin=b"more\n").split()[0] == b"18"
    require_good(new)


def test_a_large_hole_ends_a_segment(built: Built, dest: Path, new: Path) -> None:
    built.lines("a", [b"one"])
    built.lines("b", [b""] * 70_000)
    built.lines("a", [b"two"])
    built.lines("b", [b"between"])
    built.lines("a", [b"three"])
    archive(built, dest)
    before = read(built.root.path, "a")

    output_of("restore", dest, "--into", new)

    assert [segment.base_sequence for segment in list_segments(Root(new)).segments] == [1, 70_002]
    assert read(new) == before
    assert "not restored" in where(new, 35_000)
    assert "not restored" in where(new, 70_003)
    require_good(new)


def test_readers_are_told_what_of_their_route_may_be_missing(built: Built, dest: Path, new: Path) -> None:
    """The archive of b ends before that of a; and records before --from were not requested."""
    for number in range(5):
        built.lines("a", [b"a%d" % number])
        built.lines("b", [b"b%d" % number])
    archive(built, dest)
    archive(built, dest, route="b", to=6)

    output_of("restore", dest, "--into", new, "--from", 3)

    assert [record["sequence"] for record in read(new, "a", "--from", 3)] == [3, 5, 7, 9]
    done = wald("read", "b", "--root", new)
    assert done.stdout == b"b1\nb2\n"
    assert b"before --from 3" in done.stderr
    assert b"record 8 is lost: up to 1 record of route b is missing; it was not restored at" in done.stderr
    assert "before --from 3" in where(new, 2)
    require_good(new)


def test_only_a_new_or_an_empty_directory_is_taken(mixed: Built, dest: Path, new: Path) -> None:
    archive(mixed, dest)
    new.mkdir()
    output_of("restore", dest, "--into", new)
    assert refusal_of("restore", dest, "--into", new)[:2] == (
        2,
        f"{new}: already a log; records can only be restored into a new log",
    )
    (new.parent / "other").mkdir()
    (new.parent / "other/file").touch()
    assert "not empty" in refusal_of("restore", dest, "--into", new.parent / "other")[1]
    assert refusal_of("restore", dest, "b", "--into", new.parent / "third")[0] == 3
    assert "no bundle has a record" in refusal_of("restore", dest, "--into", new.parent / "third", "--from", 99)[1]
    assert refusal_of("restore", dest)[0] == 2
    assert not (new.parent / "third").exists()


def test_the_bundles_of_two_logs_are_not_mixed(mixed: Built, dest: Path, new: Path, tmp_path: Path) -> None:
    other = Built(tmp_path / "other")
    other.lines("b", [b"other"])
    archive(mixed, dest)
    archive(other, dest, route="b")

    code, message, _ = refusal_of("restore", dest, "--into", new)

    assert (code, "from several logs" in message) == (2, True)
    output_of("restore", dest, "b", "--into", new)
    assert [record["value"] for record in read(new)] == ["other"]


def test_a_damaged_bundle_leaves_no_log_and_a_hint_that_can_be_typed(mixed: Built, dest: Path, new: Path) -> None:
    archive(mixed, dest, size=Records(7))
    bundle = sorted((bags(dest)[0] / "data").glob("*.tar"))[1]
    whole = bundle.read_bytes()
    bundle.write_bytes(flipped(whole, 700))

    code, message, _ = refusal_of("restore", dest, "--into", new)
    assert (code, message.startswith(f"{bundle}: its sha256 is not")) == (4, True)
    assert wald("read", "--root", new).returncode == 3
    assert wald("run", "--root", new).returncode == 2

    bundle.write_bytes(whole)
    code, message, hint = refusal_of("restore", dest, "--into", new)
    assert (code, message) == (2, f"{new}: contains an unfinished restore, not a log")
    subprocess.run(["sh", "-c", hint.partition(";")[0]], check=True)
    output_of("restore", dest, "--into", new)
    require_good(new)


def test_whenever_it_dies_there_is_the_whole_log_or_none(mixed: Built, dest: Path, tmp_path: Path) -> None:
    """At each step, with half of its write on disk."""
    archive(mixed, dest)
    before = read(mixed.root.path, "a")
    for number, disk in enumerate(until_it_survives(lambda last: DyingDisk(last, part=0.5))):
        new = tmp_path / f"new-{number}"
        assert isinstance(disk, DyingDisk)
        try:
            restored_by(mixed, dest, new, disk=disk)
        except Died:
            disk.abandon()
        else:
            assert number > 30
            break
        try:
            read_identity(Root(new))
        except NotFound:
            if new.exists() and (new / "log.json.restoring").exists():
                with pytest.raises(InvalidInput, match="unfinished restore"):
                    restored_by(mixed, dest, new)
        else:
            assert read(new, "a") == before
    assert read(new, "a") == before


@pytest.mark.slow
def test_100_mb_are_restored_in_little_memory(tmp_path: Path, new: Path) -> None:
    """And a restore that is killed in the middle leaves no log."""
    built, dest = Built(tmp_path / "old", segment_max_bytes=16 << 20), tmp_path / "dest"
    for number in range(800):
        line = b"%08d " % number + os.urandom(32).hex().encode() * 2
        built.lines("ab"[number % 2], [line] * 1000)
    for route in "ab":
        archive(built, dest, route=route, codec=Codec.ZST, size=Records(100_000))
    words = command("restore", dest, "--into", new)
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    eventually(lambda: list(new.glob("segments/*.zst")))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with pytest.raises(NotFound):
        read_identity(Root(new))
    shutil.rmtree(new)

    code, said, peak_bytes = bombs.run("wald_archive", "restore", dest, "--into", new)

    assert code == 0, said
    assert peak_bytes < 192 * bombs.MIB
    require_good(new)
    original = wald_output_of("read", "--root", built.root.path)
    assert (len(original) > 100_000_000, wald_output_of("read", "--root", new) == original) == (True, True)

"""Damage that came after sealing: ``--verify`` reads frames before they go, and frames stand in for a lost index."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from contents import errors
from damage import flipped
from logs import Built
from reclaiming import Reclaimer, bases, ledger
from running import output_of, run, sidecar

from wald.format.names import Kind
from wald.format.sealed_index import Frame
from wald.segments.sealed_file import SealedFile


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Segment 1 with records 1 to 6, in frames of two each, by turns of a and b; then segment 7, and an active one."""
    built = Built(tmp_path / "root")
    for number in range(3):
        # Of this length, so that no frame takes two of them.
        built.lines("a", [os.urandom(400 << 10).hex().encode()])
        built.lines("b", [b"line %d" % number])
    built.cut()
    built.lines("a", [b"later"])
    built.lines("b", [b"later"])
    built.cut()
    built.seal()
    for route in "ab":
        built.log.set_cursor(route, 8)
    return built


def spoil(built: Built, number: int) -> Frame:
    """Flip a bit in the middle of a frame of segment 1."""
    path = built.path(1, Kind.SEALED)
    with SealedFile(path) as sealed:
        frame = sealed.index.frames[number]
    path.write_bytes(flipped(path.read_bytes(), 8 * (frame.offset + frame.compressed_bytes // 2)))
    return frame


def spoil_index(built: Built) -> None:
    """Flip a bit of segment 1's index."""
    path = built.path(1, Kind.SEALED)
    with SealedFile(path) as sealed:
        end = sealed.index.frames[-1].offset + sealed.index.frames[-1].compressed_bytes
    path.write_bytes(flipped(path.read_bytes(), 8 * (end + 60)))


def reclaim(built: Built, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("reclaim", "--root", built.root.path, "--grace", 0, *arguments))


def line(built: Built, base: int = 1) -> dict[str, Any]:
    return next(entry for entry in ledger(built.root.path) if entry["base"] == base)


def test_what_was_damaged_after_sealing_goes_and_is_reported_of_where_frames_are_read_first(built: Built) -> None:
    frame = spoil(built, 1)
    planned = reclaim(built, "--verify", "--dry-run")
    done = reclaim(built, "--verify")

    path = built.path(1, Kind.SEALED)
    assert planned.stdout.startswith(b"would reclaim 00000000000000000001.wal.zst: records 1 to 6, ")
    assert b", damaged\n" in planned.stdout
    assert done.returncode == 0
    assert done.stderr == planned.stderr
    assert done.stderr.decode().startswith(
        f"wald-reclaim: {path}: offset {frame.offset}: frame 1 cannot be decompressed"
    )
    reported = line(built)
    assert (reported["rule"], reported["damaged"], reported["damaged_bytes"]) == ("read", True, frame.raw_bytes)
    assert bases(built.root) == []


def test_what_was_taken_back_and_goes_again_is_reported_of_again(built: Built) -> None:
    """By the same process, which has read its frames before."""
    spoil(built, 1)
    reclaimer = Reclaimer(built.root, built.disk, grace_ns=1 << 60, verify=True)
    for sequence in (8, 0, 8):
        built.log.set_cursor("a", sequence, rewind=True)
        reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()

    reported = [(entry["event"], entry.get("damaged")) for entry in ledger(built.root.path) if entry["base"] == 1]
    assert reported == [("reclaimed", True), ("kept", None), ("reclaimed", True)]


def test_what_is_whole_goes_as_ever_where_frames_are_read_first(built: Built) -> None:
    done = reclaim(built, "--verify")

    assert (done.returncode, done.stderr) == (0, b"")
    assert "damaged" not in line(built)


def test_a_segment_whose_index_is_damaged_goes_once_it_is_read_by_what_its_frames_tell(built: Built) -> None:
    with SealedFile(built.path(1, Kind.SEALED)) as sealed:
        digest = sealed.index.sha256.hex()
    spoil_index(built)
    built.log.set_cursor("b", 5, rewind=True)
    held = reclaim(built)
    reported = output_of("explain", "--json", "--root", built.root.path)
    words = output_of("explain", "--root", built.root.path).decode()
    assert bases(built.root) == [1, 7]
    assert b"checksum is wrong" in held.stderr
    standing = json.loads(reported.splitlines()[0])
    assert [(pin["route"], pin["needs"]) for pin in standing["pins"]] == [("b", 6)]
    assert "checksum is wrong" in standing["message"]
    assert "pinned by b/processed (at 5, needs 6); its index is damaged" in words

    built.log.set_cursor("b", 8)
    done = reclaim(built)

    assert bases(built.root) == []
    assert b"checksum is wrong" in done.stderr
    reported_about = line(built)
    assert (reported_about["last"], reported_about["sha256"]) == (6, digest)
    assert {each["route"]: (each["count"], each["last"]) for each in reported_about["routes"]} == {
        "a": (3, 5),
        "b": (3, 6),
    }
    assert errors(built.root.path) == []

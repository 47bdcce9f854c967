"""The timecode bus from inside: the names, cursors, pins and ledger lines behind scripts/usecase-smpte-timecode.sh.

A frame is kept while the slave needs it. Only the cursor and the route's last record in a segment decide this, not the
age or the number of segments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import reclaiming
from logs import Built

from wald.files.ledger_read import read_ledger
from wald.files.listing import list_segments
from wald.format.names import DEFAULT_GROUP, Kind
from wald.retention.blockers import Pin, read_cursor_snapshot, sealed_index
from wald.segments.view import State

SCRIPT = Path(__file__).parents[2] / "scripts" / "usecase-smpte-timecode.sh"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
FRAMES_A_SECOND = 25
FRAMES = [b"10:00:%02d:%02d" % divmod(frame, FRAMES_A_SECOND) for frame in range(30 * FRAMES_A_SECOND)]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Working directory of the script; its path is short, because it contains a Unix socket."""
    programs.program("jq")
    programs.program("zstd")
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def bus(tmp_path: Path) -> Built:
    """750 frames on the route smpte; the log was cut after frames 250 and 500."""
    built = Built(tmp_path / "log")
    for start in (0, 250):
        built.lines("smpte", FRAMES[start : start + 250])
        built.cut()
    built.lines("smpte", FRAMES[500:])
    built.seal()
    return built


def segments(bus: Built) -> list[tuple[int, Kind]]:
    return [(segment.base_sequence, segment.kind) for segment in list_segments(bus.root).segments]


def pins(bus: Built) -> list[list[Pin]]:
    """Return the pins of each sealed segment."""
    claims = read_cursor_snapshot(bus.root, log_id=bus.log_id)
    sealed = [segment for segment in list_segments(bus.root).segments if segment.kind is Kind.SEALED]
    return [list(claims.pins(sealed_index(segment, bus.log_id).routes)) for segment in sealed]


def reclaim(bus: Built) -> list[dict[str, Any]]:
    """Run one pass without a grace period; return its ledger entries."""
    before = len(reclaiming.ledger(bus.root.path))
    reclaiming.reclaim(bus)
    return reclaiming.ledger(bus.root.path)[before:]


def test_frames_span_thirty_seconds() -> None:
    assert (len(FRAMES), FRAMES[0], FRAMES[-1]) == (750, b"10:00:00:00", b"10:00:29:24")


def test_two_rotations_leave_two_sealed_segments_and_an_active_one(bus: Built) -> None:
    assert segments(bus) == [(1, Kind.SEALED), (251, Kind.SEALED), (501, Kind.RAW)]
    reported = read_ledger(bus.root.ledger / "segments.jsonl").entries
    assert [(entry["base"], entry["last"]) for entry in reported if entry["event"] == "sealed"] == [
        (1, 250),
        (251, 500),
    ]


def test_while_nobody_has_read_every_segment_is_pinned(bus: Built) -> None:
    """The missing cursor is that of the default group; RECLAIM changes and reports nothing."""
    found = pins(bus)

    assert [(pin.route, pin.group, pin.at, pin.needs) for each in found for pin in each] == [
        ("smpte", DEFAULT_GROUP, 0, 250),
        ("smpte", DEFAULT_GROUP, 0, 500),
    ]
    assert reclaim(bus) == []
    assert segments(bus) == [(1, Kind.SEALED), (251, Kind.SEALED), (501, Kind.RAW)]


def test_the_slave_reads_every_frame_in_order_through_all_segments(bus: Built) -> None:
    batches = list(bus.log.batches("smpte", group="slave"))

    assert [record.value for batch in batches for record in batch.records()] == FRAMES
    assert [(batch.segment, batch.first_sequence, batch.last_sequence) for batch in batches] == [
        (1, 1, 250),
        (251, 251, 500),
        (501, 501, 750),
    ]
    assert reclaim(bus) == []  # reading does not acknowledge


@pytest.mark.parametrize(
    ("cursor", "freed"), [(0, []), (1, []), (249, []), (250, [1]), (499, [1]), (500, [1, 251]), (750, [1, 251])]
)
def test_the_slaves_cursor_frees_exactly_what_is_behind_it(bus: Built, cursor: int, freed: list[int]) -> None:
    bus.log.set_cursor("smpte", cursor, "slave")
    reported = reclaim(bus)

    assert [entry["base"] for entry in reported] == freed
    assert [entry["routes"][0]["cursors"] for entry in reported] == [{"slave": cursor}] * len(freed)
    assert [base for base, _ in segments(bus)] == [base for base in (1, 251, 501) if base not in freed]
    assert [record.value for record in bus.log.records("smpte")] == FRAMES[250 * len(freed) :]


def test_the_active_segment_stays_however_far_the_cursor_is(bus: Built) -> None:
    bus.log.set_cursor("smpte", 750, "slave")
    reclaim(bus)

    assert segments(bus) == [(501, Kind.RAW)]
    assert [bus.log.where(sequence).state for sequence in (1, 500, 501, 750, 751)] == [
        State.RECLAIMED,
        State.RECLAIMED,
        State.ACTIVE,
        State.ACTIVE,
        State.NEVER_ISSUED,
    ]


def test_a_second_slave_that_lags_holds_its_frames(bus: Built) -> None:
    bus.log.set_cursor("smpte", 750, "slave")
    bus.log.set_cursor("smpte", 300, "second")

    assert [entry["base"] for entry in reclaim(bus)] == [1]
    assert [[(pin.group, pin.at, pin.needs) for pin in each] for each in pins(bus)] == [[("second", 300, 500)]]


def script(scratch: Path, path: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": path, "TMPDIR": str(scratch)}
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert list(scratch.iterdir()) == []  # the script removes its files
    return done


def test_the_script_finds_the_same_from_outside(scratch: Path) -> None:
    done = script(scratch, PATH)

    assert done.returncode == 0, done.stdout
    assert [line.split(":")[1] for line in done.stderr.splitlines()[:-1]] == [" group slave is new on route smpte"]
    assert done.stderr.splitlines()[-1].startswith("  hint: ")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 11


def test_the_script_notices_a_frame_that_is_missing(scratch: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "wald").write_text(
        f'#!/bin/sh\nPATH="{PATH}"\nif [ $1 = read ]; then wald "$@" | sed 300d; else exec wald "$@"; fi\n'
    )
    (wrong / "wald").chmod(0o755)
    done = script(scratch, os.pathsep.join([str(wrong), PATH]))

    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith("ok ")] == [
        "FAILED  coverage: the slave got every frame, each as it was sent",
        "FAILED  coverage: 750 different frames",
    ]

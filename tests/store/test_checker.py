"""Segments that are checked independently give the same findings as those checked in order."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built

from wald.checking.checker import CheckResult, Finding, Level, SegmentToCheck, check
from wald.checking.verifier import Verification, verify
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.batch import Flag
from wald.format.names import Kind

Write = Callable[[Built], object]


def checked_ahead(root: Root) -> list[Finding]:
    """All findings, where each segment was checked before those in front of it, and maybe elsewhere."""
    verification = Verification(root)
    reported: dict[SegmentToCheck, bytes] = {
        target: pickle.dumps(check(target)) for target in reversed(verification.segments_to_check())
    }

    def ahead(target: SegmentToCheck) -> CheckResult:
        checked: CheckResult = pickle.loads(reported[target])
        return checked

    return list(verification.findings(ahead))


def errors(findings: list[Finding]) -> list[str]:
    return [finding.message for finding in findings if finding.level is Level.ERROR]


def write_anything(built: Built, chance: random.Random, batches: int) -> None:
    """Batches of three routes, records in pieces over segments among them, some of them never continued."""
    for _ in range(batches):
        route = chance.choice("abc")
        is_open = route in built.writer.state.open_records
        what = chance.randrange(6)
        if what == 0 and built.writer.has_advanced:
            built.cut()
        elif what == 1 and not is_open:
            built.piece(route, b"begun", begins=True, ends=False)
        elif what == 2 and not is_open:
            built.columns(route, [b"x", b"y"], keys=[b"k", None])
        elif is_open and chance.random() < 0.9:
            built.piece(route, b"ended\n", begins=False, ends=True)
        else:
            built.lines(route, [b"one", b"two"])
    built.seal(keep=chance.randrange(3))


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_whatever_came_before_the_findings_are_the_same(examples: int) -> None:
    """Mix the segments of two logs with a common past: checksums hold, but no segment fits the previous one."""
    settings(max_examples=examples, deadline=None)(given(st.integers(0, 1 << 32))(assert_same_findings))()


def assert_same_findings(seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        first = Built(one)
        write_anything(first, chance, 6)
        first.crash()
        shutil.copytree(one, other)
        for path in (one, other):
            built = Built(path, epoch=2, now_ns=first.now_ns + chance.randrange(-20, 20) * SECOND_NS)
            write_anything(built, chance, 12)
            built.crash()
        for path in list((other / "segments").iterdir()):
            if chance.random() < 0.4:
                path.rename(one / "segments" / path.name)
        if chance.random() < 0.5:
            (one / "head").unlink()
        root = Root(one)
        assert checked_ahead(root) == list(verify(root))


def test_a_good_log_is_read_once(tmp_path: Path) -> None:
    """Records that span segments, and routes that appear and disappear, do not cause a second check."""
    built = Built(tmp_path / "root")
    built.piece("long", b"begun", begins=True, ends=False)
    for _ in range(3):
        built.lines("a", [b"one"])
        built.cut()
        built.piece("long", b" and on", begins=False, ends=False)
    built.lines("b", [b"two"])
    built.cut()
    built.piece("long", b"\nlast\n", begins=False, ends=True)
    built.cut()
    built.seal()
    verification = Verification(built.root)
    reported = {target: check(target) for target in verification.segments_to_check()}
    for target in reported:
        target.segment.path.unlink()
    assert errors(list(verification.findings(reported.get))) == []


def line_of(route: str) -> Write:
    return lambda built: built.lines(route, [b"one"])


def begin(built: Built) -> None:
    built.piece("a", b"one", begins=True, ends=False)


@pytest.mark.parametrize(
    ("write", "write_other", "late_s", "expected"),
    [
        (line_of("a"), line_of("a"), 100, ["the append time is earlier than that of the previous batch"] * 2),
        (begin, line_of("a"), 0, ["record 1 of route a is unfinished, but the control state does not list it"]),
        (line_of("b"), line_of("a"), 0, ["the last record of route b is 1, but the control state says 0"]),
    ],
    ids=["older", "an open record", "a record"],
)
def test_a_segment_that_does_not_fit_the_one_before_it_is_found(
    tmp_path: Path, write: Write, write_other: Write, late_s: int, expected: list[str]
) -> None:
    """The last segment and the head are those of the other log."""
    Built(tmp_path / "one").crash()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name, write_this, at_s in (("one", write, late_s), ("other", write_other, 0)):
        built = Built(tmp_path / name, epoch=2, now_ns=START_NS + at_s * SECOND_NS)
        write_this(built)
        built.cut()
        built.lines("a" if late_s else "b", [b"two"])
        built.crash()
    last = list_segments(built.root).segments[-1].path
    for path in (last, built.root.head):
        shutil.copy(path, tmp_path / "one" / path.relative_to(built.root.path))
    assert errors(checked_ahead(Root(tmp_path / "one"))) == expected


def test_what_has_ended_in_a_lost_frame_is_not_open(tmp_path: Path) -> None:
    """The next segment correctly continues with another record."""
    built = Built(tmp_path / "root")
    built.piece("a", b"begun", begins=True, ends=False)
    built.cut()
    built.piece("a", b"ended\n", begins=False, ends=True)
    built.lines("b", [b"two"])
    built.cut()
    built.lines("a", [b"three"])
    built.seal()
    lost = built.path(2, Kind.SEALED)
    lost.write_bytes(flipped(lost.read_bytes(), 300))
    assert len(errors(checked_ahead(built.root))) == 1
    assert checked_ahead(built.root) == list(verify(built.root))


def test_a_record_that_the_next_segment_does_not_continue_is_found(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.append("a", b"begun", 1, flags=Flag.CONTINUED)
    built.cut()
    built.lines("a", [b"next"])
    assert errors(checked_ahead(built.root)) == [
        "record 1 of route a is unfinished, but this batch does not continue it"
    ]

"""Verification of work group journals: damage is an error, an unfinished line after a crash is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs import Built

from wald.checking.checker import Finding, Level
from wald.format.work import JournalStart, encode_work
from wald.work.group import WorkGroup
from wald.work.snapshot import check_journals


@pytest.fixture
def path(built: Built) -> Path:
    """Uncompacted journal of group g on route a, with two of five records done."""
    built.lines("a", [b"x"] * 5)
    with WorkGroup(built.root.path, "a", "g") as work:
        work.lease("w", 5, wait=30)
        work.ack("w", [2])
        work.ack("w", [4])
    return built.root.cursor_directory("a") / "g.work"


def found(built: Built) -> list[Finding]:
    return [finding for _, finding in check_journals(built.root, built.log_id)]


def levels(built: Built) -> list[Level]:
    return [each.level for each in found(built)]


def test_a_whole_journal_is_good_also_while_its_owner_runs(built: Built, path: Path) -> None:
    assert levels(built) == [Level.OK]
    with WorkGroup(built.root.path, "a", "g") as work:
        work.ack("w", [record.sequence for record, _ in work.lease("w", 1, wait=30)])
        assert levels(built) == [Level.OK]


def test_each_byte_that_is_another_is_damage_with_its_offset(built: Built, path: Path) -> None:
    data = path.read_bytes().rstrip(b"\n") + b"\n"
    *_, last = data.splitlines(keepends=True)
    for at in range(0, len(data) - len(last), 23):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        (finding,) = found(built)
        assert (finding.level, finding.path) == (Level.ERROR, path)
        assert finding.offset == data.rfind(b"\n", 0, at) + 1


def test_a_line_torn_by_a_crash_is_not_damage(built: Built, path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"2f000000 {")
    assert levels(built) == [Level.OK, Level.INFO]


def test_the_journal_of_another_group_is_damage(built: Built, path: Path) -> None:
    path.write_bytes(encode_work(JournalStart(bytes(16), "a", "g", 0, 1), 0))
    (finding,) = found(built)
    assert finding.level is Level.ERROR
    assert finding.message.startswith("the journal of group g on route a of log 0000")


def test_links_and_directories_are_damage_and_hide_no_journal(built: Built, path: Path) -> None:
    directory = built.root.cursor_directory("a")
    (directory / "planted.work").symlink_to(path)
    (directory / "directory.work").mkdir()
    assert sorted(level.value for level in levels(built)) == ["error", "error", "ok"]


def test_a_journal_with_records_that_the_log_does_not_have_is_damage(built: Built, path: Path) -> None:
    path.write_bytes(encode_work(JournalStart(built.log_id, "a", "g", 2, 7), 0))
    assert levels(built) == [Level.ERROR]
    path.write_bytes(encode_work(JournalStart(built.log_id, "a", "g", 2, 6), 0))
    assert levels(built) == [Level.OK]

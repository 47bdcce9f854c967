"""Journal on disk: verification finds damage but not a torn line, and only the journal of this group is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from leasing import group, leased
from logs import Built

from wald.checking.checker import Finding, Level
from wald.errors import Damaged, Refused
from wald.format.work import JournalStart, encode_work
from wald.work.group import WorkGroup
from wald.work.snapshot import check_journals


@pytest.fixture
def path(built: Built) -> Path:
    """Uncompacted journal of group g on route a, with two of five records done."""
    built.lines("a", [b"x"] * 5)
    with group(built) as work:
        leased(work, 5)
        work.ack("x", [2])
        work.ack("x", [4])
    return built.root.cursor_directory("a") / "g.work"


def found(built: Built) -> list[Finding]:
    return [finding for _, finding in check_journals(built.root, built.log_id)]


def levels(built: Built) -> list[Level]:
    return [each.level for each in found(built)]


def test_a_whole_journal_is_good_also_while_its_owner_runs(built: Built, path: Path) -> None:
    assert levels(built) == [Level.OK]
    with group(built) as work:
        work.ack("x", leased(work, 1))
        assert levels(built) == [Level.OK]


def test_each_byte_that_is_another_is_damage_with_its_offset(built: Built, path: Path) -> None:
    data = path.read_bytes().rstrip(b"\n") + b"\n"
    *_, last = data.splitlines(keepends=True)
    for at in range(0, len(data) - len(last), 23):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        (finding,) = found(built)
        offset = data.rfind(b"\n", 0, at) + 1
        assert (finding.level, finding.path, finding.offset) == (Level.ERROR, path, offset)
    with pytest.raises(Damaged, match=f"offset {offset}:") as refusal:
        group(built)
    assert "group show a g says" in refusal.value.hint


def test_a_line_torn_by_a_crash_is_not_damage(built: Built, path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"2f000000 {")
    assert levels(built) == [Level.OK, Level.INFO]


def test_the_journal_of_another_group_or_of_a_longer_log_is_damage(built: Built, path: Path) -> None:
    path.write_bytes(encode_work(JournalStart(bytes(16), "a", "g", 0, 1), 0))
    (finding,) = found(built)
    assert finding.level is Level.ERROR
    assert finding.message.startswith("the journal of group g on route a of log 0000")
    for end, level in ((7, Level.ERROR), (6, Level.OK)):
        path.write_bytes(encode_work(JournalStart(built.log_id, "a", "g", 2, end), 0))
        assert levels(built) == [level]
    path.rename(path.with_name("other.work"))
    built.log.set_cursor("a", 2, "other")
    with pytest.raises(Damaged, match="another"):
        WorkGroup(built.root.path, "a", "other")


def test_links_and_directories_are_damage_and_hide_no_journal(built: Built, path: Path) -> None:
    (path.parent / "planted.work").symlink_to(path)
    (path.parent / "directory.work").mkdir()
    assert sorted(level.value for level in levels(built)) == ["error", "error", "ok"]


def test_a_removed_group_starts_from_the_beginning(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    for _ in range(2):
        with group(built) as work:
            work.ack("x", leased(work, 2))
        built.log.cursor("a", "g").path.unlink()


def test_a_cursor_is_not_moved_back_below_what_the_workers_have_done(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    with group(built) as work:
        work.ack("x", leased(work, 2))
    with pytest.raises(Refused, match=r"g\.work") as refusal:
        built.log.set_cursor("a", 0, "g", rewind=True)
    assert refusal.value.hint.startswith("stop the workers; rm ")
    (built.root.cursor_directory("a") / "g.work").unlink()
    built.log.set_cursor("a", 0, "g", rewind=True)
    with group(built) as work:
        assert leased(work, 2) == [1, 2]

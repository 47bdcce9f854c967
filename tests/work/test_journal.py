"""A journal on disk: verification, and power cuts while its lines overwrite preallocated space.

Any unsynced 512-byte sector may have its content after any write since the sync, or be lost; a file that has grown
may have any of its lengths.
"""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leasing import group, leased, tries
from logs import Built, Unsynced
from powercut import SECTOR_BYTES, recorded

from wald.checking.checker import Finding, Level
from wald.errors import Damaged, Refused
from wald.format.batch import Buffer
from wald.format.work import Commit, FailureReason, JournalLine, JournalStart, encode_work
from wald.work.group import WorkGroup
from wald.work.journal import Journal
from wald.work.snapshot import check_journals

SYNC = None
ROOM_BYTES = 4096

commits = st.builds(
    lambda length, number: Commit(done=[(number, number)], reasons=[FailureReason("x" * length, 1, [])]),
    st.one_of(st.integers(0, 40), st.integers(300, 1200)),
    st.integers(1, 1000),
)
turns = st.lists(st.one_of(st.lists(commits, min_size=1, max_size=4), st.just(SYNC)), min_size=1, max_size=12)


class Cut(Unsynced):
    """Content of the journal at its last sync, and after each write since then.

    Attributes:
        full: True if preallocation fails for lack of space.
    """

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.full = False

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.full and not bytes(buffers[0]).strip():
            super().write(descriptor, [bytes(buffers[0])[:100]], offset)
            raise OSError(28, "No space left on device")
        written = super().write(descriptor, buffers, offset)
        self.contents.append(content(descriptor))
        return written

    def sync(self, descriptor: int) -> None:
        self.contents = [content(descriptor)]

    def image(self, choices: Iterator[int], length: int) -> bytes:
        """Draw possible contents of the disk, sector by sector."""
        length = len(self.contents[length % len(self.contents)])
        image = bytearray()
        for start in range(0, length, SECTOR_BYTES):
            kept = self.contents[next(choices) % len(self.contents)]
            image += kept[start : start + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0")
        return bytes(image[:length])


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


@contextmanager
def log() -> Iterator[Built]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr("wald.work.journal._PREALLOCATED_BYTES", ROOM_BYTES)
        yield Built(Path(directory) / "root")


def opened(built: Built, said: list[JournalLine], disk: Cut | None = None) -> Journal:
    return Journal(built.root, disk or built.disk, JournalStart(built.log_id, "a", "g", 0, 1), said.append)


def lines(built: Built) -> list[JournalLine]:
    said: list[JournalLine] = []
    opened(built, said).close()
    return said[1:]


def written(journal: Journal, turns: Iterable[list[Commit] | None]) -> tuple[list[Commit], int]:
    """Return the lines of all turns, and the number of synced lines."""
    appended: list[Commit] = []
    synced = 0
    for turn in turns:
        if turn is SYNC:
            journal.sync()
            synced = len(appended)
        else:
            journal.append(turn)
            appended += turn
    return appended, synced


@settings(max_examples=40)
@given(turns=turns, choices=st.lists(st.integers(0, 30), min_size=1), length=st.integers(0, 30), full=st.booleans())
def test_what_was_synced_is_there_and_the_rest_up_to_any_line(
    turns: list[list[Commit] | None], choices: list[int], length: int, *, full: bool
) -> None:
    with log() as built:
        disk = Cut()
        disk.full = full
        built.lines("a", [b"x"])
        journal = opened(built, [], disk)
        appended, synced = written(journal, turns)
        journal.close()
        journal.path.write_bytes(disk.image((choices * 1000).__iter__(), length))
        kept = lines(built)
        assert synced <= len(kept)
        assert kept == appended[: len(kept)]
        again = opened(built, [])
        again.append([Commit(done=[(7, 7)])])
        again.sync()
        again.close()
        assert lines(built) == [*kept, Commit(done=[(7, 7)])]


def filling(journal: Journal, end: int) -> Commit:
    """Return a line that ends just before this offset of the journal."""
    begin = lines_end(journal)
    empty = len(encode_work(Commit(reasons=[FailureReason("", 1, [])]), begin))
    return Commit(reasons=[FailureReason("x" * (end - begin - empty), 1, [])])


def lines_end(journal: Journal) -> int:
    return len(journal.path.read_bytes().rstrip(b"\n")) + 1


PROGRAM = """
import os, sys, wald
work = wald.WorkGroup(sys.argv[1], "a", "g")
work.lease("w", wait=30)
if sys.argv[2] == "nack":
    work.nack("w", [1], tries=5)
else:
    work.nack("w", [1])
    work.lease("w", wait=30)
os._exit(0)
"""


@pytest.mark.parametrize("last", ["lease", "nack"])
def test_a_power_cut_lowers_no_number_of_tries_that_was_reported(built: Built, tmp_path: Path, last: str) -> None:
    """Tries are reported by a second delivery, or by a worker that counts its failures."""
    built.lines("a", [b"x"])
    root = built.root.path
    platter = recorded([sys.executable, "-c", PROGRAM, str(root), last], root, tmp_path / "trace")
    states = [state for state in platter.states if state.acknowledged]
    assert states
    for state in states:
        shutil.rmtree(root)
        root.mkdir()
        state.put(root)
        with group(built) as work:
            if last == "nack":
                failure = work.failed(1)
                assert failure is not None, state.after
                assert failure.tries == 5, state.after
            else:
                assert tries(work.lease("w", wait=30)) == [3], state.after


class Short(Unsynced):
    """Writes only the first ``left`` bytes of a line, and then fails."""

    left: int | None = None

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.left is None:
            return super().write(descriptor, buffers, offset)
        super().write(descriptor, [b"".join(buffers)[: self.left]], offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_short_write_takes_no_synced_line_away_wherever_it_ends() -> None:
    """The write ends inside a preallocated sector."""
    lost = Commit(done=[(2, 2)], reasons=[FailureReason("x" * 700, 1, [])])
    length = len(encode_work(lost, 0))
    for left in {*range(0, length, 41), *range(8), *range(length - 4, length + 1)}:
        with log() as built:
            built.lines("a", [b"x"])
            disk = Short()
            journal = Journal(built.root, disk, JournalStart(built.log_id, "a", "g", 0, 1), lambda _: None)
            journal.append([Commit(done=[(1, 1)])])
            journal.sync()
            disk.left = left
            with pytest.raises(OSError, match="Input/output error"):
                journal.append([lost])
            journal.close()

            assert lines(built) in ([Commit(done=[(1, 1)])], [Commit(done=[(1, 1)]), lost])


@settings(max_examples=40)
@given(turns=turns, place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_another_byte_is_damage_and_takes_no_line_away(
    turns: list[list[Commit] | None], place: float, byte: int
) -> None:
    """An exception is a sector that held one byte of the last line and is blank now: it counts as lost."""
    with log() as built:
        built.lines("a", [b"x"])
        journal = opened(built, [])
        appended, _ = written(journal, turns)
        journal.close()
        data = journal.path.read_bytes()
        end = len(data.rstrip(b"\n"))
        at = int(place * len(data))
        journal.path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        try:
            assert lines(built) == appended
        except Damaged:
            assert data[at] != byte
        except AssertionError:
            begin = data.rfind(b"\n", 0, end) + 1
            assert bytes([byte]) in b"\n\0"
            assert (at + 1 if at == begin else at) % SECTOR_BYTES == 0
            assert at in (begin, end - 1) or (at, byte) == (end, 0)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_whole_line_behind_a_lost_one_does_not_count(built: Built, writes: int) -> None:
    """It was written together with the lost line, or after it and before the next sync."""
    built.lines("a", [b"x"])
    journal = opened(built, [])
    journal.sync()
    begin = lines_end(journal)
    both = [filling(journal, SECTOR_BYTES), Commit(done=[(2, 2)])]
    for turn in [both] if writes == 1 else [[each] for each in both]:
        journal.append(turn)
    journal.close()
    assert lines(built) == both
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:begin] + b"\n" * (SECTOR_BYTES - begin) + data[SECTOR_BYTES:])
    assert lines(built) == []


def test_another_byte_in_a_last_line_that_ends_with_a_sector_is_damage(built: Built) -> None:
    """The line has its end, so it is not torn."""
    built.lines("a", [b"x"])
    journal = opened(built, [])
    begin = lines_end(journal)
    journal.append([filling(journal, SECTOR_BYTES + 1)])
    journal.close()
    data = journal.path.read_bytes()
    assert len(data.rstrip(b"\n")) == SECTOR_BYTES
    for at in (begin, begin + 20, *range(SECTOR_BYTES - 21, SECTOR_BYTES)):
        for byte in (b"!", b"\0"):
            journal.path.write_bytes(data[:at] + byte + data[at + 1 :])
            with pytest.raises(Damaged):
                lines(built)


@pytest.mark.parametrize("where", [SECTOR_BYTES - 1, SECTOR_BYTES])
def test_another_byte_in_the_place_of_the_newline_is_damage(built: Built, where: int) -> None:
    """Tested at the end of a sector and at the beginning of the next one, which is otherwise preallocated space."""
    built.lines("a", [b"x"])
    journal = opened(built, [])
    journal.append([filling(journal, where + 1)])
    journal.close()
    data = journal.path.read_bytes()
    assert data.rstrip(b"\n") == data[:where]
    for byte in (b"!", b"\0"):
        journal.path.write_bytes(data[:where] + byte + data[where + 1 :])
        with pytest.raises(Damaged):
            lines(built)
    journal.path.write_bytes(data[:where])
    assert len(lines(built)) == 0, "a newline that never reached the disk"


@pytest.mark.parametrize("blank", [b"\n", b"\0"])
def test_a_lost_sector_in_the_middle_of_a_line_is_cut_off_with_what_follows(built: Built, blank: bytes) -> None:
    built.lines("a", [b"x"])
    journal = opened(built, [])
    journal.append([Commit(done=[(1, 1)])])
    journal.sync()
    journal.append([Commit(reasons=[FailureReason("x" * 2000, 1, [])]), Commit(done=[(2, 2)])])
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:1024] + blank * 512 + data[1536:])
    assert lines(built) == [Commit(done=[(1, 1)])]


def test_a_lost_sector_is_damage_if_a_line_behind_it_says_that_it_was_on_disk(built: Built) -> None:
    built.lines("a", [b"x"])
    journal = opened(built, [])
    for line in (Commit(reasons=[FailureReason("x" * 2000, 1, [])]), Commit(done=[(2, 2)])):
        journal.append([line])
        journal.sync()
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:1024] + b"\n" * 512 + data[1536:])
    with pytest.raises(Damaged):
        lines(built)


def test_lines_are_written_over_room_that_is_there(built: Built) -> None:
    built.lines("a", [b"x"])
    journal = opened(built, [])
    sizes = []
    for _ in range(2000):
        journal.append([Commit(done=[(2, 2)])])
        sizes.append(journal.path.stat().st_size)
    journal.close()
    assert sorted(set(sizes)) == [1 << 16, 2 << 16]
    assert len(lines(built)) == 2000


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
    assert "group show a g shows what can be done" in refusal.value.hint


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

"""A ledger file: an entry is there when append returns, not if it raises, and is read once while the file is cut."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from damage import flipped
from faults import SteppingDisk, TracingDisk
from logs import Unsynced, write_entries

from wald.checking.audit_report import DeletionAudit
from wald.errors import Damaged, Locked
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLine, LedgerLines, entries_of, parts_of, read_ledger
from wald.files.ledger_write import Ledger
from wald.format.ledger_lines import Entry
from wald.retention.history import History


class FailingDisk(SteppingDisk):
    """Raises at the step that is named, once; a write leaves half of its bytes behind."""

    failing = ""

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        if self.failing == name:
            self.failing = ""
            raise OSError(5, f"{name} failed")

    def partly(self) -> float:
        return 0.5

    def open_append(self, path: Path) -> int:
        self.step("open", path)
        return super().open_append(path)


def entries(path: Path) -> list[int]:
    decoded = read_ledger(path)
    assert decoded.broken_lines == []
    assert decoded.complete_bytes == path.stat().st_size
    return [entry["n"] for entry in decoded.entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments.jsonl"


def test_an_append_is_cut_to_its_whole_lines_wherever_it_is_torn(path: Path) -> None:
    """An opening changes nothing else, and the chain continues across openings."""
    write_entries(path, {"n": 1})
    first = path.stat().st_size
    write_entries(path, {"n": 2}, {"n": 3}, {"n": 4})
    whole = path.read_bytes()
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        kept = [1, 2, 3][: whole[:length].count(b"\n")]
        ledger = Ledger(path, Unsynced())
        assert entries(path) == kept
        ledger.append({"n": 5}, {"n": 6})
        ledger.close()
        assert entries(path) == [*kept, 5, 6]


def test_a_last_line_of_which_any_sectors_are_missing_is_cut(path: Path) -> None:
    """A power cut may leave its end without its middle, and the whole of it without the newline."""
    for length in range(900, 1500, 97):
        path.unlink(missing_ok=True)
        write_entries(path, {"n": 1})
        first = path.stat().st_size
        write_entries(path, {"n": 2, "x": "x" * length})
        whole = path.read_bytes()
        for sector in range(first // 512, (len(whole) - 1) // 512 + 1):
            start, end = max(first, 512 * sector), min(len(whole), 512 * (sector + 1))
            path.write_bytes(whole[:start] + bytes(end - start) + whole[end:])
            assert [entry["n"] for entry in entries_of(path)] == [1]
            assert read_ledger(path).broken_lines == []
            write_entries(path, {"n": 3})
            assert entries(path) == [1, 3]


@pytest.mark.parametrize("lengths", [(300, 300, 300), (30, 700, 1), (1, 30, 900)])
def test_an_append_of_several_lines_is_cut_to_the_first_of_them_whatever_sectors_are_missing(
    path: Path, lengths: Sequence[int]
) -> None:
    """Lines after the first incomplete one may be intact, but none was acknowledged."""
    write_entries(path, {"n": 1}, {"n": 2, "x": "x" * 200})
    first = path.stat().st_size
    write_entries(path, *({"n": 3 + n, "x": "x" * length} for n, length in enumerate(lengths)))
    whole = path.read_bytes()
    sectors = range(first // 512, (len(whole) - 1) // 512 + 1)
    for missing in chain.from_iterable(combinations(sectors, count) for count in range(len(sectors) + 1)):
        left = bytearray(whole)
        for sector in missing:
            start, end = max(first, 512 * sector), min(len(whole), 512 * (sector + 1))
            left[start:end] = bytes(end - start)
        path.write_bytes(left)
        torn_at = min((max(first, 512 * sector) for sector in missing), default=len(whole))
        kept = list(range(1, 1 + whole[:torn_at].count(b"\n")))
        assert [entry["n"] for entry in entries_of(path)] == kept  # before its owner has cut it
        assert [entry["n"] for entry in read_ledger(path).entries] == kept
        assert read_ledger(path).broken_lines == []
        write_entries(path, {"n": 6})
        assert entries(path) == [*kept, 6]


def test_zeros_in_front_of_the_last_append_are_damage(path: Path) -> None:
    """Bytes before a later append were synced."""
    write_entries(path, {"n": 1}, {"n": 2, "x": "x" * 2000}, {"n": 3})
    write_entries(path, {"n": 4}, {"n": 5})
    whole = path.read_bytes()
    path.write_bytes(whole[:512] + bytes(512) + whole[1024:])

    with pytest.raises(Damaged, match=r"segments\.jsonl: line 2: "):
        list(entries_of(path))
    assert [number for number, _ in read_ledger(path).broken_lines] == [2, 3]


@pytest.mark.parametrize("at_once", [False, True], ids=["single appends", "one append"])
def test_a_broken_chain_is_kept_and_told(path: Path, *, at_once: bool) -> None:
    """A bit is flipped on a disk, not by a power cut."""
    lines: list[Entry] = [{"n": n} for n in range(3)]
    for several in [lines] if at_once else [[line] for line in lines]:
        write_entries(path, *several)
    path.write_bytes(path.read_bytes().replace(b'"n":1', b'"n":7'))
    write_entries(path, {"n": 3})

    decoded = read_ledger(path)
    assert [entry["n"] for entry in decoded.entries] == [0, 2, 3]
    assert decoded.broken_lines == [(2, "checksum mismatch"), (3, "does not follow the line before it")]
    with pytest.raises(Damaged, match=r"segments\.jsonl: line 2: checksum mismatch"):
        list(entries_of(path))


def test_what_follows_a_damaged_last_line_says_so_whatever_bit_of_it_is_flipped(path: Path) -> None:
    write_entries(path, {"n": 0}, {"n": 1})
    whole = path.read_bytes()
    last = whole.index(b"\n") + 1
    for bit in range(8 * last, 8 * len(whole), 13):
        path.write_bytes(flipped(whole, bit))
        ledger = Ledger(path, Unsynced())
        with pytest.raises(Damaged, match="line 2: "):
            list(entries_of(path))
        ledger.append({"n": 2})
        ledger.close()

        decoded = read_ledger(path)
        assert [entry.get("n", entry.get("event")) for entry in decoded.entries] == [0, "after-damage", 2]
        assert decoded.broken_lines[0][0] == 2
        assert decoded.complete_bytes == path.stat().st_size


@pytest.mark.parametrize("then", ["", "open", "truncate", "sync_directory"])
@pytest.mark.parametrize("step", ["write", "sync"])
def test_a_failed_append_leaves_no_entry_and_the_next_one_works(path: Path, step: str, then: str) -> None:
    """After a failed sync the line may look intact: it was never acknowledged, and the caller appends it again."""
    disk = FailingDisk()
    ledger = Ledger(path, disk)
    ledger.append({"n": 1})
    disk.failing = step
    with pytest.raises(OSError, match=f"{step} failed"):
        ledger.append({"n": 2})
    assert disk.descriptors == set()  # a descriptor that failed is not used again
    if then:
        disk.failing = then
        with pytest.raises(OSError, match=f"{then} failed"):
            ledger.append({"n": 2})
        assert disk.descriptors == set()
    ledger.append({"n": 2})
    ledger.append({"n": 3})
    ledger.close()

    assert entries(path) == [1, 2, 3]
    assert disk.descriptors == set()


def test_several_entries_are_there_when_append_returns_with_one_sync(path: Path) -> None:
    disk = TracingDisk()
    ledger = Ledger(path, disk)
    disk.steps.clear()
    ledger.append({"n": 1}, {"n": 2}, {"n": 3})
    ledger.append({"n": 4})
    ledger.close()

    assert [name for name, _ in disk.steps] == ["write", "sync", "write", "sync"]
    assert entries(path) == [1, 2, 3, 4]


def test_a_ledger_with_an_owner_is_open_once(path: Path) -> None:
    for number in (1, 2):
        ledger = Ledger(path, Disk(), owner="wald-reclaim")
        with pytest.raises(Locked, match="another wald-reclaim is running on this root"):
            Ledger(path, Disk(), owner="wald-reclaim")
        ledger.append({"n": number})
        ledger.close()

    assert entries(path) == [1, 2]


def test_lines_are_read_one_at_a_time_as_far_as_the_chain_is_whole(path: Path) -> None:
    assert list(entries_of(path)) == []
    write_entries(path, {"n": 1}, {"n": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n": 3, "prev": "torn')
    assert [entry["n"] for entry in entries_of(path)] == [1, 2]

    first = whole[: whole.index(b"\n") + 1]
    for broken in (whole + b"7\n", first + b"[]\n", first + first, whole[len(first) :], whole[:-1] + b"\x0b"):
        path.write_bytes(broken)
        seen: list[int] = []
        with pytest.raises(Damaged, match=r"segments\.jsonl: line [123]: "):
            seen.extend(entry["n"] for entry in entries_of(path))
        assert seen == [1, 2][: len(seen)]


BASES = [10 * number + 1 for number in range(60)]
READINGS: dict[str, Callable[[LedgerLines], Iterator[LedgerLine]]] = {
    "oldest first": LedgerLines.oldest_first,
    "newest first": LedgerLines.newest_first,
    "about": lambda lines: lines.about(1, 600),
    "written": lambda lines: lines.written_between(0, 1000),
}


def deletion(base: int) -> dict[str, Any]:
    last = base + 9
    held = {"route": "a", "count": 10, "first": base, "last": last, "cursors": {"processed": last}}
    line = {"event": "reclaimed", "base": base, "last": last, "at": base, "rule": "read", "sha256": "x"}
    return line | {"routes": [held]}


def append(parted: Path, bases: list[int], part_bytes: int) -> None:
    """Delete, and cut the ledger if it is longer than a part."""
    ledger = Ledger(parted, Unsynced(), part_bytes=part_bytes)
    ledger.append(*map(deletion, bases))
    ledger.cut()
    ledger.close()


def cut(parted: Path) -> None:
    """Seal the active file in parts of a few lines."""
    before = len(parts_of(parted))
    append(parted, [], 1000)
    assert len(parts_of(parted)) > before + 1


@pytest.fixture
def log_root(tmp_path: Path) -> Root:
    """Forty deletions in parts, twenty in the active file."""
    (tmp_path / "ledger").mkdir()
    parted = tmp_path / "ledger" / "reclaim.jsonl"
    append(parted, BASES[:40], 3000)
    append(parted, BASES[40:], 1 << 20)
    assert len(parts_of(parted)) > 1
    return Root(tmp_path)


@pytest.fixture
def parted(log_root: Root) -> Path:
    return log_root.ledger / "reclaim.jsonl"


@pytest.mark.parametrize("begun", [1, 45])
@pytest.mark.parametrize("reading", READINGS)
def test_a_reading_gives_each_line_once_though_the_ledger_is_cut_and_looked_up_meanwhile(
    parted: Path, reading: str, begun: int
) -> None:
    lines, found = LedgerLines(parted), list[int]()
    for number, line in enumerate(READINGS[reading](lines)):
        if number == begun:
            cut(parted)
        if line.is_range("reclaimed"):
            found.append(line.entry["base"])
            # The blocks of the new parts start where those of the old active file did, and end elsewhere.
            about = [each.number for base in (line.low, 401, 591) for each in lines.about(base, base)]
            assert about == [line.number, *about[1:]]
            assert len(set(about[1:])) == len(about[1:]) == 2

    assert sorted(found) == BASES


def test_no_file_of_a_ledger_stays_open_between_lines(parted: Path) -> None:
    def held() -> list[str]:
        links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return [link for link in links if link.startswith(str(parted.parent))]

    lines = LedgerLines(parted)
    readings = [lines.newest_first(), lines.oldest_first(), lines.about(1, 600), lines.written_between(0, 1000)]
    found = [[next(reading)] for reading in readings]
    cut(parted)
    assert held() == []
    assert [len([*each, *reading]) for each, reading in zip(found, readings, strict=True)] == [
        len(list(lines.newest_first())) - 1
    ] * 2 + [60] * 2

    parts_of(parted)[0].path.write_bytes(b"damaged")
    for _ in range(3):
        with pytest.raises(Damaged):
            list(LedgerLines(parted).oldest_first())
    assert held() == []


def test_deletions_are_found_once_and_stay_legal_though_the_ledger_is_cut_meanwhile(
    log_root: Root, parted: Path
) -> None:
    gone, story = History(log_root).reclaimed_segments(1, 600), DeletionAudit(log_root)
    events = story.events()
    deleted, audited = [next(gone).first], [next(events)]
    append(parted, [601], 1 << 20)
    cut(parted)
    assert sorted([*deleted, *(each.first for each in gone)]) == BASES
    audited += events
    assert [event.entry["base"] for event in audited if event.ruling] == BASES
    assert [event.ruling.errors for event in audited if event.ruling and event.ruling.errors] == []
    assert story.not_allowed == 0

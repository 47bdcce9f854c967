"""Scans of damaged raw segments: only the salt and known positions are trusted; nothing forged is read."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contents import errors, values
from crashed import ALL, BASE, newest, quarantined, readable, start_again, story
from crc32c import crc32c
from damage import peak_bytes
from faults import Died, DyingDisk
from logs import Built
from repairing import repair
from sample_segments import LOG_ID, TIME_NS, batch, control_batch, joined, segment, segment_header

import wald
import wald.segments.raw_scan as raw_module
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.format.batch import HEADER, TRAILER, ParseOutcome, padded, seed
from wald.format.log_state import LogState
from wald.format.names import Kind
from wald.format.segment import SEGMENT_HEADER, SPARSE_INTERVAL_BYTES, encode_sparse_entry
from wald.segments import raw_scan
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import (
    FIRST_BATCH,
    SEQUENCES_REPEAT,
    WINDOW_BYTES,
    DamagedBytes,
    RawFile,
    ScannedBatch,
    SegmentEnd,
)

SECTOR = 512
LINE = b"x" * 200


def zero(path: Path, length: int = FIRST_BATCH) -> None:
    with path.open("r+b") as file:
        file.write(bytes(length))


def three_segments(path: Path) -> Built:
    """Return a log of three raw segments, 20 records each; the last one is active."""
    built = Built(path)
    for part in range(3):
        for number in range(20):
            built.lines("a", [b"%d-%d " % (part, number) + LINE])
        if part < 2:
            built.cut()
    built.crash()
    return built


@pytest.mark.parametrize(("index", "sector"), [(True, False), (False, True)], ids=["header", "sector, no index"])
class TestCutSegment:
    def damaged(self, path: Path, *, index: bool, sector: bool) -> tuple[Built, list[bytes], list[bytes]]:
        """Return the log, its records, and those that its segments still hold."""
        built = three_segments(path)
        whole = values(path)
        zero(built.path(21, Kind.RAW), SECTOR if sector else FIRST_BATCH)
        if not index:
            built.path(21, Kind.INDEX).unlink()
        left = readable(path)
        assert set(whole) - set(left) <= set(whole[20:22]) if sector else whole == left
        return built, whole, left

    def test_a_start_or_a_killed_repair_loses_only_the_batches_that_are_hit(
        self, tmp_path: Path, index: bool, sector: bool
    ) -> None:
        _, _, left = self.damaged(tmp_path / "log", index=index, sector=sector)
        for step in range(100):
            root = tmp_path / f"killed {step}"
            shutil.copytree(tmp_path / "log", root)
            killed = False
            try:
                repair(root, disk=DyingDisk(step, names=("rename", "unlink", "link")))
            except Died:
                killed = True
            assert readable(root) == left, step
            repair(root)
            assert errors(root) == [], step
            assert values(root) == left, step
            if not killed:
                break
        assert step >= 3

        assert any("magic" in error for error in errors(tmp_path / "log"))
        built = Built(tmp_path / "log", epoch=2)
        assert built.lines("a", [b"new"]) == 61
        assert readable(tmp_path / "log") == [*left, b"new"]


class TestNewestSegment:
    @pytest.mark.parametrize("zeros", [FIRST_BATCH, FIRST_BATCH + HEADER.size], ids=["header", "header and control"])
    def test_the_sparse_index_gives_the_salt(self, tmp_path: Path, zeros: int) -> None:
        path = tmp_path / "log"
        story(path)
        zero(newest(path), zeros)
        built = start_again(path)
        assert built.report.fate == "cut"
        assert [error for error in built.report.errors if "magic" in error]
        assert built.lines("web", [b"new"]) == 7
        assert readable(path) == [*ALL, b"new"]

    def test_without_header_and_sparse_index_it_goes_to_quarantine(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = story(path)
        zero(newest(path))
        built.path(BASE, Kind.INDEX).unlink()
        lost = newest(path).read_bytes()
        built = start_again(path)
        assert built.report.fate == "quarantine"
        assert built.report.errors
        assert quarantined(path) == [lost]
        assert readable(path) == ALL[:2]
        assert built.lines("web", [b"new"]) == 7  # no sequence is given out twice
        assert readable(path) == [*ALL[:2], b"new"]
        built.crash()
        repair(path)
        assert errors(path) == []
        assert values(path) == [*ALL[:2], b"new"]


SHORT_LINE = b"x" * 80
COUNT = 2000


@pytest.fixture
def small_batches(tmp_path: Path) -> Built:
    """Batches of one record of about 170 bytes each: a sector holds three, and the sparse index has five entries."""
    small_batches = Built(tmp_path, segment_max_bytes=1 << 20)
    for number in range(COUNT):
        small_batches.lines("a", [b"%d " % number + SHORT_LINE])
    return small_batches


def batches(small_batches: Built) -> list[ScannedBatch]:
    with small_batches.path(1, Kind.RAW).open("rb") as file:
        return [found for found in RawFile(file.fileno()).scan() if isinstance(found, ScannedBatch)][1:]


def lose(small_batches: Built, *offsets: int) -> set[int]:
    """Zero the sectors that hold these offsets; returns the records that are hit."""
    met = batches(small_batches)
    path = small_batches.path(1, Kind.RAW)
    data = bytearray(path.read_bytes())
    hit = set()
    for offset in offsets:
        begin = offset // SECTOR * SECTOR
        data[begin : begin + SECTOR] = bytes(SECTOR)
        hit |= {each.header.base_sequence for each in met if each.offset < begin + SECTOR and begin < each.end}
    path.write_bytes(data)
    return hit


def missing(small_batches: Built) -> set[int]:
    reported: list[Damaged] = []
    found = {record.sequence for record in small_batches.log.records("a", on_damage=reported.append)}
    assert reported
    return set(range(1, COUNT + 1)) - found


@pytest.mark.parametrize("places", [(200,), (10, 1990), (3, 500, 1000, 1500, 1990)])
def test_lost_sectors_cost_the_records_they_hit(small_batches: Built, places: tuple[int, ...]) -> None:
    met = batches(small_batches)
    hit = lose(small_batches, *(met[place - 1].offset for place in places))
    assert missing(small_batches) == hit
    small_batches.cut(seal=True)
    assert missing(small_batches) == hit


def test_without_a_sparse_index_only_what_is_between_two_lost_sectors_is_not_believed(small_batches: Built) -> None:
    """Bytes between two lost sectors may be a payload that looks like batches; the index entries bound the loss."""
    index = small_batches.path(1, Kind.INDEX)
    kept, reported = index.read_bytes(), find_index(index.parent, small_batches.log_id, 1)
    assert len(reported.entries) == small_batches.writer.position // SPARSE_INTERVAL_BYTES
    index.unlink()
    met = batches(small_batches)
    hit = lose(small_batches, met[499].offset)
    assert missing(small_batches) == hit
    hit |= lose(small_batches, met[1499].offset)
    between = set(range(500, 1500))
    assert missing(small_batches) == hit | between
    for wrong in ((1, 0, 0), (0, 8, 0), (0, 0, 1)):  # an entry counts only if such a batch is there
        lies = (
            encode_sparse_entry(sequence + wrong[0], position + wrong[1], time_ns + wrong[2])
            for sequence, position, time_ns in reported.entries
        )
        index.write_bytes(kept[: SEGMENT_HEADER.size] + b"".join(lies))
        assert missing(small_batches) == hit | between
    index.write_bytes(kept)
    assert missing(small_batches) == hit


FORGED = b"forged"


def forge(built: Built, *, depth: int = 4, length: int = 0, route: bytes = b"secure") -> bytes:
    """Return a payload of route "web" with batches of a route that its producer may not write."""
    writer = built.writer
    at = writer.position + HEADER.size + padded(len(b"web"))
    base = writer.state.next_sequence
    made = [
        batch(FORGED + b"\n", base=base + number, route=route, append_time_ns=built.now_ns + 10**9)
        for number in range(depth)
    ]
    data = joined(made, start=at, salt=writer._salt)
    data += b"x" * max(0, length - len(data) - 1)
    return data + b"\n"


def bits(number: int, *more: int) -> Callable[[bytes], bytes]:
    def change(header: bytes) -> bytes:
        changed = bytearray(header)
        for bit in (number, *more):
            changed[bit >> 3] ^= 1 << (bit & 7)
        return bytes(changed)

    return change


FIELDS = [0, 4, 8, 12, 16, 24, 32, 40, 48, 52, 56, 57, 58, 60]  # where each field of the header begins
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"a bit of the field at {at}": bits(8 * at) for at in FIELDS},
    **{f"two bits from {at} on": bits(8 * at + 1, 8 * at + 9) for at in FIELDS[1:12:4]},
    **{f"four bits from {at} on": bits(8 * at, 8 * at + 5, 8 * at + 13, 8 * at + 21) for at in FIELDS[2:12:4]},
    "all zeros": lambda header: bytes(len(header)),
    "all ones": lambda header: b"\xff" * len(header),
}


class Story:
    """Records 1 to 3 of route "web", then the forger's batch, then ``behind`` real ones."""

    def __init__(self, path: Path, *, behind: int, depth: int = 4) -> None:
        self.path = path
        self.built = built = Built(path)
        for number in range(1, 4):
            built.lines("web", [b"%d" % number])
        built.lines("secure", [b"real"])
        self.offset = built.writer.position
        payload = forge(built, depth=depth)
        built.append("web", payload, payload.count(b"\n"))
        for number in range(behind):
            built.lines("web", [b"behind %d" % number])
        self.real = [b"1", b"2", b"3", b"real", *(b"behind %d" % number for number in range(behind))]
        self.segment = built.path(1, Kind.RAW)

    def spoil(self, damage: Callable[[bytes], bytes]) -> None:
        data = self.segment.read_bytes()
        end = self.offset + HEADER.size
        self.segment.write_bytes(data[: self.offset] + damage(data[self.offset : end]) + data[end:])

    def check(self) -> None:
        """Check that only the forger's own lines are lost, and that none appears on another route."""
        reported: list[Damaged] = []
        log = wald.open(self.path)
        assert [r.value for r in log.records("secure", on_damage=reported.append)] == [b"real"]
        assert [r.value for r in log.records(on_damage=reported.append)] == self.real
        assert reported


@pytest.mark.parametrize(("name", "behind"), [(name, number % 2 * 3) for number, name in enumerate(DAMAGE)])
def test_nothing_forged_is_ever_read(tmp_path: Path, name: str, behind: int) -> None:
    """Raw; sealed; and by the next start."""
    story = Story(tmp_path / "a", behind=behind)
    story.spoil(DAMAGE[name])
    story.check()
    assert "secure" not in reported_by_dump(story.segment)[5:]
    assert any(finding.level.name == "ERROR" for finding in verify(story.built.root))
    story.built.cut()
    story.built.seal()
    story.check()
    story.built.crash()

    story = Story(tmp_path / "b", behind=behind)
    story.spoil(DAMAGE[name])
    story.built.crash()
    built = Built(tmp_path / "b", epoch=2)
    assert built.writer.state.routes["secure"] == 4
    assert built.report.errors
    built.lines("secure", [b"new"])
    reported: list[Damaged] = []
    read = [r.value for r in built.log.records(on_damage=reported.append)]
    assert read == [*story.real, b"new"]
    built.crash()


def reported_by_dump(path: Path) -> list[str]:
    return [piece["route"] for piece in dump(path) if piece["kind"] == "batch"]


class Counted:
    """Counts the bytes that pass through a checksum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        for module in (raw_scan, wald.format.batch):
            if hasattr(module, "crc32c"):
                monkeypatch.setattr(module, "crc32c", self._counting(module.crc32c))

    def _counting(self, checksum: Callable[..., int]) -> Callable[..., int]:
        def counted(data: bytes, value: int = 0) -> int:
            self.bytes += len(data)
            return checksum(data, value)

        return counted


def fake_headers(built: Built, length: int) -> bytes:
    """Headers of batches that claim to reach to the end of the payload: each would have to be checksummed to there."""
    at = built.writer.position + HEADER.size + padded(len(b"web"))
    made = b""
    for begin in range(0, length - 2 * HEADER.size, HEADER.size):
        left = (length - begin - HEADER.size - TRAILER.size).to_bytes(4, "little")
        fields = bytes(4) + left + (built.last + 1).to_bytes(8, "little") + bytes(24)
        fields += (1).to_bytes(4, "little") + bytes(4) + b"\1\0\3\0" + bytes(4)
        made += b"WBAT" + crc32c(fields, seed(built.writer._salt, at + begin)).to_bytes(4, "little") + fields
    return made + b"\n"


@pytest.mark.parametrize("flips", [1, 4], ids=["one-bit", "four-bits"])
def test_the_search_is_linear_however_many_headers_a_payload_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: int
) -> None:
    """Each looked like a batch to the end of the payload: 4 MiB of them took 12 s at every read and every start."""
    built = Built(tmp_path, segment_max_bytes=8 << 20)
    built.lines("web", [b"1"])
    offset = built.writer.position
    payload = fake_headers(built, 1 << 20)
    built.append("web", payload, payload.count(b"\n"))
    built.lines("web", [b"behind"])
    path = built.path(1, Kind.RAW)
    data = bytearray(path.read_bytes())
    for number in range(flips):
        data[offset + 16 + 3 * number] ^= 1
    path.write_bytes(data)

    counted = Counted(monkeypatch)
    read = [r.value for r in built.log.records(on_damage=lambda _: None)]
    assert read == [b"1", b"behind"]
    assert counted.bytes < 10 * len(payload)
    built.crash()
    counted.bytes = 0
    built = Built(tmp_path, epoch=2)
    assert built.report.errors
    assert counted.bytes < 10 * len(payload)


PAYLOADS = [b"one\ntwo\n", b"\n", b"three\n" * 9, b"four" * 30 + b"\n", b"WBAT" * 16 + b"\n", b"last\n"]
SMALL, OFFSETS = segment(PAYLOADS)
ENDS = [*OFFSETS[1:], len(SMALL)]
SPARE = bytes(512)  # as if preallocated

Damage = Callable[[bytes, int], bytes]


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]


def zeroed(data: bytes, position: int) -> bytes:
    return data[:position] + bytes(len(data[position : position + 24])) + data[position + 24 :]


def garbage(data: bytes, position: int) -> bytes:
    noise = bytes((position * 31 + i * 97) % 255 + 1 for i in range(len(data[position : position + 40])))
    return data[:position] + noise + data[position + 40 :]


def lost_page(data: bytes, position: int) -> bytes:
    """Zero a page that starts at a batch, as if it had not reached the disk."""
    return data[:position] + bytes(len(data[position : position + 300])) + data[position + 300 :]


@contextmanager
def opened(data: bytes, *, limit: int | None = None) -> Iterator[RawFile]:
    """A file in memory: some of these tests make thousands of them."""
    descriptor = os.memfd_create("segment")
    try:
        os.write(descriptor, data)
        yield RawFile(descriptor, limit=limit)
    finally:
        os.close(descriptor)


def scan(raw: RawFile, *, start: int = FIRST_BATCH) -> tuple[list[ScannedBatch], list[DamagedBytes], SegmentEnd]:
    batches: list[ScannedBatch] = []
    gaps: list[DamagedBytes] = []
    *found, tail = raw.scan(start=start)
    assert isinstance(tail, SegmentEnd)
    for item in found:
        assert not isinstance(item, SegmentEnd)
        if isinstance(item, DamagedBytes):
            gaps.append(item)
        else:
            batches.append(item)
    return batches, gaps, tail


@pytest.fixture(params=[WINDOW_BYTES, 256], ids=["one-window", "many-windows"])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second makes a small segment span many windows, so that their edges fall everywhere."""
    monkeypatch.setattr(raw_module, "WINDOW_BYTES", request.param)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("spare", [b"", SPARE], ids=["cut", "preallocated"])
def test_a_whole_segment_is_its_batches(spare: bytes) -> None:
    with opened(SMALL + spare) as raw:
        batches, gaps, tail = scan(raw)

        assert raw.header().log_id == LOG_ID
        assert [found.offset for found in batches] == OFFSETS
        assert [found.route for found in batches] == [""] + ["web"] * len(PAYLOADS)
        assert [raw.payload(found) for found in batches[1:]] == PAYLOADS
        assert gaps == []
        assert tail == SegmentEnd(len(SMALL), ParseOutcome.END, "", 0)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(("damage", "spare"), [(flip, b""), (zeroed, SPARE), (garbage, b""), (lost_page, SPARE)])
def test_damage_anywhere_costs_the_batches_it_touches_and_no_other(damage: Damage, spare: bytes) -> None:
    """At every byte of a small segment. Only the control batch is not looked for again once it is behind damage."""
    for position in range(FIRST_BATCH, len(SMALL)):
        data = damage(SMALL, position)
        good = [data[start:end] == SMALL[start:end] for start, end in zip(OFFSETS, ENDS, strict=True)]
        last_good = max((i for i, whole in enumerate(good) if whole), default=-1)
        with opened(data + spare) as raw:
            batches, gaps, tail = scan(raw)
            payloads = [raw.payload(found) for found in batches if not found.header.is_control]

        assert [found.offset for found in batches] == [at for at, whole in zip(OFFSETS, good, strict=True) if whole]
        assert payloads == [payload for payload, whole in zip(PAYLOADS, good[1:], strict=True) if whole]
        hidden = [byte for gap in gaps for byte in range(gap.offset, gap.offset + gap.length)]
        bad = [i for i, whole in enumerate(good) if not whole and i < last_good]
        assert hidden == [byte for i in bad for byte in range(OFFSETS[i], ENDS[i])]
        assert tail.offset == (ENDS[last_good] if last_good >= 0 else FIRST_BATCH)
        rest = data[tail.offset :].rstrip(b"\0")
        assert tail.garbage_bytes == len(rest)
        if not rest:
            assert tail.outcome is ParseOutcome.END
        elif rest.startswith(b"WBAT") and damage is not flip:
            assert tail.outcome in (ParseOutcome.DAMAGED, ParseOutcome.TORN)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("spare", [b"", SPARE], ids=["cut", "preallocated"])
def test_a_truncation_anywhere_leaves_the_batches_before_it(spare: bytes) -> None:
    """In a preallocated file the missing bytes read as zeros, so torn and damaged batches look the same."""
    for length in range(FIRST_BATCH, len(SMALL)):
        whole = [at for at, end in zip(OFFSETS, ENDS, strict=True) if end <= length]
        reached = max((end for end in ENDS if end <= length), default=FIRST_BATCH)
        with opened(SMALL[:length] + spare) as raw:
            batches, gaps, tail = scan(raw)

        rest = SMALL[reached:length].rstrip(b"\0")
        complete = bool(spare) and (SMALL[:length] + spare).startswith(SMALL[: ENDS[len(whole)]])
        if complete:  # only zeros of its padding were cut off
            assert len(batches) == len(whole) + 1
            continue
        assert [found.offset for found in batches] == whole
        assert gaps == []
        assert (tail.offset, tail.garbage_bytes) == (reached, len(rest))
        if not rest:
            assert tail.outcome is ParseOutcome.END
        elif not spare:
            assert tail.outcome is ParseOutcome.TORN
        else:
            assert tail.outcome is ParseOutcome.DAMAGED


def test_what_is_behind_the_limit_does_not_exist_and_a_file_that_became_shorter_ends_the_scan() -> None:
    for number, end in enumerate(ENDS):
        with opened(SMALL, limit=end) as raw:
            batches, gaps, tail = scan(raw)
            assert raw.read(end - 4, 100) == SMALL[end - 4 : end]

        assert (len(batches), gaps) == (number + 1, [])
        assert tail == SegmentEnd(end, ParseOutcome.END, "", 0)
    for length in range(0, len(SMALL), 5):
        with opened(SMALL[:length], limit=len(SMALL) + (64 << 20)) as raw:
            batches, gaps, tail = scan(raw)
            assert (len(batches), gaps) == (sum(end <= length for end in ENDS), [])
            assert tail.outcome is not ParseOutcome.WHOLE


def test_a_scan_that_starts_anywhere_finds_the_next_batch() -> None:
    """A stale index may point anywhere."""
    with opened(SMALL) as raw:
        for start in range(FIRST_BATCH, len(SMALL)):
            batches, _, _ = scan(raw, start=start)
            aligned = [at for at in OFFSETS if at >= start and (at > OFFSETS[0] or at == start)]
            assert [found.offset for found in batches] == aligned


def test_batches_at_every_window_edge_are_found() -> None:
    """The first batch ends so that the next header begins before, at and behind the end of the window."""
    for short in range(-8, 136, 8):
        payload = bytes(WINDOW_BYTES - 64 - 8 - short - 1) + b"\n"
        data, offsets = segment([payload, b"next\n", b"x" * (WINDOW_BYTES + 999) + b"\n", b"end\n"])
        with opened(data) as raw:
            batches, gaps, tail = scan(raw)
            assert [found.offset for found in batches] == offsets
            assert (gaps, tail.offset) == ([], len(data))


def framed(*parts: bytes) -> bytes:
    """A raw segment of these batches."""
    return segment_header() + joined([control_batch(LogState(1, TIME_NS)), *parts])


def test_a_record_that_looks_like_a_batch_is_never_one() -> None:
    """A producer may send segments as records: they stay content, even if the batch around them is damaged."""
    forged = batch(b"forged\n", base=2)
    outer = batch(b"x" * 7 + b"\n" + forged + b"\n", count=1)
    inner = outer.index(forged)
    after = batch(b"good\n", base=3)
    start = len(framed())
    assert (start + inner) % 8 == 0  # else it would not be looked at

    with opened(framed(outer, after)) as raw:
        assert [found.offset for found in scan(raw)[0]] == [FIRST_BATCH, start, start + len(outer)]
    for position in {64, 72, inner - 1, len(outer) - 9}:
        damaged = flip(outer, position)
        with opened(framed(damaged, after)) as raw:
            batches, gaps, _ = scan(raw)
            assert [found.header.base_sequence for found in batches] == [1, 3]
            assert gaps == [DamagedBytes(start, len(outer), "the body's checksum is wrong")]
    for length in range(HEADER.size, len(outer)):
        with opened(framed(outer)[: start + length]) as raw:
            batches, gaps, tail = scan(raw)
            assert (len(batches), gaps, tail.outcome) == (1, [], ParseOutcome.TORN)


def test_memory_stays_constant() -> None:
    """A batch larger than the window, a lying length, zeros and damage: never more than a few windows are held."""
    large = batch(b"x" * (8 << 20) + b"\n")
    data = framed(flip(large, 1 << 20), batch(b"after\n", base=2), batch(b"y" * (4 << 20) + b"\n", base=3)) + bytes(
        4 << 20
    )
    with opened(data) as raw:
        assert [len(found) for found in scan(raw)[:2]] == [3, 1]
    with opened(data) as raw:
        assert peak_bytes(lambda: scan(raw)) < 4 * WINDOW_BYTES


def test_a_batch_whose_sequences_were_given_out_before_is_damage() -> None:
    """A disk wrote a block twice or to the wrong place; no record may be read twice."""
    first, second, third = batch(b"a\nb\n"), batch(b"c\n", base=3), batch(b"d\n", base=4)
    with opened(framed(first, second, first, third)) as raw:
        batches, gaps, _ = scan(raw)
    assert [found.header.base_sequence for found in batches] == [1, 1, 3, 4]
    assert [(gap.length, gap.reason) for gap in gaps] == [(len(first), SEQUENCES_REPEAT)]

    with opened(framed(first, second, second)) as raw:
        batches, gaps, tail = scan(raw)
    assert [found.header.base_sequence for found in batches] == [1, 1, 3]
    assert (gaps, tail.outcome, tail.garbage_bytes) == ([], ParseOutcome.DAMAGED, len(second.rstrip(b"\0")))

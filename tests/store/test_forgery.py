"""Forged batches in payloads: a producer that knows the salt and the position encodes valid batches.

Readers never return them, whatever is damaged around them, and lose only the damaged batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c
from logs import Built
from sample_segments import batch, joined

import wald
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.format.batch import HEADER, TRAILER, padded, seed
from wald.format.names import Kind
from wald.segments import raw_scan
from wald.segments.raw_scan import FIRST_BATCH, RawFile, ScannedBatch

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


def test_what_a_producer_without_the_salt_makes_is_no_batch_even_at_a_place_where_one_is_due(tmp_path: Path) -> None:
    built = Built(tmp_path)
    at = built.writer.position
    made = joined([batch(FORGED + b"\n", route=b"secure")], start=at, salt=built.writer._salt ^ 1)
    path = built.path(1, Kind.RAW)
    path.write_bytes(path.read_bytes()[:at] + made)
    with path.open("rb") as file:
        assert [type(found).__name__ for found in RawFile(file.fileno()).scan()] == ["ScannedBatch", "SegmentEnd"]


def test_a_batch_is_none_at_another_place(tmp_path: Path) -> None:
    """A disk that mixes up its blocks neither doubles nor moves a record."""
    built = Built(tmp_path)
    for number in range(4):
        built.lines("a", [b"%d" % number])
    path = built.path(1, Kind.RAW)
    with path.open("rb") as file:
        places = [found for found in RawFile(file.fileno()).scan() if isinstance(found, ScannedBatch)][1:]
    data = path.read_bytes()
    first, second = (data[place.offset : place.end] for place in places[1:3])
    path.write_bytes(data[: places[1].offset] + second + first + data[places[2].end :])
    reported: list[Damaged] = []
    assert [r.value for r in built.log.records(on_damage=reported.append)] == [b"0", b"3"]
    assert reported


class TestSalt:
    """Without the segment's header the salt comes from the sparse index, and never from the content of a batch."""

    def build(self, path: Path) -> Path:
        built = Built(path)
        for number in range(3):
            built.lines("a", [b"%d" % number])
        built.crash()
        return built.path(1, Kind.RAW)

    @pytest.mark.parametrize("zeros", [FIRST_BATCH, FIRST_BATCH + HEADER.size], ids=["header", "header-and-control"])
    def test_it_is_found_again(self, tmp_path: Path, zeros: int) -> None:
        path = self.build(tmp_path)
        path.write_bytes(bytes(zeros) + path.read_bytes()[zeros:])
        built = Built(tmp_path, epoch=2)
        assert built.report.errors
        built.lines("a", [b"new"])
        assert [r.value for r in built.log.records(on_damage=lambda _: None)] == [b"0", b"1", b"2", b"new"]

    def test_one_that_a_payload_tells_is_not_taken(self, tmp_path: Path) -> None:
        """Without header and sparse index, no batch is believed."""
        path = self.build(tmp_path)
        data = path.read_bytes().rstrip(b"\0")
        lost = FIRST_BATCH + HEADER.size
        path.write_bytes(bytes(lost) + data[lost:-1] + bytes([data[-1] ^ 0x55]))
        with path.open("rb") as file:
            assert [type(found).__name__ for found in RawFile(file.fileno()).scan()] == ["SegmentEnd"]


class Counted:
    """Counts the bytes that pass through a checksum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        for module in (raw_scan, raw_scan, wald.format.batch):
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

"""Cost of damage: readers, ``wald verify`` and ``wald repair`` agree on the lost records."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import zstandard
from contents import errors, readable
from logs import Built
from repairing import repair
from shrinking import shrink

import wald
from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.format.names import Kind
from wald.repairing import rewrite
from wald.retention.missing import Missing
from wald.segments import sealed_file
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.sealed_file import SealedFile, compress_segment
from wald.writing import sealing

FRAME_BYTES = 450_000  # several blocks of zstd, of which those in front of damage decompress
RECORD_BYTES = 16_000
BLOCK_RECORDS = 16  # at most, in a block of zstd, with a record that has a piece there


def built(path: Path) -> Built:
    """Three segments; the middle one has four frames of some 25 records each, and pieces of long records."""
    log, rng = Built(path, segment_max_bytes=16 << 20), random.Random(7)
    log.lines("a", [b"first"] * 3, cut=True)
    for number in range(50):
        text = rng.randbytes(RECORD_BYTES).hex().encode()
        log.lines("ab"[number % 2], [text, b"%d" % number])
        if number % 10 == 3:
            log.piece("p", b"begins " + text[:200], begins=True, ends=False)
        if number % 10 == 5:
            log.piece("p", b"and ends\n", begins=False, ends=True)
    log.cut()
    log.lines("a", [b"last"] * 3)
    return log


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (sealing, rewrite):
            patch.setattr(module, "compress_segment", partial(compress_segment, frame_bytes=FRAME_BYTES))
        log = built(tmp_path_factory.mktemp("sealed") / "log")
        log.seal()
        log.crash()
        yield log


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Built:
    log = built(tmp_path_factory.mktemp("raw") / "log")
    log.crash()
    return log


def named_lost(root: Path) -> set[int]:
    """The records that ``wald verify`` names in its errors."""
    messages = [found.message for found in verify(Root(root)) if found.level is Level.ERROR]
    spans = [match for message in messages if (match := re.match(r"records (\d+) to (\d+) cannot be read", message))]
    return {sequence for span in spans for sequence in range(int(span[1]), int(span[2]) + 1)}


def check(log: Built, root: Path, path: Path, damage: Callable[[bytearray], object], *, named: bool) -> int:
    """Damage a copy of ``log``; returns how many records that costs."""
    shutil.copytree(log.root.path, root)
    target = root / path.relative_to(log.root.path)
    data = bytearray(target.read_bytes())
    damage(data)
    target.write_bytes(data)
    whole = readable(log.root.path)[0]

    before, _ = readable(root)
    assert before.items() <= whole.items()
    lost = whole.keys() - before.keys()
    if named:  # a record of which a piece is lost begins in front of the damage
        assert {each for each in lost if whole[each].route != "p"} <= named_lost(root) <= lost
    acts = repair(root).actions
    after, reported = readable(root)
    assert (after, reported) == (before, [])
    assert {each for act in acts for first, last in act.lost_spans for each in range(first, last + 1)} == lost
    assert errors(root) == []
    return len(lost)


def flip(at: int, data: bytearray) -> None:
    data[at] ^= 0x55


def zero(at: int, data: bytearray) -> None:
    data[at : at + 200] = bytes(len(data[at : at + 200]))


def cut(at: int, data: bytearray) -> None:
    del data[at:]


@pytest.mark.parametrize(
    ("damage", "place"), [(flip, 0.0), (zero, 0.02), (cut, 0.3), (flip, 0.3), (zero, 0.6), (cut, 0.999), (flip, 0.999)]
)
def test_in_a_frame_what_is_in_front_of_damage_is_whole(
    sealed: Built, tmp_path: Path, damage: Callable[[int, bytearray], None], place: float
) -> None:
    path = sealed.path(4, Kind.SEALED)
    with SealedFile(path) as file:
        frame = file.index.frames[1]
        records = frame.next_sequence - frame.first_sequence
        behind = file.index.next_sequence - frame.next_sequence
    at = frame.offset + int(place * frame.compressed_bytes)
    lost = check(sealed, tmp_path / "log", path, partial(damage, at), named=damage is not cut)
    most = records + behind if damage is cut else records
    assert lost <= most - records * place + BLOCK_RECORDS


def of_long_batches(path: Path, count: int) -> Built:
    """A log of one sealed segment; behind its first frame each holds one batch of 600 records."""
    log, rng = Built(path, segment_max_bytes=32 << 20), random.Random(7)
    for number in range(count):
        text = rng.randbytes(2_000).hex().encode()
        log.lines("a", [text, b"%d" % number] * 300)
    log.cut(seal=True)
    log.crash()
    with SealedFile(log.path(1, Kind.SEALED)) as file:
        assert [frame.raw_bytes > sealed_file.FRAME_BYTES for frame in file.index.frames] == [False] + [True] * count
    return log


def test_damaged_frames_of_one_long_batch_cost_no_frame_behind_them(tmp_path: Path) -> None:
    log = of_long_batches(tmp_path / "log", 12)
    path = log.path(1, Kind.SEALED)
    with SealedFile(path) as file:
        hit = file.index.frames[2::2]

    def damage(data: bytearray) -> None:
        for frame in hit:
            flip(frame.offset + frame.compressed_bytes // 2, data)

    assert check(log, tmp_path / "damaged", path, damage, named=True) == 6 * 600


def test_what_is_left_of_a_frame_is_looked_for_without_the_context_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread decompresses the next frame: a zstd context is for one thread."""
    used: list[object] = []
    decompressor = zstandard.ZstdDecompressor

    class Context:
        def __init__(self) -> None:
            self.own = decompressor()

        def __getattr__(self, name: str) -> object:
            used.append(self)
            return getattr(self.own, name)

    path = of_long_batches(tmp_path / "log", 1).path(1, Kind.SEALED)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Context)
    with SealedFile(path) as file:
        for number in range(2):
            data = file.frame(number)
            by_frame = set(used)
            used.clear()
            assert file.readable_start(number) == data
            assert used
            assert by_frame.isdisjoint(used)


def places(path: Path) -> dict[str, int]:
    """Return the positions in a raw segment by kind."""
    with open(path, "rb") as file:
        batches = [met for met in RawFile(file.fileno()).scan() if isinstance(met, ScannedBatch)]
    batch = next(met for met in batches[20:] if met.header.count == 2)
    return {
        "the header of the segment": 20,
        "the header of a batch": batch.offset + 20,
        "the payload of a batch": batch.offset + batch.header.payload_offset + 100,
        "the trailer of a batch": batch.end - 4,
        "the header of the last batch": batches[-1].offset + 20,
    }


@pytest.mark.parametrize(
    ("damage", "place"), [*((flip, place) for place in range(5)), (zero, 0), (zero, 3), (cut, 1), (cut, 4)]
)
def test_in_a_raw_segment_only_what_is_hit_is_lost(
    raw: Built, tmp_path: Path, damage: Callable[[int, bytearray], None], place: int
) -> None:
    path = raw.path(4, Kind.RAW)
    what, at = list(places(path).items())[place]
    lost = check(raw, tmp_path / "log", path, partial(damage, at), named=False)
    if damage is flip:
        assert lost == (0 if what == "the header of the segment" else 2), what


class TestALongRecordAcrossSegments:
    """A repair gives it up if a piece is lost, and keeps all other records."""

    def test_it_is_broken_by_a_lost_middle_behind_a_segment_in_which_shrinking_dropped_others(
        self, tmp_path: Path
    ) -> None:
        log = Built(tmp_path / "log")
        log.piece("a", b"begins ", begins=True, ends=False)
        log.lines("b", [b"read by everybody"] * 3, cut=True)
        log.lines("b", [b"of the lost segment"])
        log.piece("a", b"goes on ", begins=False, ends=False)
        log.cut()
        log.piece("a", b"ends\n", begins=False, ends=True)
        log.lines("b", [b"last"])
        log.seal()
        shrink(log, 1, b=4)
        log.crash()
        path = log.path(5, Kind.SEALED)
        with SealedFile(path) as file:
            (frame,) = file.index.frames
        copy = tmp_path / "damaged"
        assert check(log, copy, path, partial(zero, frame.offset + 9), named=False) == 2
        lines = [each for each in read_ledger(copy / "ledger/segments.jsonl").entries if each["event"] == "lost"]
        assert [line["routes"] for line in lines] == [[["a", 1, 1, 1, 0]], [["b", 1, 5, 5, 0], ["a", 0, 1, 1, 0]]]
        missing: list[Missing] = []
        assert list(wald.open(copy).records("a", start=1, on_missing=missing.append)) == []
        assert [(each.first, each.last, each.records) for each in missing] == [(1, 1, 1)]

    def test_a_segment_made_again_opens_with_what_is_open_in_front_of_it(self, tmp_path: Path) -> None:
        log = Built(tmp_path / "log")
        log.piece("a", b"begins ", begins=True, ends=False)
        log.cut()
        log.lines("b", [b"of a segment that stays"])
        log.piece("a", b"goes on ", begins=False, ends=False)
        log.cut()
        log.lines("b", [b"next"])
        log.piece("a", b"ends\n", begins=False, ends=True)
        log.crash()
        in_the_state = partial(flip, 64 + 70)
        assert check(log, tmp_path / "damaged", log.path(3, Kind.RAW), in_the_state, named=False) == 1

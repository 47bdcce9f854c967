"""Frames are decompressed in order and completely, or not at all; stock tools read them as one file."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from damage import every_truncation, flipped
from running import TIMEOUT_SECONDS

from wald_archive.codecs import BadStream, Codec, ahead, in_order

FRAMES = [b"", b"one frame\n" * 50, b"another\n", bytes(range(256)) * 30]
COMPRESSED = [Codec.ZST, Codec.GZ]


def pieces(data: bytes, length: int) -> Iterator[bytes]:
    return (data[start : start + length] for start in range(0, len(data), length))


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("length", [1, 7, 100_000])
def test_frames_come_back_however_the_file_is_read(codec: Codec, length: int) -> None:
    row = b"".join(map(codec.compress, FRAMES))

    assert b"".join(codec.decompress(pieces(row, length))) == b"".join(FRAMES)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_row_that_ends_within_a_frame_is_refused(codec: Codec) -> None:
    """The zstandard package alone would silently stop early."""
    compressed = list(map(codec.compress, FRAMES[:3]))
    boundaries = {0, *accumulate(map(len, compressed))}
    for cut in every_truncation(b"".join(compressed)):
        if len(cut) not in boundaries:
            with pytest.raises(BadStream):
                list(codec.decompress(pieces(cut, 64)))


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_changed_bit_is_refused_or_changes_no_content(codec: Codec) -> None:
    """Some bits of a header say nothing about the content; every other one shows."""
    frame = bytes(codec.compress(FRAMES[1]))
    for bit in range(8 * len(frame)):
        try:
            content = b"".join(codec.decompress([flipped(frame, bit)]))
        except BadStream:
            continue
        assert content == FRAMES[1]


@pytest.mark.parametrize("codec", Codec)
def test_a_frame_of_known_length_comes_back(codec: Codec) -> None:
    for content in FRAMES:
        assert codec.expand(bytes(codec.compress(content)), len(content)) == content


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_frame_that_is_cut_short_is_refused(codec: Codec) -> None:
    with pytest.raises(BadStream):
        codec.expand(bytes(codec.compress(FRAMES[1])[:-1]), len(FRAMES[1]))


@pytest.mark.parametrize(("codec", "program"), [(Codec.ZST, ["zstd", "-dc"]), (Codec.GZ, ["gunzip", "-c"])])
def test_stock_tools_read_a_row_as_one_file(tmp_path: Path, codec: Codec, program: list[str]) -> None:
    path = tmp_path / f"row{codec.suffix}"
    path.write_bytes(b"".join(map(codec.compress, FRAMES)))

    assert subprocess.run([*program, path], capture_output=True, check=True).stdout == b"".join(FRAMES)


def test_results_come_in_order_whoever_is_done_first() -> None:
    """The first item waits for the second."""
    second = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second.wait(TIMEOUT_SECONDS)
        elif number == 1:
            second.set()
        return number

    assert list(in_order(work, range(20))) == list(range(20))


def test_only_a_few_items_are_taken_before_they_are_wanted() -> None:
    """Unwritten frames are held in memory."""
    items = iter(range(1000))
    results = in_order(lambda number: number, items)

    assert next(results) == 0

    assert next(items) < 10
    results.close()


def test_what_is_made_ahead_comes_in_order_and_fails_as_it_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise BadStream("here")

    each = ahead(items())
    assert [next(each), next(each)] == [1, 2]
    with pytest.raises(BadStream, match="here"):
        next(each)

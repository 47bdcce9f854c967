"""A small sealed segment that claims gigabytes is reported as damage, in little memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import zstandard
from bombs import GIB, MEMORY_MAX_BYTES, MIB, ZEROS, run
from logs import Built

from wald.format.names import Kind
from wald.format.sealed_index import Frame, FrameTable, encode_sealed_index, encode_seek_table
from wald.segments.sealed_file import SealedFile


def plant(path: Path, raw_bytes: int) -> None:
    """Give a sealed segment another frame of ``length`` zeros, and an index that lists it."""
    with SealedFile(path) as file:
        index, batches = file.index, file.index.batch_table()
    last = index.frames[-1]
    end = last.offset + last.compressed_bytes
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=raw_bytes)
    pieces = [compressor.compress(ZEROS[: min(MIB, raw_bytes - at)]) for at in range(0, raw_bytes, MIB)]
    frame = b"".join([*pieces, compressor.flush()])
    more = Frame(end, len(frame), index.raw_bytes, raw_bytes, index.next_sequence, 1000, 0, 1 << 62, (0,))
    index = replace(
        index,
        frames=FrameTable.from_frames([*index.frames, more]),
        raw_bytes=index.raw_bytes + raw_bytes,
        next_sequence=1000,
    )
    section = encode_sealed_index(index, batches)
    sizes = [(each.compressed_bytes, each.raw_bytes) for each in index.frames]
    path.write_bytes(path.read_bytes()[:end] + frame + section + encode_seek_table([*sizes, (len(section), 0)]))
    assert path.stat().st_size < 200 << 10


def test_a_frame_of_a_gigabyte_is_not_expanded(tmp_path: Path) -> None:
    """Only a batch may have a frame of more than about 1 MiB, and a batch has a maximum size."""
    root = tmp_path / "log"
    built = Built(root)
    built.lines("a", [b"one", b"two"])
    built.cut()
    built.seal()
    path = built.path(1, Kind.SEALED)
    plant(path, GIB)

    for arguments in (("inspect", "--content", path), ("verify", "--root", root), ("read", "a", "--root", root)):
        _, reported, memory = run("wald", *arguments)
        assert "Traceback" not in reported
        assert memory < MEMORY_MAX_BYTES, arguments
        assert "claims" in reported or arguments[0] == "read", reported

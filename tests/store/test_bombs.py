"""A small sealed segment that claims gigabytes is told of as damage, in little memory."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from logs import Built
from running import command

from wald.format.names import Kind
from wald.format.sealed import Frame, encode_index, encode_seek_table
from wald.store.compression import SealedFile

MIB = 1 << 20
GIB = 1 << 30
ZEROS = bytes(MIB)
LARGEST = (1 << 32) - 1  # what the index can say of a frame
MEMORY_MAX_BYTES = 200 * MIB
ADDRESS_SPACE_BYTES = 3 * GIB  # what a bomb may ask the test machine for


def memory_of(*arguments: object) -> tuple[int, str, int]:
    """Exit code, stdout and stderr, and the most memory that the process had, in bytes."""
    line = ["prlimit", f"--as={ADDRESS_SPACE_BYTES}", *command(*arguments)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, told, usage.ru_maxrss * 1024


def plant(path: Path, raw_bytes: int) -> None:
    """Give a sealed segment another frame, of so many zeros, and an index that tells of it."""
    with SealedFile(path) as file:
        index, batches = file.index, file.index.batch_table()
    last = index.frames[-1]
    end = last.offset + last.compressed_bytes
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=raw_bytes)
    pieces = [compressor.compress(ZEROS[: min(MIB, raw_bytes - at)]) for at in range(0, raw_bytes, MIB)]
    frame = b"".join([*pieces, compressor.flush()])
    more = Frame(end, len(frame), index.raw_bytes, raw_bytes, index.next_sequence, 1000, 0, 1 << 62, (0,))
    index = replace(index, frames=[*index.frames, more], raw_bytes=index.raw_bytes + raw_bytes, next_sequence=1000)
    section = encode_index(index, batches)
    sizes = [(each.compressed_bytes, each.raw_bytes) for each in index.frames]
    path.write_bytes(path.read_bytes()[:end] + frame + section + encode_seek_table([*sizes, (len(section), 0)]))
    assert path.stat().st_size < 200 << 10


@pytest.mark.parametrize("raw_bytes", [LARGEST, GIB])
def test_a_frame_of_gigabytes_is_not_expanded(tmp_path: Path, raw_bytes: int) -> None:
    """One longer than a batch may be, and one that is no batch: only a batch has a frame of more than about a MiB."""
    root = tmp_path / "log"
    built = Built(root)
    built.lines("a", [b"one", b"two"])
    built.cut()
    built.seal()
    path = built.path(1, Kind.SEALED)
    plant(path, raw_bytes)

    for arguments in (("dump", path), ("verify", "--root", root), ("read", "a", "--root", root)):
        _, told, memory = memory_of(*arguments)
        assert "Traceback" not in told
        assert memory < MEMORY_MAX_BYTES, arguments
        assert "claims" in told or arguments[0] == "read", told

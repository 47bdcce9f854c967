"""Reader of a bundle: parts from the tar, each checked against its index; at most one part in memory.

A bundle is not trusted. A file in it is read only if its header agrees with the manifest. The only accepted pax header,
which could otherwise have any length, is one with a long file name.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from wald.format.batch import Buffer
from wald_archive.bundle import ABOUT, ABOUT_MAX_BYTES, BLOCK_BYTES, RECORD_BYTES, Contents
from wald_archive.codecs import BadStream
from wald_archive.parts import (
    INDEX_LINE_MAX_BYTES,
    BadIndex,
    Form,
    IndexEntry,
    Part,
    PartFacts,
    index_name,
    parse_index_entry,
    part_name,
)

_PAX_PATH = re.compile(rb"([0-9]{1,3}) path=([^\n]+)\n")
_END_BYTES = 2 * BLOCK_BYTES


class BadBundle(ValueError):
    """The tar is not a bundle, or its records are not those of its indexes."""


@dataclass(slots=True)
class BundleReader:
    """Parts of the bundle ``stem``, in order; afterwards :attr:`about` is its ``bundle.json``."""

    stem: str
    contents: Contents  # according to the manifest
    tar: Iterator[Buffer]  # decompressed, and read to its end
    about: bytes = field(default=b"", init=False)

    def parts(self) -> Iterator[Part]:
        """Yield the parts; raise BadBundle if the tar is unreadable, or differs from its indexes or the manifest."""
        tar = _Tar(self.stem, self.tar)
        last = 0
        try:
            for facts in self.contents.parts:
                index = index_name(facts.first)
                runs = _runs(index, tar.file(index, most=INDEX_LINE_MAX_BYTES * min(facts.count, facts.bytes)))
                records = f"records/{facts.part}"
                part = _part(records, facts, tar.file(records, most=facts.bytes), runs)
                if part.first <= last:
                    raise BadBundle(f"{records}: record {part.first} comes after record {last}")
                last = part.last
                yield part
            self.about = tar.file(ABOUT, most=ABOUT_MAX_BYTES + ABOUT_MAX_BYTES * len(self.contents.parts))
            tar.end()
        except BadStream as error:
            raise BadBundle(str(error)) from error


def _runs(member: str, data: bytes) -> list[IndexEntry]:
    try:
        return [parse_index_entry(line) for line in data.removesuffix(b"\n").split(b"\n")]
    except BadIndex as error:
        raise BadBundle(f"{member}: {error}") from error


def _part(member: str, facts: PartFacts, data: bytes, runs: list[IndexEntry]) -> Part:
    name = facts.part
    form = Form.LINES if name.endswith(Form.LINES.value) else Form.OBJECTS
    offset, sequence = 0, runs[0].first
    for run in runs:
        end = run.offset + run.bytes
        records = data.count(b"\n", run.offset, end)
        if run.part != name or run.offset != offset or run.first < sequence or records != run.count:
            raise BadBundle(f"{member}: offset {offset}: {records} records, not as its index says")
        if not records or data[end - 1 : end] != b"\n":
            raise BadBundle(f"{member}: offset {end}: no record ends here")
        offset, sequence = end, run.last + 1
    if offset != len(data) or name != part_name(runs[0].first, form.value):
        raise BadBundle(f"{member}: {len(data)} bytes, not the {offset} of its index")
    part = Part(form, runs[0].first, [data], runs)
    if part.facts != facts:
        raise BadBundle(f"{member}: {part.count} records, {part.first} to {part.last}, not as the manifest says")
    return part


class _Tar:
    """Files of a tar in the folder ``stem``, in order."""

    def __init__(self, stem: str, chunks: Iterator[Buffer]) -> None:
        self._stem = stem
        self._chunks = chunks
        self._left = memoryview(b"")

    def file(self, name: str, *, most: int) -> bytes:
        """Return the content of the next file; raise BadBundle unless it is ``name`` with at most ``most`` bytes."""
        header = self._header(name)
        there = header.name
        if header.type == tarfile.XHDTYPE:
            there = self._long_name(header.size)
            header = self._header(name)
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise BadBundle(f"{there}: not a plain file")
        if there != f"{self._stem}/{name}":
            raise BadBundle(f"{there}: expected {name} here")
        if not 0 <= header.size <= most:
            raise BadBundle(f"{name}: {header.size} bytes, but the manifest allows at most {most}")
        data = self._read(header.size)
        self._read(-header.size % BLOCK_BYTES)
        return data

    def end(self) -> None:
        """Read to the end; raise BadBundle if more follows than the zeros at the end of a tar."""
        room = _END_BYTES + RECORD_BYTES
        while len(self._left) <= room and not any(self._left):
            room -= len(self._left)
            chunk = next(self._chunks, None)
            if chunk is None:
                return
            self._left = memoryview(chunk)
        raise BadBundle("it continues after its end")

    def _header(self, name: str) -> tarfile.TarInfo:
        block = self._read(BLOCK_BYTES)
        if not any(block):
            raise BadBundle(f"it ends without {name}")
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeError) as error:
            raise BadBundle(str(error)) from error

    def _long_name(self, size: int) -> str:
        """Return the path in a pax header of ``size`` bytes, which must have nothing else."""
        record = self._read(BLOCK_BYTES)[:size] if 0 <= size <= BLOCK_BYTES else b""
        match = _PAX_PATH.fullmatch(record)
        if match is None or int(match[1]) != size:
            raise BadBundle(f"a pax header of {size} bytes that is not just a path")
        return match[2].decode(errors="replace")

    def _read(self, count: int) -> bytes:
        pieces: list[memoryview] = []
        while count:
            if not self._left:
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise BadBundle("it ends within a file")
                self._left = memoryview(chunk)
            pieces.append(self._left[:count])
            self._left = self._left[count:]
            count -= len(pieces[-1])
        return b"".join(pieces)

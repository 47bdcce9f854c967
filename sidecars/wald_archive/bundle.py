"""Creation of a bundle: batches in; out come the bytes of a compressed tar, and facts about them.

    <route>-<first>/batches/<first of part>.jsonl      the contents of the part, run by run
    <route>-<first>/records/<first of part>.txt        or .jsonl: the records (wald_archive.parts)
    …                                                  further parts
    <route>-<first>/bundle.json                        facts about the whole

The tar is a pure function of the records, of the software and of the time of packing: names in order of sequence,
owner 0, mode 0644, and the append time of a part's first record as its time. It is compressed in independent frames,
which are made in parallel.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from wald.format.batch import Buffer
from wald.format.times import utc
from wald.reading.assembler import Batch
from wald_archive.codecs import FRAME_BYTES, Codec, in_order
from wald_archive.objects import bundle_stem
from wald_archive.parts import IndexEntry, Part, PartFacts, content_bytes, index_name, parts, records_name

FORMAT_VERSION = 1
ABOUT = "bundle.json"
ABOUT_MAX_BYTES = 4096  # of bundle.json, and the same again for each part
BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES  # tar ends at a multiple of this
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Origin:
    """The log, route and group of the records, and the software that packs them; the same for a whole run."""

    log: str  # id of the log, 32 hexadecimal digits
    route: str
    group: str
    software: str
    archived_at: str  # ISO time, written into the archive


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a bundle, without its compression."""

    first: int
    last: int
    after: int  # every record of the route after this sequence, up to ``last``, is in it
    count: int
    record_bytes: int  # bytes of values, keys and headers, plus one for each record
    earliest_ns: int
    latest_ns: int
    parts: tuple[PartFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        parts, earliest_ns, latest_ns = (fields.pop(name) for name in ("parts", "earliest_ns", "latest_ns"))
        times = {"earliest": utc(earliest_ns, 9), "earliest_ns": earliest_ns}
        times |= {"latest": utc(latest_ns, 9), "latest_ns": latest_ns}
        return fields | times | {"parts": list(parts)}


@dataclass(frozen=True, slots=True)
class Bundle:
    """Finished bundle.

    Attributes:
        bytes, sha256: size and digest of the file; ``tar_sha256``: digest of the tar in it.
        runs: lengths of the runs of sequences after ``after`` that are absent, present, and so on in turn.
        frames: size of each compressed frame in the file and in the tar.
    """

    name: str
    contents: Contents
    bytes: int
    sha256: str
    tar_sha256: str
    runs: array[int] = field(default_factory=lambda: array("Q"), compare=False, repr=False)
    frames: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)


def about(origin: Origin, contents: Contents) -> bytes:
    """Return ``bundle.json``, the last file in the tar."""
    fields = {"format": FORMAT_VERSION, "bundle": bundle_stem(origin.route, contents.first)}
    return json.dumps(fields | asdict(origin) | contents.to_dict(), indent=2).encode() + b"\n"


def bundle(
    batches: Iterable[Batch], *, origin: Origin, codec: Codec, after: int, sink: Callable[[Buffer], object]
) -> Bundle:
    """Pack all of ``batches``, at least one; every later record of the route than ``after`` is in them."""
    tally, stored, tar = Tally(after), hashlib.sha256(), hashlib.sha256()
    frames: list[tuple[int, int]] = []

    def contents_of_tar() -> Iterator[memoryview]:
        for frame in _frames(batches, origin, tally):
            tar.update(frame)
            yield frame

    for frame, length in in_order(lambda piece: (codec.compress(piece), len(piece)), contents_of_tar()):
        stored.update(frame)
        frames.append((len(frame), length))
        sink(frame)
    contents = tally.contents()
    name = bundle_stem(origin.route, contents.first) + codec.suffix
    stored_bytes = sum(length for length, _ in frames)
    return Bundle(name, contents, stored_bytes, stored.hexdigest(), tar.hexdigest(), tally.runs, tuple(frames))


def _frames(batches: Iterable[Batch], origin: Origin, tally: Tally) -> Iterator[memoryview]:
    """Yield the tar in pieces."""

    def counted() -> Iterator[Batch]:
        for batch in batches:
            tally.record_bytes += content_bytes(batch)
            yield batch

    folder, tar_bytes = "", 0
    for part in parts(counted()):
        folder = folder or bundle_stem(origin.route, part.first)
        tally.add(part)
        index = _member(f"{folder}/{index_name(part.first)}", part.runs[0], [part.index()])
        data = b"".join([*index, *_member(records_name(folder, part.name), part.runs[0], part.data)])
        tar_bytes += len(data)
        yield from _pieces(data)
    last = b"".join(_member(f"{folder}/{ABOUT}", part.runs[-1], [about(origin, tally.contents())]))
    end = tar_bytes + len(last) + 2 * BLOCK_BYTES
    yield from _pieces(last + bytes(2 * BLOCK_BYTES + -end % RECORD_BYTES))


def _pieces(data: bytes) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))


def _member(name: str, run: IndexEntry, data: list[Any]) -> list[Any]:
    """Return a file in the tar: header, content, and zeros up to a block. ``Any``: all that bytes.join accepts."""
    info = tarfile.TarInfo(name)
    info.size = sum(map(len, data))
    info.mtime = run.append_time_ns // _SECOND_NS
    info.mode = 0o644
    return [info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"), *data, bytes(-info.size % BLOCK_BYTES)]


@dataclass(slots=True)
class Tally:
    """Sums over the parts of a bundle after record ``after`` that is written or read."""

    after: int
    runs: array[int] = field(default_factory=lambda: array("Q"))
    parts: list[PartFacts] = field(default_factory=list)
    record_bytes: int = 0
    earliest_ns: int = 0
    latest_ns: int = 0

    def add(self, part: Part) -> None:
        at = self.parts[-1].last if self.parts else self.after
        if not self.parts:
            self.earliest_ns = part.runs[0].append_time_ns
        self.latest_ns = part.runs[-1].append_time_ns
        self.parts.append(part.facts)
        for run in part.runs:
            if self.runs and run.first == at + 1:
                self.runs[-1] += run.count
            else:
                self.runs.extend((run.first - at - 1, run.count))
            at = run.last

    def contents(self) -> Contents:
        first, last, count = self.parts[0].first, self.parts[-1].last, sum(part.count for part in self.parts)
        return Contents(
            first, last, self.after, count, self.record_bytes, self.earliest_ns, self.latest_ns, tuple(self.parts)
        )

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
from wald_archive.layout import bundle_stem, records_name
from wald_archive.parts import Part, PartFacts, content_bytes, parts

FORMAT_VERSION = 1
ABOUT = "bundle.json"
ABOUT_MAX_BYTES = 4096  # of bundle.json, and the same again for each part
BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES  # tar ends at a multiple of this
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Origin:
    """The log, route and group of the records, and the software that packs them; the same for a whole run.

    Attributes:
        log: id of the log, 32 hexadecimal digits.
        archived_at: ISO time, written into the archive.
    """

    log: str
    route: str
    group: str
    software: str
    archived_at: str


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a bundle, without its compression.

    Attributes:
        after: every record of the route after this sequence, up to ``last``, is in it.
        record_bytes: bytes of values, keys and headers, plus one for each record.
    """

    first: int
    last: int
    after: int
    count: int
    record_bytes: int
    earliest_ns: int
    latest_ns: int
    parts: tuple[PartFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            "after": self.after,
            "count": self.count,
            "record_bytes": self.record_bytes,
            "earliest": utc(self.earliest_ns, 9),
            "earliest_ns": self.earliest_ns,
            "latest": utc(self.latest_ns, 9),
            "latest_ns": self.latest_ns,
            "parts": [asdict(part) for part in self.parts],
        }


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
    """Pack all of ``batches``, at least one, into one bundle.

    Args:
        after: last sequence of the previous bundle; every later record of the route is in ``batches``.
        sink: receives the bytes of the file in order.
    """
    tar = _Tar(origin, after)
    digest = hashlib.sha256()
    frames: list[tuple[int, int]] = []
    for frame, length in in_order(lambda piece: (codec.compress(piece), len(piece)), tar.frames(batches)):
        digest.update(frame)
        frames.append((len(frame), length))
        sink(frame)
    contents = tar.tally.contents(after)
    name = bundle_stem(origin.route, contents.first) + codec.suffix
    stored_bytes = sum(length for length, _ in frames)
    return Bundle(
        name, contents, stored_bytes, digest.hexdigest(), tar.digest.hexdigest(), tar.tally.runs, tuple(frames)
    )


class _Tar:
    """Tar in pieces, and its digest."""

    def __init__(self, origin: Origin, after: int) -> None:
        self.digest = hashlib.sha256()
        self.tally = Tally(after)
        self._after = after
        self._origin = origin
        self._bytes = 0

    def frames(self, batches: Iterable[Batch]) -> Iterator[memoryview]:
        folder = ""
        for part in parts(self._counted(batches)):
            folder = folder or bundle_stem(self._origin.route, part.first)
            self.tally.add(part)
            seconds = part.earliest_ns // _SECOND_NS
            yield from self._frames(
                *_member(f"{folder}/batches/{part.index_name}", seconds, [part.index()]),
                *_member(records_name(folder, part.name), seconds, part.data),
            )
        contents = self.tally.contents(self._after)
        seconds = contents.latest_ns // _SECOND_NS
        last = b"".join(_member(f"{folder}/{ABOUT}", seconds, [about(self._origin, contents)]))
        end = self._bytes + len(last) + 2 * BLOCK_BYTES
        yield from self._frames(last, bytes(2 * BLOCK_BYTES + -end % RECORD_BYTES))

    def _counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.tally.record_bytes += content_bytes(batch)
            yield batch

    def _frames(self, *pieces: Buffer) -> Iterator[memoryview]:
        data = memoryview(b"".join(pieces))
        self._bytes += len(data)
        for start in range(0, len(data), FRAME_BYTES):
            frame = data[start : start + FRAME_BYTES]
            self.digest.update(frame)
            yield frame


@dataclass(slots=True)
class Tally:
    """Sums over the parts of a bundle that is written or read."""

    at: int
    runs: array[int] = field(default_factory=lambda: array("Q"))
    parts: list[PartFacts] = field(default_factory=list)
    record_bytes: int = 0
    earliest_ns: int = 0
    latest_ns: int = 0

    def add(self, part: Part) -> None:
        if not self.parts:
            self.earliest_ns = part.earliest_ns
        self.latest_ns = part.latest_ns
        self.parts.append(part.facts)
        for run in part.runs:
            if self.runs and run.first == self.at + 1:
                self.runs[-1] += run.count
            else:
                self.runs.extend((run.first - self.at - 1, run.count))
            self.at = run.last

    def contents(self, after: int) -> Contents:
        return Contents(
            first=self.parts[0].first,
            last=self.parts[-1].last,
            after=after,
            count=sum(part.count for part in self.parts),
            record_bytes=self.record_bytes,
            earliest_ns=self.earliest_ns,
            latest_ns=self.latest_ns,
            parts=tuple(self.parts),
        )


def _member(name: str, seconds: int, data: list[Any]) -> list[Any]:
    """Return a file in the tar: header, content, and zeros up to a block. ``Any``: all that bytes.join accepts."""
    info = tarfile.TarInfo(name)
    info.size = sum(map(len, data))
    info.mtime = seconds
    info.mode = 0o644
    return [info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"), *data, bytes(-info.size % BLOCK_BYTES)]

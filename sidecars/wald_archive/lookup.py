"""Records of an archive, in the order of their sequences: those of a route, or one.

A bundle is read twice: for its digest and, if that is right, for its records. Bundles outside the requested
range are not read. A bundle is not trusted: each part is checked against its index, with at most one part in memory,
and a file in it is read only if its header agrees with the manifest. The only accepted pax header, which could
otherwise have any length, is one with a long file name.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald.format.batch import Buffer, Encoding
from wald.format.records import Record, encode_columns, record_from_json
from wald_archive.bundle import (
    ABOUT,
    ABOUT_MAX_BYTES,
    BLOCK_BYTES,
    INDEX_LINE_MAX_BYTES,
    RECORD_BYTES,
    BadIndex,
    Bundle,
    Contents,
    Form,
    IndexEntry,
    Part,
    PartFacts,
    index_name,
    parse_index_entry,
    part_name,
)
from wald_archive.codecs import BadStream, Codec, ahead
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, decode_manifest
from wald_archive.objects import MANIFEST, PAYLOAD, BagName, Destination, bundle_stem, open_destination, parse_bag_name

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
            raise BadBundle(f"{member}: offset {offset}: {records} records, but its index says otherwise")
        if not records or data[end - 1 : end] != b"\n":
            raise BadBundle(f"{member}: offset {end}: no record ends here")
        offset, sequence = end, run.last + 1
    if offset != len(data) or name != part_name(runs[0].first, form.value):
        raise BadBundle(f"{member}: {len(data)} bytes, not the {offset} of its index")
    part = Part(form, runs[0].first, [data], runs)
    if part.facts != facts:
        raise BadBundle(f"{member}: {part.count} records, {part.first} to {part.last}, but the manifest says otherwise")
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


@dataclass(frozen=True, slots=True)
class Run:
    """Records ``first`` to ``last`` of one stored batch; ``data`` has a line per record, in the format of its part."""

    address: str
    route: str
    first: int
    last: int
    append_time_ns: int
    form: Form
    data: bytes
    terminated: bool

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def between(self, first: int, last: int) -> Run | None:
        begin, end = max(first, self.first), min(last, self.last)
        if begin > end or (begin, end) == (self.first, self.last):
            return None if begin > end else self
        lines = self.data.split(b"\n")[begin - self.first : end - self.first + 1]
        data, terminated = b"\n".join([*lines, b""]), self.terminated or end < self.last
        return replace(self, first=begin, last=end, data=data, terminated=terminated)

    def records(self) -> list[Record]:
        """Decode the records; raise Damaged if they are not the expected ones."""
        lines = self.data.removesuffix(b"\n").split(b"\n")
        if self.form is Form.LINES:
            ends = (self.terminated or sequence < self.last for sequence in range(self.first, self.last + 1))
            return [
                Record(self.route, sequence, line, self.append_time_ns, terminated=terminated)
                for sequence, (line, terminated) in enumerate(zip(lines, ends, strict=True), self.first)
            ]
        try:
            records = [record_from_json(line) for line in lines]
        except ValueError as error:
            raise self._damaged(str(error)) from error
        found = [(record.route, record.sequence) for record in records]
        if found != [(self.route, sequence) for sequence in range(self.first, self.last + 1)]:
            raise self._damaged("they are not the records that the index names")
        return records

    def lines(self, *, as_json: bool) -> bytes:
        """Return one line per record, as ``wald read`` prints it."""
        if as_json == (self.form is Form.OBJECTS):
            return self.data
        if as_json:
            return "".join(record.to_json() + "\n" for record in self.records()).encode()
        return b"".join(record.value + b"\n" for record in self.records())

    def payload(self) -> tuple[Encoding, bytes]:
        if self.form is Form.LINES:
            return Encoding.LINES, self.data if self.terminated else self.data[:-1]
        records = self.records()
        times = [record.event_time_ns for record in records if record.event_time_ns is not None]
        if times and len(times) < len(records):
            raise self._damaged("some of them have an event time, and others have none")
        keys, headers = [record.key for record in records], [record.headers for record in records]
        return Encoding.COLUMNS, encode_columns(
            [record.value for record in records],
            keys=keys if any(key is not None for key in keys) else None,
            times_ns=times or None,
            headers=headers if any(each is not None for each in headers) else None,
        )

    def _damaged(self, message: str) -> Damaged:
        return Damaged(
            f"{self.address}: route {self.route}, records {self.first} to {self.last}: {message}",
            hint=f"wald-archive verify {self.address} lists all damage",
        )


def find_record(address: str, route: str | None, sequence: int) -> Record | None:
    """Return a record from the archive, or None; ``wald show`` calls this. ``route`` None: search every route."""
    destination = open_destination(address, Disk())
    for name in [route] if route is not None else destination.listing("").folders:
        for manifest, entry in bundles_of(destination, name):
            if any(part.first <= sequence <= part.last for part in entry.bundle.contents.parts):
                bag, codec = manifest.bag, manifest.codec
                for run in checked_runs(destination, bag, codec, entry.bundle, sequence, sequence):
                    return run.records()[0]
    return None


def runs_of(destination: Destination, route: str, first: int, last: int | None) -> Iterator[Run]:
    """Yield the records ``first`` to ``last`` (None for the end) of ``route``; raise Damaged if some are missing."""
    at = 0  # end of the previous bundles
    for manifest, entry in require_bundles(destination, route):
        contents = entry.bundle.contents
        known = max(at, first - 1)
        if last is not None and known >= last:
            return
        if contents.after > known and (at or entry.previous):
            name = destination.full_name(f"{manifest.bag}/{PAYLOAD}/{entry.bundle.name}")
            raise Damaged(
                f"{name}: begins after record {contents.after}, and no bundle has the records after record {known}",
                hint=f"wald-archive verify {destination.address}; --from {contents.after + 1} leaves out lost records",
            )
        if last is not None and contents.first > last:
            return
        if contents.last > known:
            end = contents.last if last is None else last
            yield from checked_runs(destination, manifest.bag, manifest.codec, entry.bundle, known + 1, end)
        at = max(at, contents.last)


def bundles_of(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """Return the bundles of a route by first record; two groups may have archived the same records."""
    found = []
    for bag in filter(None, (parse_bag_name(route, folder) for folder in destination.listing(route).folders)):
        name = f"{bag}/{MANIFEST}"
        try:
            manifest = decode_manifest(b"".join(destination.read(name)))
        except FileNotFoundError:
            continue  # an interrupted run, which has acknowledged nothing
        except BadManifest as error:
            raise _damaged(destination, name, str(error)) from error
        found += [(manifest, entry) for entry in manifest.entries]
    return sorted(found, key=lambda each: (each[1].bundle.contents.first, -each[1].bundle.contents.last))


def require_bundles(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    found = bundles_of(destination, route)
    if not found:
        raise NotFound(
            f"{destination.address}: there is no route {route!r} here",
            hint=f"wald-archive restore DEST ROUTE; here: {', '.join(destination.listing('').folders) or 'none'}",
        )
    return found


def checked_runs(
    destination: Destination, bag: BagName, codec: Codec, bundle: Bundle, first: int, last: int
) -> Iterator[Run]:
    """Yield the records of a bundle from ``first`` to ``last`` after checking the digest of the whole file."""
    name = f"{bag}/{PAYLOAD}/{bundle.name}"
    digest = hashlib.sha256()
    try:
        for chunk in destination.read(name):
            digest.update(chunk)
        if digest.hexdigest() != bundle.sha256:
            raise _damaged(destination, name, f"its sha256 is not {bundle.sha256}")
        stem, tar = bundle_stem(bag.route, bundle.contents.first), ahead(codec.decompress(destination.read(name)))
        for part in BundleReader(stem, bundle.contents, tar).parts():
            for each in part.runs:
                if each.first <= last and each.last >= first:
                    data = bytes(part.data[0][each.offset : each.offset + each.bytes])
                    start = destination.address, bag.route, each.first, each.last, each.append_time_ns
                    if (run := Run(*start, part.form, data, each.terminated).between(first, last)) is not None:
                        yield run
    except FileNotFoundError:
        raise _damaged(destination, name, "missing") from None
    except BadBundle as error:
        raise _damaged(destination, name, str(error)) from error


def _damaged(destination: Destination, name: str, message: str) -> Damaged:
    hint = f"wald-archive verify {destination.address} lists all damage"
    return Damaged(f"{destination.full_name(name)}: {message}", hint=hint)

"""Records of an archive, in the order of their sequences: those of a route, or one.

A bundle is read twice: once for its digest, and only if that is right for its records. Bundles outside the requested
range are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald.format.batch import Encoding
from wald.format.records import Record, encode_columns, record_from_json
from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec, ahead
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, decode_manifest
from wald_archive.objects import MANIFEST, PAYLOAD, BagName, Destination, bundle_stem, open_destination, parse_bag_name
from wald_archive.parts import Form
from wald_archive.reader import BadBundle, BundleReader


@dataclass(frozen=True, slots=True)
class Run:
    """Records ``first`` to ``last`` of one stored batch; ``data`` has a line for each, in the form of its part."""

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
        """Return the records from ``first`` to ``last``, or None."""
        begin, end = max(first, self.first), min(last, self.last)
        if begin > end or (begin, end) == (self.first, self.last):
            return None if begin > end else self
        lines = self.data.split(b"\n")[begin - self.first : end - self.first + 1]
        data, terminated = b"\n".join([*lines, b""]), self.terminated or end < self.last
        return replace(self, first=begin, last=end, data=data, terminated=terminated)

    def records(self) -> list[Record]:
        """Decode the records; raise Damaged if the data has others."""
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
        """Return a line for each record, as ``wald read`` prints it."""
        if as_json == (self.form is Form.OBJECTS):
            return self.data
        if as_json:
            return "".join(record.to_json() + "\n" for record in self.records()).encode()
        return b"".join(record.value + b"\n" for record in self.records())

    def payload(self) -> tuple[Encoding, bytes]:
        """Return the records as a log stores them."""
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
            continue  # an interrupted run, of which nothing is acknowledged
        except BadManifest as error:
            raise _damaged(destination, name, str(error)) from error
        found += [(manifest, entry) for entry in manifest.entries]
    return sorted(found, key=lambda each: (each[1].bundle.contents.first, -each[1].bundle.contents.last))


def require_bundles(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """Return :func:`bundles_of`; raise NotFound if the result is empty."""
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

"""Records out of an archive again: the same bytes as ``wald read`` gives from the log.

A bundle is read twice: once for its digest, and only if that is right for its records. Bundles that hold nothing that
is asked for are not read at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wald.errors import Damaged, NotFound
from wald.format.records import Record
from wald_archive.bundle import Bundle
from wald_archive.bundle_reader import BadBundle, BundleReader
from wald_archive.codecs import Codec, ahead
from wald_archive.destination import Destination
from wald_archive.layout import MANIFEST, PAYLOAD, BagName, bundle_stem, parse_bag_name
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, decode_manifest
from wald_archive.parts import Form, IndexEntry, Part


@dataclass(frozen=True, slots=True)
class Restored:
    """Consecutive records, encoded, up to sequence ``last``."""

    data: bytes
    last: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive records from one stored batch, as their bundle holds them."""

    form: Form
    data: bytes
    entry: IndexEntry


def restore(destination: Destination, route: str, first: int, last: int | None, *, as_json: bool) -> Iterator[Restored]:
    """The records of ``route`` numbered ``first`` to ``last`` (None: to the end), in order.

    Raises:
        As :func:`runs_of`.
    """
    for run in runs_of(destination, route, first, last):
        yield Restored(_encode(route, run.form, run.data, run.entry, as_json=as_json), run.entry.last)


def runs_of(destination: Destination, route: str, first: int, last: int | None) -> Iterator[Run]:
    """The same records, as they are archived.

    Raises:
        NotFound: the route is not in the archive.
        Damaged: a manifest or a bundle is not as it was written, or records between two bundles are missing.
        OSError: the destination cannot be read.
    """
    at = 0  # the bundles so far reach up to here
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
        if contents.last <= known:
            at = max(at, contents.last)
            continue
        if last is not None and contents.first > last:
            return
        for part in checked_parts(destination, manifest.bag, manifest.codec, entry.bundle):
            for run in part.runs:
                wanted = _cut(part, run, max(first, at + 1), last)
                if wanted is not None:
                    yield Run(part.form, *wanted)
        at = contents.last


def span(destination: Destination, route: str) -> tuple[int, int]:
    """The first and the last record there is of a route.

    Raises:
        NotFound: there is none.
        Damaged: a manifest cannot be read.
    """
    entries = [entry.bundle.contents for _, entry in require_bundles(destination, route)]
    return entries[0].first, max(contents.last for contents in entries)


def bundles_of(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """Every bundle of a route, by its first record; two groups may have archived the same ones.

    Raises:
        Damaged: a manifest cannot be read.
    """
    bags = [parse_bag_name(route, folder) for folder in destination.listing(route).folders]
    found = []
    for bag in bags:
        if bag is None:
            continue
        name = f"{bag}/{MANIFEST}"
        try:
            manifest = decode_manifest(b"".join(destination.read(name)))
        except FileNotFoundError:
            continue  # a run that was interrupted; what it has made is not acknowledged
        except BadManifest as error:
            raise _damaged(destination, name, str(error)) from error
        found += [(manifest, entry) for entry in manifest.entries]
    return sorted(found, key=lambda each: (each[1].bundle.contents.first, -each[1].bundle.contents.last))


def require_bundles(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """As :func:`bundles_of`.

    Raises:
        NotFound: there is none.
        Damaged: a manifest cannot be read.
    """
    found = bundles_of(destination, route)
    if not found:
        raise NotFound(
            f"{destination.address}: there is no route {route!r} here",
            hint=f"wald-archive restore DEST ROUTE; here: {', '.join(destination.listing('').folders) or 'none'}",
        )
    return found


def checked_parts(destination: Destination, bag: BagName, codec: Codec, bundle: Bundle) -> Iterator[Part]:
    """The parts of a bundle; none comes out before the digest of the whole file was found right.

    Raises:
        Damaged: it is missing, or not as it was written.
    """
    name = f"{bag}/{PAYLOAD}/{bundle.name}"
    digest = hashlib.sha256()
    try:
        for chunk in destination.read(name):
            digest.update(chunk)
        if digest.hexdigest() != bundle.sha256:
            raise _damaged(destination, name, f"its sha256 is not {bundle.sha256}")
        stem = bundle_stem(bag.route, bundle.contents.first)
        yield from BundleReader(stem, bundle.contents, ahead(codec.decompress(destination.read(name)))).parts()
    except FileNotFoundError:
        raise _damaged(destination, name, "missing") from None
    except BadBundle as error:
        raise _damaged(destination, name, str(error)) from error


def _cut(part: Part, run: IndexEntry, first: int, last: int | None) -> tuple[bytes, IndexEntry] | None:
    """The records of a run that are wanted; None if none is."""
    begin, end = max(first, run.first), run.last if last is None else min(last, run.last)
    if begin > end:
        return None
    data = bytes(part.data[0][run.offset : run.offset + run.bytes])
    if (begin, end) == (run.first, run.last):
        return data, run
    lines = data.split(b"\n")[begin - run.first : end - run.first + 1]
    terminated = run.terminated or end < run.last
    cut = IndexEntry(run.part, run.offset, run.bytes, begin, end - begin + 1, run.append_time_ns, terminated)
    return b"".join(line + b"\n" for line in lines), cut


def _encode(route: str, form: Form, data: bytes, run: IndexEntry, *, as_json: bool) -> bytes:
    if as_json == (form is Form.OBJECTS):
        return data
    lines = data.removesuffix(b"\n").split(b"\n")
    if not as_json:
        return b"".join(_value(line) + b"\n" for line in lines)
    records = (
        Record(route, number, line, run.append_time_ns, terminated=run.terminated or number < run.last)
        for number, line in enumerate(lines, start=run.first)
    )
    return "".join(record.to_json() + "\n" for record in records).encode()


def _value(line: bytes) -> bytes:
    fields: dict[str, Any] = json.loads(line)  # Any: it is JSON
    return str(fields["value"]).encode() if "value" in fields else bytes.fromhex(fields["value_hex"])


def _damaged(destination: Destination, name: str, message: str) -> Damaged:
    return Damaged(
        f"{destination.full_name(name)}: {message}",
        hint=f"wald-archive verify {destination.address} lists all damage",
    )

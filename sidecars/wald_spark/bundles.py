"""Archived bundles as pieces: planned by the manifests, read as Arrow part by part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.format.batch import BatchHeader, Encoding
from wald.format.names import is_route
from wald.reading.arrow import record_batches, schema_of
from wald.reading.assembler import Batch
from wald_archive.api import (
    BagName,
    Bundle,
    BundleEntry,
    Codec,
    Form,
    IndexEntry,
    Part,
    bundles_of,
    checked_parts,
    open_destination,
)
from wald_spark.damage import PARTIAL_HINT, STRICT, DamageReport, Tolerance
from wald_spark.locations import ArchiveLocation

_ALWAYS = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class BundlePiece:
    """Records ``first`` to ``last`` of one bundle, appended at ``from_ns`` ≤ t < ``until_ns``."""

    location: ArchiveLocation
    log: str
    bag: BagName
    codec: Codec
    bundle: Bundle
    first: int
    last: int
    from_ns: int
    until_ns: int
    tolerance: Tolerance = STRICT

    @property
    def raw_bytes(self) -> int:
        return self.bundle.contents.record_bytes

    @property
    def name(self) -> str:
        """A name that no other piece of the archive has."""
        return f"{self.log}-{str(self.bag).replace('/', '-')}-{self.bundle.name}"

    def arrow(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records as :func:`record_batches` gives them; the segment is 0, because bundles do not have it.

        Raises:
            Damaged: the bundle is not as it was written, and that is not tolerated.
        """
        destination = open_destination(self.location.address, Disk())
        with closing(DamageReport(self.tolerance, self.name)) as damage:
            try:
                for part in checked_parts(destination, self.bag, self.codec, self.bundle):
                    runs = [run for run in part.runs if self._wants(run)]
                    if part.form is Form.LINES:
                        yield from record_batches(self._batches(part, runs), columns)
                    elif runs:
                        yield self._objects(part, runs, columns)
            except Damaged as error:
                damage.add(error)

    def _wants(self, run: IndexEntry) -> bool:
        return run.first <= self.last and run.last >= self.first and self.from_ns <= run.append_time_ns < self.until_ns

    def _batches(self, part: Part, runs: Sequence[IndexEntry]) -> Iterator[Batch]:
        data = memoryview(part.data[0])
        for run in runs:
            header = BatchHeader(0, run.bytes, run.first, run.append_time_ns, 0, 0, run.count, 0, Encoding.LINES, 0, 0)
            payload = data[run.offset : run.offset + run.bytes]  # it ends in a newline even if the record did not
            batch = Batch(self.bag.route, run.first, run.last, payload, True, header, 0, 0)
            wanted = batch.between(self.first, self.last)
            assert wanted is not None, "_wants has been asked"
            yield wanted

    def _objects(self, part: Part, runs: Sequence[IndexEntry], columns: Sequence[str]) -> pa.RecordBatch:
        """Keyed, timed and binary records, which are JSON in a bundle, one by one."""
        data = bytes(part.data[0])
        lines = (line for run in runs for line in data[run.offset : run.offset + run.bytes].splitlines())
        records = [record for record in map(json.loads, lines) if self.first <= record["sequence"] <= self.last]
        values: dict[str, list[Any]] = {
            "sequence": [record["sequence"] for record in records],
            "route": [record["route"] for record in records],
            "append_time": [record["append_time_ns"] for record in records],
            "event_time": [record.get("event_time_ns") for record in records],
            "key": [_bytes(record, "key") for record in records],
            "value": [_bytes(record, "value") for record in records],
            "headers": [_headers(record) for record in records],
            "segment": [0] * len(records),
        }
        fields = schema_of(columns)
        arrays = [pa.array(values[field.name], field.type) for field in fields]
        return pa.RecordBatch.from_arrays(arrays, schema=fields)


def bundle_pieces(
    location: ArchiveLocation,
    routes: frozenset[str] | None,
    first: int,
    last: int,
    from_ns: int | None,
    until_ns: int | None,
    tolerance: Tolerance = STRICT,
    others: Sequence[ArchiveLocation] = (),
) -> list[BundlePiece]:
    """What has to be read of an archive; of bundles with the same records only one.

    Args:
        others: archives that may have earlier bundles.

    Raises:
        Damaged: a manifest cannot be read, or records between two bundles, or before the first bundle, are missing;
            unless that is tolerated.
    """
    destination = open_destination(location.address, Disk())
    names = [name for name in sorted(destination.listing("").folders) if is_route(name)]
    begin, end = _ALWAYS[0] if from_ns is None else from_ns, _ALWAYS[1] if until_ns is None else until_ns
    pieces: list[BundlePiece] = []
    with closing(DamageReport(tolerance, f"planning-{quote(location.address, safe='')}")) as damage:
        for route in (name for name in names if routes is None or name in routes):
            reached: dict[str, int] = {}  # the last record of the bundles so far, by log
            for manifest, entry in bundles_of(destination, route):
                contents, log = entry.bundle.contents, manifest.origin.log
                known = reached.get(log)
                if contents.after > max(known or 0, first - 1) and (known or 0) < last:
                    if known is not None:
                        damage.add(_gap(location, manifest.bag, known, contents.after))
                    elif not tolerance.partial and _has_lost_previous(entry, route, others):
                        damage.add(_beginning(location, manifest.bag, entry))
                begins, ends = max(contents.first, first, (known or 0) + 1), min(contents.last, last)
                reached[log] = max(known or 0, contents.last)
                if begins <= ends and contents.latest_ns >= begin and contents.earliest_ns < end:
                    bag, codec, bundle = manifest.bag, manifest.codec, entry.bundle
                    pieces.append(BundlePiece(location, log, bag, codec, bundle, begins, ends, begin, end, tolerance))
    return pieces


def _has_lost_previous(entry: BundleEntry, route: str, others: Sequence[ArchiveLocation]) -> bool:
    """Return True if a bundle preceded this one and is in none of ``others``."""
    found = (each for other in others for _, each in bundles_of(open_destination(other.address, Disk()), route))
    return entry.previous is not None and all(each.as_previous() != entry.previous for each in found)


def _beginning(location: ArchiveLocation, bag: BagName, entry: BundleEntry) -> Damaged:
    assert entry.previous is not None
    return Damaged(
        f"{location.address}/{bag}: begins after record {entry.bundle.contents.after}, and the bundle before it, "
        f"{entry.previous.bundle}, is missing",
        hint=PARTIAL_HINT.replace("segments", "bags"),
    )


def _gap(location: ArchiveLocation, bag: BagName, known: int, after: int) -> Damaged:
    return Damaged(
        f"{location.address}/{bag}: begins after record {after}, and no bundle has the records after record {known}",
        hint=f"wald-archive verify {location.address}",
    )


def _bytes(record: dict[str, Any], name: str) -> bytes | None:
    if name in record:
        return str(record[name]).encode()
    return bytes.fromhex(record[f"{name}_hex"]) if f"{name}_hex" in record else None


def _headers(record: dict[str, Any]) -> bytes | None:
    headers = record.get("headers")
    return json.dumps(headers, ensure_ascii=False).encode() if isinstance(headers, dict) else _bytes(record, "headers")

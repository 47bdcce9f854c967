"""``manifest.json``: the bundles of a bag and which bundle each one follows; and the files derived from it.

    {"format": 1, "log": …, "route": …, "group": …, "software": …, "archived_at": …, "codec": …,
     "after": …, "first": …, "last": …, "count": …,
     "bundles": [{"bundle": …, "first": …, "last": …, "after": …, "count": …, "record_bytes": …,
                  "earliest": …, "earliest_ns": …, "latest": …, "latest_ns": …, "parts": […],
                  "bytes": …, "sha256": …, "tar_sha256": …, "previous": {"bundle": …, "sha256": …} or null}]}

There is only one valid encoding, so any changed byte is found even if the JSON stays valid. The other files of a bag
(those of BagIt, RFC 8493, the digests, and a page to read) follow from it, so they can be compared byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from wald.format.names import is_route
from wald_archive.bundle import FORMAT_VERSION, PART_BYTES, Bundle, Contents, Origin, PartFacts
from wald_archive.codecs import Codec
from wald_archive.objects import DIGEST_SUFFIX, MANIFEST, PAYLOAD, BagName, bundle_stem, digest_line

_NUMBERS = ("first", "last", "after", "count", "record_bytes", "earliest_ns", "latest_ns")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BadManifest(ValueError):
    """Bytes that are not a manifest as wald writes it."""


@dataclass(frozen=True, slots=True)
class Previous:
    """Predecessor of a bundle, in the same bag or in the previous one."""

    bundle: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A bundle and its predecessor."""

    bundle: Bundle
    previous: Previous | None

    def to_dict(self) -> dict[str, Any]:
        bundle = self.bundle
        digests = {"bytes": bundle.bytes, "sha256": bundle.sha256, "tar_sha256": bundle.tar_sha256}
        previous = {"previous": asdict(self.previous) if self.previous else None}
        return {"bundle": bundle.name} | bundle.contents.to_dict() | digests | previous

    def as_previous(self) -> Previous:
        return Previous(self.bundle.name, self.bundle.sha256)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of the bag of one run: at least one bundle."""

    origin: Origin
    codec: Codec
    entries: tuple[BundleEntry, ...]

    @property
    def bag(self) -> BagName:
        return BagName(self.origin.route, self.first, self.last)

    @property
    def after(self) -> int:
        return self.entries[0].bundle.contents.after

    @property
    def first(self) -> int:
        return self.entries[0].bundle.contents.first

    @property
    def last(self) -> int:
        return self.entries[-1].bundle.contents.last

    @property
    def count(self) -> int:
        return sum(entry.bundle.contents.count for entry in self.entries)

    def encode(self) -> bytes:
        fields = {"format": FORMAT_VERSION} | asdict(self.origin) | {"codec": self.codec.value}
        fields |= {"after": self.after, "first": self.first, "last": self.last, "count": self.count}
        fields |= {"bundles": [entry.to_dict() for entry in self.entries]}
        return json.dumps(fields, indent=2).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest; raise BadManifest unless wald would write exactly these bytes."""
    try:
        fields: dict[str, Any] = json.loads(data)  # Any: it is JSON; every field is checked below
        if fields["format"] != FORMAT_VERSION:
            raise BadManifest(f"format {fields['format']!r} is not the {FORMAT_VERSION} this program knows")
        origin = Origin(*(_text(fields, key) for key in ("log", "route", "group", "software", "archived_at")))
        codec = Codec(fields["codec"])
        entries = tuple(_entry(bundle, origin.route, codec) for bundle in fields["bundles"])
        manifest = Manifest(origin, codec, entries)
        if not is_route(origin.route) or not entries or manifest.encode() != data:
            raise BadManifest("not as wald writes it")
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise BadManifest(f"not a manifest ({error})") from error
    return manifest


def _entry(fields: dict[str, Any], route: str, codec: Codec) -> BundleEntry:
    numbers = {name: _number(fields, name) for name in _NUMBERS}
    contents = Contents(**numbers, parts=tuple(_part(part) for part in fields["parts"]))
    name = _text(fields, "bundle")
    if name != bundle_stem(route, contents.first) + codec.suffix:
        raise BadManifest(f"{name!r} cannot be the name of a bundle from record {contents.first} on")
    previous = fields["previous"]
    return BundleEntry(
        Bundle(name, contents, _number(fields, "bytes"), _digest(fields, "sha256"), _digest(fields, "tar_sha256")),
        None if previous is None else Previous(_text(previous, "bundle"), _digest(previous, "sha256")),
    )


def _part(fields: dict[str, Any]) -> PartFacts:
    facts = PartFacts(_text(fields, "part"), *(_number(fields, key) for key in ("first", "last", "count", "bytes")))
    if facts.bytes > PART_BYTES and facts.count != 1:
        raise BadManifest(f"a part of {facts.bytes} bytes and {facts.count} records, more than a part can hold")
    return facts


def _text(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise BadManifest(f"{key} is not a text")
    return str(fields[key])


def _number(fields: dict[str, Any], key: str) -> int:
    if type(fields[key]) is not int or fields[key] < 0:
        raise BadManifest(f"{key} is not a number")
    return int(fields[key])


def _digest(fields: dict[str, Any], key: str) -> str:
    digest = _text(fields, key)
    if not _SHA256.fullmatch(digest):
        raise BadManifest(f"{key} is not a sha256")
    return digest


PAYLOAD_DIGESTS = "manifest-sha256.txt"
TAG_DIGESTS = "tagmanifest-sha256.txt"
TAGS = (MANIFEST, "README.txt", "bagit.txt", "bag-info.txt", PAYLOAD_DIGESTS, TAG_DIGESTS)
_DECLARATION = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"

_README = """\
{title}
{underline}

They are the records {first} to {last} of the log {log}, in {bundles}.
Nothing but tar, sha256sum and {program} is needed to get at them; jq helps.

Is everything as it was written?

    sha256sum -c manifest-sha256.txt tagmanifest-sha256.txt

All records as lines, each as it came:

    cd data
    for bundle in *{suffix}; do {unpack}Of "$bundle" --wildcards '*/records/*.txt'; done

Keyed, timed and binary records, if there are any, are JSON objects, one a line:

    for bundle in *{suffix}; do {unpack}Of "$bundle" --wildcards '*/records/*.jsonl'; done | jq .value

In a bundle

    records/NUMBER.txt      lines; the first one is the record with this number
    records/NUMBER.jsonl    objects: sequence (its number), route, append_time_ns (when it was taken in, nanoseconds
                            since 1970), and where there is one event_time_ns, key, headers; value. What is not text
                            is under key_hex, headers_hex, value_hex in hexadecimal.
    batches/NUMBER.jsonl    what the file of that number in records/ holds, in the order of the file: from byte
                            "offset" on, "bytes" bytes, "count" records numbered from "first" on, all taken in at
                            "append_time_ns". "terminated": false: the last of them came without a newline.
    bundle.json             the same for the bundle as a whole

Numbers count the records of all routes of a log, so those of one route have gaps.

In manifest.json

    bundles           one object a bundle: its records are "first" to "last", "count" in number, taken in from
                      "earliest" to "latest" (UTC); they are all records of the route behind "after"
    record_bytes      the bytes in the records
    bytes, sha256     of the file; tar_sha256: of the tar in it
    previous          the bundle that it follows and its sha256; null: it is the first

The records of {example}: {example_first} to {example_last}.
"""


def tag_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the files of the bag outside its payload in the order of writing: digests of digests last."""
    payload: dict[str, str] = {}
    octets = 0
    for entry in manifest.entries:
        bundle = entry.bundle
        beside = digest_line(bundle.sha256, bundle.name)
        payload[f"{PAYLOAD}/{bundle.name}"] = bundle.sha256
        payload[f"{PAYLOAD}/{bundle.name}{DIGEST_SUFFIX}"] = hashlib.sha256(beside).hexdigest()
        octets += bundle.bytes + len(beside)
    info = (
        f"Bag-Software-Agent: {manifest.origin.software}\n"
        f"Bagging-Date: {manifest.origin.archived_at[:10]}\n"
        f"External-Identifier: {manifest.origin.log}/{manifest.bag}\n"
        f"Payload-Oxum: {octets}.{len(payload)}\n"
    )
    contents = (manifest.encode(), _readme(manifest), _DECLARATION, info.encode(), _digests(payload))
    files = dict(zip(TAGS, contents, strict=False))  # the last one has the digests of these
    return files | {TAG_DIGESTS: _digests({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})}


def count_bundles(count: int) -> str:
    return "1 bundle" if count == 1 else f"{count} bundles"


def _digests(files: dict[str, str]) -> bytes:
    return b"".join(digest_line(files[name], name) for name in sorted(files))


def _readme(manifest: Manifest) -> bytes:
    origin, codec, entry = manifest.origin, manifest.codec, manifest.entries[0].bundle
    title = (
        f'{manifest.count} records of the route "{origin.route}", packed by {origin.software} on {origin.archived_at}'
    )
    return _README.format(
        title=title,
        underline="=" * len(title),
        first=manifest.first,
        last=manifest.last,
        log=origin.log,
        bundles=count_bundles(len(manifest.entries)),
        program={Codec.ZST: "zstd", Codec.GZ: "gzip", Codec.NONE: "a shell"}[codec],
        suffix=codec.suffix,
        unpack={Codec.ZST: "tar --zstd -x", Codec.GZ: "tar -xz", Codec.NONE: "tar -x"}[codec],
        example=entry.name,
        example_first=entry.contents.first,
        example_last=entry.contents.last,
    ).encode()

"""The files of a bag that are derived from its manifest: those BagIt (RFC 8493) asks for, digests, and a page to read.

They say nothing that the manifest does not say, so they can be compared byte for byte with what they should be.
"""

from __future__ import annotations

import hashlib

from wald_archive.codecs import Codec
from wald_archive.layout import DIGEST_SUFFIX, MANIFEST, PAYLOAD, digest_line
from wald_archive.manifest import Manifest

PAYLOAD_DIGESTS = "manifest-sha256.txt"
TAG_DIGESTS = "tagmanifest-sha256.txt"
TAGS = (MANIFEST, "README.txt", "bagit.txt", "bag-info.txt", PAYLOAD_DIGESTS, TAG_DIGESTS)
_DECLARATION = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
_UNPACK = {Codec.ZST: "tar --zstd -x", Codec.GZ: "tar -xz", Codec.NONE: "tar -x"}

_README = """\
{count} records of the route "{route}", packed by {software} on {archived_at}
{underline}

They are the records {first} to {last} of the log {log}, in {bundles}.
Nothing but tar, sha256sum and {program} is needed to get at them; jq helps.

Is everything as it was written?

    sha256sum -c {payload_digests} {tag_digests}

All records as lines, each as it came:

    cd {payload}
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

In {manifest}

    bundles           one object a bundle: its records are "first" to "last", "count" in number, taken in from
                      "earliest" to "latest" (UTC); they are all records of the route behind "after"
    record_bytes      the bytes in the records
    bytes, sha256     of the file; tar_sha256: of the tar in it
    previous          the bundle that it follows and its sha256; null: it is the first

The records of {example}: {example_first} to {example_last}.
"""


def digest_file(sha256: str, bundle: str) -> bytes:
    """What lies beside a bundle, for ``sha256sum -c``."""
    return digest_line(sha256, bundle)


def tag_files(manifest: Manifest) -> dict[str, bytes]:
    """Every file of the bag outside its payload, in the order in which they are written: digests of digests last."""
    payload: dict[str, str] = {}
    octets = 0
    for entry in manifest.entries:
        bundle = entry.bundle
        beside = digest_file(bundle.sha256, bundle.name)
        payload[f"{PAYLOAD}/{bundle.name}"] = bundle.sha256
        payload[f"{PAYLOAD}/{bundle.name}{DIGEST_SUFFIX}"] = hashlib.sha256(beside).hexdigest()
        octets += bundle.bytes + len(beside)
    contents = (
        manifest.encode(),
        _readme(manifest).encode(),
        _DECLARATION,
        _bag_info(manifest, octets, len(payload)).encode(),
        _digests(payload),
    )
    files = dict(zip(TAGS, contents, strict=False))  # all but the last, which is over these
    return files | {TAG_DIGESTS: _digests({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})}


def _digests(files: dict[str, str]) -> bytes:
    return b"".join(digest_line(files[name], name) for name in sorted(files))


def _bag_info(manifest: Manifest, octets: int, streams: int) -> str:
    return (
        f"Bag-Software-Agent: {manifest.origin.software}\n"
        f"Bagging-Date: {manifest.origin.archived_at[:10]}\n"
        f"External-Identifier: {manifest.origin.log}/{manifest.bag}\n"
        f"Payload-Oxum: {octets}.{streams}\n"
    )


def _readme(manifest: Manifest) -> str:
    origin, entry = manifest.origin, manifest.entries[0].bundle
    bundles = len(manifest.entries)
    title = f'{manifest.count} records of the route "{origin.route}", packed by {origin.software} on '
    return _README.format(
        count=manifest.count,
        route=origin.route,
        software=origin.software,
        archived_at=origin.archived_at,
        underline="=" * len(title + origin.archived_at),
        first=manifest.first,
        last=manifest.last,
        log=origin.log,
        bundles="1 bundle" if bundles == 1 else f"{bundles} bundles",
        program={Codec.ZST: "zstd", Codec.GZ: "gzip", Codec.NONE: "a shell"}[manifest.codec],
        payload_digests=PAYLOAD_DIGESTS,
        tag_digests=TAG_DIGESTS,
        payload=PAYLOAD,
        suffix=manifest.codec.suffix,
        unpack=_UNPACK[manifest.codec],
        manifest=MANIFEST,
        example=entry.name,
        example_first=entry.contents.first,
        example_last=entry.contents.last,
    )

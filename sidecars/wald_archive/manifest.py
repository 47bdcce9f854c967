"""``manifest.json``: what is in a bag, bundle by bundle, and which bundle each one follows.

    {"format": 1, "log": …, "route": …, "group": …, "software": …, "archived_at": …, "codec": …,
     "after": …, "first": …, "last": …, "count": …,
     "bundles": [{"bundle": …, "first": …, "last": …, "after": …, "count": …, "record_bytes": …,
                  "earliest": …, "earliest_ns": …, "latest": …, "latest_ns": …, "parts": […],
                  "bytes": …, "sha256": …, "tar_sha256": …, "previous": {"bundle": …, "sha256": …} or null}]}

There is one way to write it, so a changed byte shows even where the JSON stays well-formed. Everything else in a bag
but the bundles is derived from it (wald_archive.tags).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from wald.format.names import is_route
from wald_archive.bundle import FORMAT_VERSION, Bundle, Contents, Origin
from wald_archive.codecs import Codec
from wald_archive.layout import BagName, bundle_stem
from wald_archive.parts import PART_BYTES, PartFacts

_SHA256 = re.compile(r"[0-9a-f]{64}")


class BadManifest(ValueError):
    """The bytes are not a manifest as wald writes it."""


@dataclass(frozen=True, slots=True)
class Previous:
    """The bundle that another one follows, in the same bag or in the one before."""

    bundle: str
    sha256: str

    def to_dict(self) -> dict[str, str]:
        """The fields as JSON."""
        return {"bundle": self.bundle, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A bundle and the one before it."""

    bundle: Bundle
    previous: Previous | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON."""
        bundle = self.bundle
        digests = {"bytes": bundle.bytes, "sha256": bundle.sha256, "tar_sha256": bundle.tar_sha256}
        previous = {"previous": self.previous.to_dict() if self.previous else None}
        return {"bundle": bundle.name} | bundle.contents.to_dict() | digests | previous

    def as_previous(self) -> Previous:
        """What the next one says of this one."""
        return Previous(self.bundle.name, self.bundle.sha256)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one run has packed; at least one bundle."""

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
        """The file."""
        fields = {"format": FORMAT_VERSION} | self.origin.to_dict() | {"codec": self.codec.value}
        fields |= {"after": self.after, "first": self.first, "last": self.last, "count": self.count}
        fields |= {"bundles": [entry.to_dict() for entry in self.entries]}
        return json.dumps(fields, indent=2).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """What a file says.

    Raises:
        BadManifest: it says something else than it would if wald had written it.
    """
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
    contents = Contents(
        first=_number(fields, "first"),
        last=_number(fields, "last"),
        after=_number(fields, "after"),
        count=_number(fields, "count"),
        record_bytes=_number(fields, "record_bytes"),
        earliest_ns=_number(fields, "earliest_ns"),
        latest_ns=_number(fields, "latest_ns"),
        parts=tuple(_part(part) for part in fields["parts"]),
    )
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

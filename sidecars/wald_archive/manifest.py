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

    def told(self) -> dict[str, str]:
        """As JSON has it."""
        return {"bundle": self.bundle, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A bundle and the one before it."""

    bundle: Bundle
    previous: Previous | None

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        bundle = self.bundle
        digests = {"bytes": bundle.bytes, "sha256": bundle.sha256, "tar_sha256": bundle.tar_sha256}
        previous = {"previous": self.previous.told() if self.previous else None}
        return {"bundle": bundle.name} | bundle.contents.told() | digests | previous

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
        told = {"format": FORMAT_VERSION} | self.origin.told() | {"codec": self.codec.value}
        told |= {"after": self.after, "first": self.first, "last": self.last, "count": self.count}
        told |= {"bundles": [entry.told() for entry in self.entries]}
        return json.dumps(told, indent=2).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """What a file says.

    Raises:
        BadManifest: it says something else than it would if wald had written it.
    """
    try:
        told: dict[str, Any] = json.loads(data)  # Any: it is JSON; every field is checked below
        if told["format"] != FORMAT_VERSION:
            raise BadManifest(f"format {told['format']!r} is not the {FORMAT_VERSION} this program knows")
        origin = Origin(*(_text(told, key) for key in ("log", "route", "group", "software", "archived_at")))
        codec = Codec(told["codec"])
        entries = tuple(_entry(bundle, origin.route, codec) for bundle in told["bundles"])
        manifest = Manifest(origin, codec, entries)
        if not is_route(origin.route) or not entries or manifest.encode() != data:
            raise BadManifest("not as wald writes it")
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise BadManifest(f"not a manifest ({error})") from error
    return manifest


def _entry(told: dict[str, Any], route: str, codec: Codec) -> BundleEntry:
    contents = Contents(
        first=_number(told, "first"),
        last=_number(told, "last"),
        after=_number(told, "after"),
        count=_number(told, "count"),
        record_bytes=_number(told, "record_bytes"),
        earliest_ns=_number(told, "earliest_ns"),
        latest_ns=_number(told, "latest_ns"),
        parts=tuple(_part(part) for part in told["parts"]),
    )
    name = _text(told, "bundle")
    if name != bundle_stem(route, contents.first) + codec.suffix:
        raise BadManifest(f"{name!r} cannot be the name of a bundle from record {contents.first} on")
    previous = told["previous"]
    return BundleEntry(
        Bundle(name, contents, _number(told, "bytes"), _digest(told, "sha256"), _digest(told, "tar_sha256")),
        None if previous is None else Previous(_text(previous, "bundle"), _digest(previous, "sha256")),
    )


def _part(told: dict[str, Any]) -> PartFacts:
    facts = PartFacts(_text(told, "part"), *(_number(told, key) for key in ("first", "last", "count", "bytes")))
    if facts.bytes > PART_BYTES and facts.count != 1:
        raise BadManifest(f"a part of {facts.bytes} bytes and {facts.count} records, which nobody packs")
    return facts


def _text(told: dict[str, Any], key: str) -> str:
    if not isinstance(told[key], str):
        raise BadManifest(f"{key} is not a text")
    return str(told[key])


def _number(told: dict[str, Any], key: str) -> int:
    if type(told[key]) is not int or told[key] < 0:
        raise BadManifest(f"{key} is not a number")
    return int(told[key])


def _digest(told: dict[str, Any], key: str) -> str:
    digest = _text(told, key)
    if not _SHA256.fullmatch(digest):
        raise BadManifest(f"{key} is not a sha256")
    return digest

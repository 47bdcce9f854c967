"""Manifests without bags: one bundle with the facts that a test needs."""

from __future__ import annotations

from wald_archive.bundle import Bundle, Contents, Origin, PartFacts
from wald_archive.codecs import Codec
from wald_archive.manifest import BundleEntry, Manifest, Previous


def manifest(
    *,
    log: str,
    first: int,
    last: int,
    route: str = "a",
    group: str = "processed",
    after: int = 0,
    previous: Previous | None = None,
    digest: str = "",
) -> Manifest:
    """Return a manifest of records ``first`` to ``last`` without gaps; the default digest is derived from ``first``."""
    count = last - first + 1
    contents = Contents(first, last, after, count, 2 * count, 1, 2, (PartFacts("x", first, last, count, 2 * count),))
    sha256 = digest * 64 if digest else f"{first:064x}"
    origin = Origin(log, route, group, "wald test", "2026-11-21T10:00:00Z")
    bundle = Bundle(f"{route}-{first:020d}.tar", contents, 10240, sha256, sha256)
    return Manifest(origin, Codec.NONE, (BundleEntry(bundle, previous),))

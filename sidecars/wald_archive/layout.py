"""Names at a destination.

A name has the route and the first sequence in 20 digits, so names sort by sequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wald.format.names import DIGITS

PAYLOAD = "data"
MANIFEST = "manifest.json"
DIGEST_SUFFIX = ".sha256"
_LEFT_BY_DESKTOPS = frozenset({"Thumbs.db", "desktop.ini", ".DS_Store", ".directory", "@eaDir"})
_BAG = re.compile(rf"([0-9]{{{DIGITS}}})-([0-9]{{{DIGITS}}})")


@dataclass(frozen=True, slots=True, order=True)
class BagName:
    """Bag: the records of a route that one run has packed."""

    route: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return its directory below the destination.

        >>> str(BagName("web", 1, 250))
        'web/00000000000000000001-00000000000000000250'
        """
        return f"{self.route}/{self.first:0{DIGITS}d}-{self.last:0{DIGITS}d}"


def parse_bag_name(route: str, folder: str) -> BagName | None:
    """Return the bag in ``folder`` of a route's directory, or None if it is not a bag."""
    match = _BAG.fullmatch(folder)
    return BagName(route, int(match[1]), int(match[2])) if match else None


def is_left_by_desktop(name: str) -> bool:
    """Return True if desktops or NAS systems put files of this name into every directory that they display.

    >>> is_left_by_desktop("Thumbs.db"), is_left_by_desktop("._manifest.json"), is_left_by_desktop("notes.txt")
    (True, True, False)
    """
    return name in _LEFT_BY_DESKTOPS or name.startswith("._")


def bundle_stem(route: str, first: int) -> str:
    """Return a bundle's name without the suffix of its compression, which is also the directory in its tar.

    >>> bundle_stem("web", 1)
    'web-00000000000000000001'
    """
    return f"{route}-{first:0{DIGITS}d}"


def part_name(first: int, suffix: str) -> str:
    return f"{first:0{DIGITS}d}{suffix}"


def records_name(stem: str, part: str) -> str:
    """Return the name in the tar of the file with the records of ``part``.

    >>> records_name("web-00000000000000000001", "00000000000000000001.txt")
    'web-00000000000000000001/records/00000000000000000001.txt'
    """
    return f"{stem}/records/{part}"


def digest_line(sha256: str, name: str) -> bytes:
    """Return a line in the format of ``sha256sum``."""
    return f"{sha256}  {name}\n".encode()

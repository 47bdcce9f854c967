"""What everything at a destination is called; building and parsing a name live side by side.

A name says which route and from which sequence, in 20 digits, so sorting names is sorting sequences.
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
    """A bag: what one run has packed of a route, from its first record to its last."""

    route: str
    first: int
    last: int

    def __str__(self) -> str:
        """Its directory, seen from the destination.

        >>> str(BagName("web", 1, 250))
        'web/00000000000000000001-00000000000000000250'
        """
        return f"{self.route}/{self.first:0{DIGITS}d}-{self.last:0{DIGITS}d}"


def parse_bag_name(route: str, folder: str) -> BagName | None:
    """The bag in ``folder`` of a route's directory; None if it is none."""
    match = _BAG.fullmatch(folder)
    return BagName(route, int(match[1]), int(match[2])) if match else None


def is_left_by_desktop(name: str) -> bool:
    """Return True if a desktop or a NAS puts files of this name into every directory that it displays.

    >>> is_left_by_desktop("Thumbs.db"), is_left_by_desktop("._manifest.json"), is_left_by_desktop("notes.txt")
    (True, True, False)
    """
    return name in _LEFT_BY_DESKTOPS or name.startswith("._")


def bundle_stem(route: str, first: int) -> str:
    """A bundle without what says how it is compressed; also the one directory in its tar.

    >>> bundle_stem("web", 1)
    'web-00000000000000000001'
    """
    return f"{route}-{first:0{DIGITS}d}"


def part_name(first: int, suffix: str) -> str:
    """The file in ``records/`` of a bundle whose first record is ``first``."""
    return f"{first:0{DIGITS}d}{suffix}"


def records_name(stem: str, part: str) -> str:
    """The name in the tar of the file that holds the records of ``part``.

    >>> records_name("web-00000000000000000001", "00000000000000000001.txt")
    'web-00000000000000000001/records/00000000000000000001.txt'
    """
    return f"{stem}/records/{part}"


def digest_line(sha256: str, name: str) -> bytes:
    """A line as ``sha256sum`` writes and reads it."""
    return f"{sha256}  {name}\n".encode()

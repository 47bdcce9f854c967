"""A ledger whose chain is broken, begun again.

The old file is kept in ``quarantine/``. The new one begins with a line that says so, with the digest of the old one.
The lines that were whole follow, each with its number among those that were carried over:

    {"event": "begun-again", "kept": "quarantine/…", "sha256": …, "whole": 12, "damaged": 1, "at": …}
    {"event": "sealed", "base": 1, …, "carried": 1}

A line "reclaimed" about a segment that is there gets a line "kept" behind it. The one that took it back may be among
the damaged ones, and without it the deletion would be believed if the segment were lost later.

If a sealed part is damaged, it goes the same way, and so does every part behind it. ``from`` is the number of the first
line of the first of them: a repair that was killed may have left the files of which the lines are carried over already.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wald.format.ledger_lines import GENESIS, digest, encode_line
from wald.store.files.directory import TEMPORARY, Root
from wald.store.files.disk import Disk
from wald.store.files.ledger_read import parts_of, read_files
from wald.store.files.listing import list_segments
from wald.store.files.regular import read_regular

_BEGUN = "begun-again"


@dataclass(frozen=True, slots=True)
class Anew:
    """What a broken ledger becomes.

    Attributes:
        entries: the lines that are carried over; None: the active file stays as it is.
        damaged: how many lines are not carried over.
        prev: what the first line of the active file carries.
        gone: the sealed parts that are no longer needed, oldest first.
        first_line: the number of the first line in those; 0: there are none.
        there: the segments that are there although the last line about each says that it was reclaimed.
    """

    entries: list[dict[str, Any]] | None
    damaged: int
    prev: str
    gone: tuple[Path, ...]
    first_line: int = 0
    there: tuple[int, ...] = ()

    def lines(self, *, kept: str, sha256: str, now_ns: int) -> bytes:
        """The content of the active file."""
        entries = self.entries or []
        opening = {"event": _BEGUN, "kept": kept, "sha256": sha256, "whole": len(entries), "damaged": self.damaged}
        origin = {"from": self.first_line} if self.gone else {}
        lines = [encode_line(opening | origin | {"at": now_ns}, self.prev)]
        for number, entry in enumerate(entries, start=1):
            lines.append(encode_line(entry | {"carried": number}, digest(lines[-1])))
        for base in self.there:
            entry = {"event": "kept", "base": base, "why": "it is there", "at": now_ns}
            lines.append(encode_line(entry, digest(lines[-1])))
        return b"".join(lines)


def anew(root: Root, path: Path) -> Anew:
    """What the ledger of ``root`` with the active file ``path`` becomes."""
    files = list(read_files(path))
    line_of = {part.path: part.line for part in parts_of(path)}
    opening = next(iter(files[-1][1].entries), {})
    if opening.get("event") == _BEGUN and "from" in opening:
        left = tuple(each for each, line in line_of.items() if line >= opening["from"])
        if left:
            return Anew(None, 0, "", left)
    bad = next((number for number, (_, decoded) in enumerate(files) if decoded.broken), len(files) - 1)
    taken = files[bad:]
    gone = tuple(file for file, _ in taken[:-1])
    entries = [{key: entry[key] for key in entry if key != "prev"} for _, decoded in taken for entry in decoded.entries]
    return Anew(
        entries,
        sum(len(decoded.broken) for _, decoded in taken),
        files[bad - 1][1].tip if bad else GENESIS,
        gone,
        line_of[gone[0]] if gone else 0,
        tuple(sorted(_reclaimed(entries).intersection(each.base_sequence for each in list_segments(root).segments))),
    )


def _reclaimed(entries: list[dict[str, Any]]) -> set[int]:
    """The segments of which the last line says that they were reclaimed."""
    found: dict[int, str] = {}
    for entry in entries:
        if entry.get("event") in ("reclaimed", "kept") and isinstance(entry.get("base"), int):
            found[entry["base"]] = entry["event"]
    return {base for base, event in found.items() if event == "reclaimed"}


def begin_again(root: Root, disk: Disk, path: Path, *, now_ns: int) -> None:
    """Replace the ledger at ``path`` by one with a whole chain. It may be killed at any step and called again."""
    found = anew(root, path)
    if found.entries is not None:
        for part in found.gone:
            _keep(root, disk, part)
        kept, sha256 = _keep(root, disk, path)
        disk.replace(path, found.lines(kept=kept, sha256=sha256, now_ns=now_ns))
    for part in found.gone:
        disk.unlink(part)
    disk.sync_directory(root.ledger)


def _keep(root: Root, disk: Disk, path: Path) -> tuple[str, str]:
    """Copy a file to ``quarantine/``; returns where it is, as a path in the root, and its digest."""
    old = read_regular(path) if path.exists() else b""
    sha256 = hashlib.sha256(old).hexdigest()
    kept = root.quarantine / f"{path.name}.{sha256[:16]}"
    if not kept.exists():
        temporary = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}{TEMPORARY}")
        disk.replace(temporary, old)
        disk.rename(temporary, kept)
        disk.sync_directory(root.quarantine)
    return str(kept.relative_to(root.path)), sha256

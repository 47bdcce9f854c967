"""A ledger whose chain is broken, begun again.

The old file is moved whole to ``quarantine/``. The new one begins with a line that says so, with the digest of the old
one. The lines that were whole follow, each with its number in the old file:

    {"event": "begun-again", "kept": "quarantine/…", "sha256": …, "whole": 12, "damaged": 1, "at": …}
    {"event": "sealed", "base": 1, …, "carried": 1}
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from wald.format.ledger import GENESIS, digest, encode_line
from wald.store.files.directory import TEMPORARY, Root
from wald.store.files.disk import Disk
from wald.store.files.ledger import read_ledger, tip_before
from wald.store.files.regular import read_regular


def begin_again(root: Root, disk: Disk, path: Path, *, now_ns: int) -> None:
    """Replace the ledger at ``path`` by one with a whole chain. It may be killed at any step and called again."""
    old = read_regular(path)
    sha256 = hashlib.sha256(old).hexdigest()
    kept = root.quarantine / f"{path.name}.{sha256[:16]}"
    if not kept.exists():
        temporary = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}{TEMPORARY}")
        disk.replace(temporary, old)
        disk.rename(temporary, kept)
        disk.sync_directory(root.quarantine)
    disk.replace(path, whole_lines(path, kept=str(kept.relative_to(root.path)), sha256=sha256, now_ns=now_ns))


def whole_lines(path: Path, *, kept: str, sha256: str, now_ns: int) -> bytes:
    """What the new ledger holds."""
    decoded = read_ledger(path)
    opening = {"event": "begun-again", "kept": kept, "sha256": sha256, "whole": len(decoded.entries)}
    prev = tip_before(path, read_regular(path)) or GENESIS  # it goes on from the sealed parts, if there are any
    lines = [encode_line(opening | {"damaged": len(decoded.broken), "at": now_ns}, prev)]
    for number, entry in enumerate(decoded.entries, start=1):
        entry.pop("prev", None)
        lines.append(encode_line(entry | {"carried": number}, digest(lines[-1])))
    return b"".join(lines)

"""Lines of a ledger that must follow one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wald.errors import Damaged
from wald.format.ledger import BadLine, decode_lines, digest


def chained(path: Path, data: bytes, *, line: int, prev: str, listed: bool = True) -> tuple[list[dict[str, Any]], str]:
    """The entries of whole lines that follow the line with digest ``prev``, and the digest of the last one.

    Args:
        line: the number of the first one in the file ``path``.
        listed: whether their lists of routes are wanted.

    Raises:
        Damaged: a line is damaged or does not follow the one before it.
    """
    texts = data.split(b"\n")[:-1]
    try:
        entries = decode_lines(texts, listed=listed)
    except BadLine as error:
        raise damaged(path, line + error.number, str(error)) from error
    for number, (entry, text) in enumerate(zip(entries, texts, strict=True), start=line):
        entry.pop("append", None)
        if entry.pop("prev") != prev:
            raise damaged(path, number, "does not follow the line before it")
        prev = digest(text)
    return entries, prev


def damaged(path: Path, number: int, reason: str) -> Damaged:
    """The error where a decision needs a ledger of which one line cannot be believed."""
    return Damaged(
        f"{path}: line {number}: {reason}; nothing is decided by this ledger",
        case="ledger-damaged",
        root=path.parents[1],
    )

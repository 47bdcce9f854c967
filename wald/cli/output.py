"""Tables, JSON and a progress bar, as commands print them."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import click

from wald.status.schema import fields_of


def aligned(rows: Sequence[Sequence[str]], numeric: Collection[int]) -> Iterator[str]:
    """The rows as lines of a table: columns as wide as they need to be, numbers aligned to the right.

    What cannot be printed is escaped, so that no name ends a line or moves the cursor of a terminal.

    Args:
        numeric: the columns, from 0, that are aligned to the right.
    """
    shown = [[each if each.isprintable() else repr(each)[1:-1] for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = (
            cell.rjust(width) if number in numeric else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def json_line(command: str, fields: object) -> str:
    """Return one JSON object of a command; docs/json.md lists its keys.

    Args:
        fields: a mapping, or an object of ``wald.status.schema``.
        command: "where", "cursor.list", "reclaim": the program and its command, without ``wald`` and dashes.
    """
    named = {"schema": f"wald.{command}/1"} | fields_of(fields)
    text = json.dumps(named, ensure_ascii=False, default=fields_of)
    # JSON is UTF-8 in every locale; the surrogates of a path that is not UTF-8 are valid JSON only as escapes.
    return text if text.isascii() or _is_printable(text) else json.dumps(named, default=fields_of)


def _is_printable(text: str) -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return codecs.lookup(encoding).name == "utf-8"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, if stderr is a terminal; gives a function to call with how much has been done since the last call."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        yield bar.update

"""Tables of text, and JSON, as commands print them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence


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


def json_line(command: str, fields: Mapping[str, object]) -> str:
    """One object of what a command prints with ``--json``; docs/json.md says what is in it.

    Args:
        command: "where", "cursor.list", "reclaim": the program and its command, without ``wald`` and dashes.
    """
    return json.dumps({"schema": f"wald.{command}/1"} | dict(fields), ensure_ascii=False)

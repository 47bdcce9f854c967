"""Tables that commands print."""

from __future__ import annotations

from wald.cli.output import aligned


def test_what_cannot_be_printed_ends_no_line_of_a_table_and_moves_no_cursor() -> None:
    rows = [("WORKER", "TRIES"), ("a\nb", "1"), ("\x1b[2J", "22"), ("Zoë 工", "3")]
    assert list(aligned(rows, (1,))) == ["WORKER   TRIES", "a\\nb         1", "\\x1b[2J     22", "Zoë 工        3"]

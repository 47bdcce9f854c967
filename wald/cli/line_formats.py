"""The lines that ``wald append`` sends as columns: with a key and a separator, as JSON objects, or with a delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wald.client.payloads import column_payloads, encode_headers, json_payloads
from wald.format.records import encode_columns, with_not_before

Encode = Callable[[bytes, str, int], Iterator[bytes]]
"""Whole lines, the name of their source and the number of the first of them in it → payloads, in order."""

Due = Callable[[], int]
"""When the lines that are sent now are due, in ns since 1970."""


def plain_lines(due: Due) -> Encode:
    """A line is a value."""

    def plain(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        values = lines.split(b"\n")[:-1]
        yield from column_payloads(values, headers=_due_headers(due, len(values)))

    return plain


def keyed_lines(separator: bytes, due: Due | None) -> Encode:
    """``KEY <separator> VALUE``; a line without the separator has no key."""

    def keyed(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        keys: list[bytes | None] = []
        values = []
        for line in lines.split(b"\n")[:-1]:
            key, found, value = line.partition(separator)
            keys.append(key if found else None)
            values.append(value if found else line)
        if due is None:
            yield encode_columns(values, keys=keys)  # hardly larger than the lines, so it need not be cut
        else:
            yield from column_payloads(values, keys=keys, headers=_due_headers(due, len(values)))

    return keyed


def json_lines(due: Due | None) -> Encode:
    """One JSON object per line; the times of its own count too."""
    return lambda lines, name, number: json_payloads(lines, name, number, None if due is None else due())


def _due_headers(due: Due, count: int) -> list[bytes]:
    """The headers of so many records that are sent now."""
    return [encode_headers(with_not_before(None, due()))] * count

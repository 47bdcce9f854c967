"""Leased records as JSON: what ``wald read --format json`` says of a record, and how often it was delivered."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

import msgspec

from wald.format.records import Record
from wald.work.owner import Share
from wald_gate.groups.shapes import Leased, LeasedRecord, Refusal

_headers = msgspec.json.Decoder(dict[str, str])


def leased(shares: Iterable[Share], refused: list[Refusal]) -> Leased:
    """What a consumer has got; ``refused``: of what it has said to be done, for which that did not count."""
    return Leased([_record(*each) for share in shares for each in zip(*share, strict=True)], refused)


def _record(record: Record, tries: int) -> LeasedRecord:
    route, sequence, value, append_time_ns, key, event_time_ns, headers, terminated = record
    text, base64 = _text(value)
    found = LeasedRecord(sequence, route, append_time_ns, tries, text, base64)
    if key is not None:
        found.key, found.key_base64 = _text(key)
    if headers is not None:
        try:
            found.headers = _headers.decode(headers)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not what producers are asked for
            found.headers, found.headers_base64 = _text(headers)
    if event_time_ns is not None:
        found.event_time_ns = event_time_ns
    if not terminated:
        found.terminated = False
    return found


def _text(value: bytes) -> tuple[str | None, str | None]:
    """Bytes as text, or in base64 if they are none."""
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, b64encode(value).decode()

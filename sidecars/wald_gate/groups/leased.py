"""Leased records as JSON: what ``wald read --format json`` says of a record, and how often it was delivered."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

import msgspec

from wald.work.deliveries import Refusal
from wald.work.terms import Delivery
from wald_gate.groups.shapes import Leased, LeasedRecord, refusals

_headers = msgspec.json.Decoder(dict[str, str])


def leased(deliveries: Iterable[Delivery], refused: Iterable[Refusal]) -> Leased:
    """What a consumer has got; ``refused``: of what it has said to be done, for which that did not count."""
    return Leased([_record(delivery) for delivery in deliveries], refusals(refused))


def _record(delivery: Delivery) -> LeasedRecord:
    (route, sequence, value, append_time_ns, key, event_time_ns, headers, terminated), tries = delivery
    text, base64 = _text(value)
    record = LeasedRecord(sequence, route, append_time_ns, tries, text, base64)
    if key is not None:
        record.key, record.key_base64 = _text(key)
    if headers is not None:
        try:
            record.headers = _headers.decode(headers)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not what producers are asked for
            record.headers, record.headers_base64 = _text(headers)
    if event_time_ns is not None:
        record.event_time_ns = event_time_ns
    if not terminated:
        record.terminated = False
    return record


def _text(value: bytes) -> tuple[str | None, str | None]:
    """Bytes as text, or in base64 if they are none."""
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, b64encode(value).decode()

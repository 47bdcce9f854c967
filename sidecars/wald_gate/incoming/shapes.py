"""The shapes of what is sent to be stored, for the OpenAPI document; :mod:`wald.client.payloads` reads it."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from wald_gate.shapes import Shape

IDEMPOTENCY_KEY: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": r'^"([\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+"$|^[\x21\x23-\x7e]+$',
    "description": "A name for this request, so that it is stored once when it is sent again with it.",
}
Lines = Annotated[str, Meta(min_length=1)]
_TIME_LIMIT = 1 << 63
_Hex = Annotated[str, Meta(pattern="^([0-9A-Fa-f]{2})*$")]
_Base64 = Annotated[str, Meta(pattern="^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")]
_WITHIN_64_BITS = "^(1[7-9]|2[01])"  # of nanoseconds: these centuries, and little more
_Text = Annotated[str, Meta(extra_json_schema={"format": "date-time", "pattern": _WITHIN_64_BITS})]
_OTHER_UNITS: dict[str, Any] = {"not": {"minimum": 1, "maximum": 10**17}}
_Time = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1, extra_json_schema=_OTHER_UNITS)] | _Text | None
_TimeNs = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1)] | _Text | None
_Due = Annotated[int, Meta(ge=10**18, le=_TIME_LIMIT - 1)] | _Text | None
_APART = (("value", "value_hex", "value_base64"), ("key", "key_hex", "key_base64"), ("time", "event_time_ns"))
_CLASHES = [{"required": pair} for names in _APART for pair in combinations(names, 2)]


class NewRecord(Shape):
    """A record, as a line of ``wald append --jsonl``; what the log itself assigns is passed over.

    Of a value that is no string, the text is stored as it stands in the line. Numbers of times are in nanoseconds since
    1970.
    """

    value: Any = None
    value_hex: _Hex | UnsetType = UNSET
    value_base64: _Base64 | UnsetType = UNSET
    key: str | None = None
    key_hex: _Hex | UnsetType = UNSET
    key_base64: _Base64 | UnsetType = UNSET
    time: _Time = None
    event_time_ns: _TimeNs = None
    not_before: _Due = None
    headers: dict[str, str] | None = None
    sequence: Any = None
    route: Any = None
    append_time_ns: Any = None
    append_time: Any = None
    event_time: Any = None
    sender: Any = None
    terminated: Any = None


_Record = Annotated[NewRecord, Meta(extra_json_schema={"not": {"anyOf": _CLASHES}})]
Records = Annotated[list[_Record], Meta(min_length=1)]
"""As JSON, an array; the gate takes a single object, too, but generated clients cannot express that choice."""

"""The shape of a record as it goes out in JSON, for the OpenAPI document, and of what a browser resumes with."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

LAST_EVENT_ID: dict[str, Any] = {
    "type": "string",
    "pattern": "^[0-9]{0,19}$",
    "description": "The sequence behind which Server-Sent Events go on.",
}


class StoredRecord(Struct, omit_defaults=True):
    """A record as ``wald read --format json`` writes it, but what is no text in base64.

    Times are in nanoseconds since 1970.
    """

    sequence: int
    route: str
    append_time_ns: int
    event_time_ns: int | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | str | None = None
    headers_base64: str | None = None
    terminated: bool = True
    value: str | None = None
    value_base64: str | None = None


class Event(Struct):
    """One of Server-Sent Events: a record, and its sequence as the id."""

    id: Annotated[str, Meta(pattern="^[0-9]+$")]
    data: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/json"})]

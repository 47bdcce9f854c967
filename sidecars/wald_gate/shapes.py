"""The shapes of requests and answers, from which JSON is read and written, and the OpenAPI document is made."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$"
"""What a route or a group may be called, as a pattern of JSON Schema."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""What can be printed, as far as all dialects of patterns can say it: no control characters."""
WAIT = (
    r"^((\d{1,2}|[12]\d{2})(\.\d{1,9})?|300(\.0{1,9})?) ?s?$|^[0-4](\.\d{1,9})? ?m$|^5(\.0{1,9})? ?m$"
    r"|^(\d{1,5}|[12]\d{5})(\.\d{1,9})? ?ms$|^300000(\.0{1,9})? ?ms$"
)
"""A duration of up to 300 s."""
SEQUENCE_MAX = (1 << 63) - 1
GroupName = Annotated[str, Meta(max_length=127, extra_json_schema={"pattern": NAME})]
WaitTime = Annotated[str, Meta(max_length=20, extra_json_schema={"pattern": WAIT})]


class Shape(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What is sent; a field that it does not have is an error, so that a misspelt one is noticed."""


class Stored(Struct):
    """The sequences of records that are durable; those of other producers may lie between them."""

    first: int
    last: int
    count: int


class Problem(Struct, omit_defaults=True):
    """What went wrong (RFC 9457): a code for programs, a sentence and a hint for people.

    Attributes:
        stored: what is durable of a request that was carried out in part.
        next: the sequence behind records that were asked for and are not there any more, or cannot be read.
    """

    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    stored: Stored | None = None
    next: int | None = None


class Cursor(Struct):
    """How far a group has processed a route."""

    sequence: int
    state: str
    message: str = ""


class Health(Struct, omit_defaults=True):
    """How the gate is: a word for programs, and why."""

    status: str
    detail: str = ""


class CursorPosition(Shape):
    """Up to where a group has processed a route; 0: nothing, earliest: what is gone by now, end: all that there is."""

    sequence: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)] | Literal["earliest", "end"]
    rewind: bool = False


_encoder = msgspec.json.Encoder()


def encoded(shape: Any) -> bytes:
    """Return ``shape`` as JSON; the surrogates of a path that is not UTF-8 are escaped."""
    try:
        return _encoder.encode(shape)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(shape), separators=(",", ":")).encode()

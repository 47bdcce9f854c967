"""The shapes of requests and answers, from which JSON is read and written, and the OpenAPI document is made."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct


class Shape(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What is sent; a field that it does not have is an error, so that a misspelt one is noticed."""


class Stored(Struct):
    """The sequences of records that are durable; those of other producers may lie between them."""

    first: int
    last: int
    count: int


class Problem(Struct, omit_defaults=True):
    """What went wrong (RFC 9457): a code for programs, a sentence and a hint for people."""

    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    stored: Stored | None = None


class Cursor(Struct):
    """How far a group has processed a route."""

    sequence: int
    state: str
    message: str = ""


class Health(Struct, omit_defaults=True):
    """How the gate is: a word for programs, and why."""

    status: str
    detail: str = ""


class NewCursor(Shape):
    """Up to where a group has processed a route; 0: nothing."""

    sequence: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    rewind: bool = False


_encoder = msgspec.json.Encoder()


def encoded(shape: Any) -> bytes:
    """``shape`` in JSON."""
    return _encoder.encode(shape)

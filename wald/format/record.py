"""A record as a reader gets it, and the split of a ``lines`` payload into records."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Form = Literal["hex", "base64"]
"""How bytes that are no text stand in JSON."""


class Record(NamedTuple):
    """What a producer sent, and where it is in the log.

    A named tuple, as that is made in a seventh of the time of a frozen dataclass.

    Attributes:
        route: the name of the route.
        sequence: its number in the log, across routes; the first is 1.
        value: the bytes sent; of a line, without its newline.
        append_time_ns: when the daemon took it, in nanoseconds since 1970.
        key: the key, if the producer gave one.
        event_time_ns: when it happened, in nanoseconds since 1970, if the producer gave a time.
        headers: a JSON object of strings, as UTF-8, if the producer gave headers.
        terminated: False for a last line that ended without a newline.
    """

    route: str
    sequence: int
    value: bytes
    append_time_ns: int
    key: bytes | None = None
    event_time_ns: int | None = None
    headers: bytes | None = None
    terminated: bool = True

    def to_json(self, more: Mapping[str, Any] = MappingProxyType({}), *, form: Form = "hex") -> str:
        """One JSON object, with ``more`` fields; text as it is where it is UTF-8, else hexadecimal under ``value_hex``.

        Headers that are not what producers are asked for, a JSON object of strings, are shown as text too.

        Args:
            form: of what is no text; with "base64" it is under ``value_base64``.
        """
        shown: dict[str, Any] = {"sequence": self.sequence, "route": self.route, "append_time_ns": self.append_time_ns}
        if self.event_time_ns is not None:
            shown["event_time_ns"] = self.event_time_ns
        if self.key is not None:
            shown |= text_or_bytes("key", self.key, form)
        if self.headers is not None:
            shown |= _headers(self.headers, form)
        if not self.terminated:
            shown["terminated"] = False
        return json.dumps({**shown, **more} | text_or_bytes("value", self.value, form), ensure_ascii=False)


def record_of_json(line: bytes | str) -> Record:
    """The inverse of :meth:`Record.to_json`; the spaces in headers may be others than those sent.

    Raises:
        ValueError: the line is not such an object.
    """
    try:
        shown: dict[str, Any] = json.loads(line)
        value, headers = _bytes_of(shown, "value"), shown.get("headers")
        if value is None:
            raise ValueError("a record without a value")
        if isinstance(headers, dict):
            shown = shown | {"headers": json.dumps(headers, ensure_ascii=False, separators=(",", ":"))}
        return Record(
            str(shown["route"]),
            int(shown["sequence"]),
            value,
            int(shown["append_time_ns"]),
            _bytes_of(shown, "key"),
            None if shown.get("event_time_ns") is None else int(shown["event_time_ns"]),
            _bytes_of(shown, "headers"),
            terminated=bool(shown.get("terminated", True)),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record ({error!r})") from error


def split_lines(payload: bytes | memoryview) -> list[bytes]:
    r"""The pieces between newlines, the last one (possibly empty) included; a carriage return is content.

    >>> split_lines(b"one\r\n\ntwo")
    [b'one\r', b'', b'two']
    """
    return bytes(payload).split(b"\n")


def _headers(raw: bytes, form: Form) -> dict[str, Any]:
    try:
        headers = json.loads(raw.decode())
        if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
            json.dumps(headers, ensure_ascii=False).encode()  # a lone surrogate could not be printed
            return {"headers": headers}
    except (ValueError, RecursionError):
        pass
    return text_or_bytes("headers", raw, form)


def text_or_bytes(name: str, value: bytes, form: Form = "hex") -> dict[str, str]:
    """A field of JSON: text if the bytes are UTF-8, else in ``form`` under ``<name>_hex`` or ``<name>_base64``."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_{form}": value.hex() if form == "hex" else b64encode(value).decode()}


def _bytes_of(shown: dict[str, Any], name: str) -> bytes | None:
    """The inverse of :func:`text_or_bytes`; None if the object does not have it."""
    if f"{name}_hex" in shown:
        return bytes.fromhex(shown[f"{name}_hex"])
    return str(shown[name]).encode() if name in shown else None

"""The verbs: what may be asked with which method and path, with which right, in which shape, and what is answered.

One table says all of it. The application is made from it, and so is the OpenAPI document, so neither can say what the
other does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from wald_gate.call import Call
from wald_gate.problems import problem
from wald_gate.rights.clients import Right
from wald_gate.shapes import encoded

Handle = Callable[[Call], Awaitable[Response]]
Fail = Callable[[Request, Exception], Response]
JSON = "application/json"
NDJSON = "application/x-ndjson"
ANY = ("*/*", "application/*")
"""Media ranges of an Accept header that include those above."""


def listing(call: Call) -> tuple[str, Callable[[Iterable[Any]], bytes]]:
    """Return the media type of a list for this client, and a function that encodes one: an array, or a line each."""
    if next((each for each in call.accepts if each in (JSON, NDJSON, *ANY)), NDJSON) == JSON:
        return JSON, lambda items: b"[%b]\n" % b",\n".join(map(encoded, items))
    return NDJSON, lambda items: b"".join(encoded(each) + b"\n" for each in items)


def as_problem(_: Request, error: Exception) -> Response:
    """An error, for a program."""
    return problem(error)


@dataclass(frozen=True)
class Verb:
    """One row of the table.

    Attributes:
        name: for programs that are made from the OpenAPI document.
        path: with ``{route}``, ``{group}`` and ``{sequence}``.
        query: the shape of the parameters behind the ``?``.
        headers: the schemas of its own headers.
        body: the shape of the body by media type; None: bytes.
        answers: the shape of the answer by media type; None: bytes.
        statuses: of errors, besides those that any verb may have.
        failed: what is answered when something goes wrong.
    """

    method: str
    path: str
    name: str
    summary: str
    right: Right
    handle: Handle
    query: type[Struct] | None = None
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    failed: Fail = as_problem

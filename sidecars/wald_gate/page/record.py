"""The page of one sequence: the record, or what became of it. There is an answer for every number from 1 on."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from wald.errors import InvalidInput, NotFound, WaldError
from wald.format.records import Record
from wald.log import Log
from wald.reading.assembler import Batch, Sender
from wald.reading.lookup import Whereabouts
from wald.reading.reader import read_without_waiting
from wald.segments.view import State
from wald.status.schema import Where
from wald_gate.call import Call
from wald_gate.page.frame import page
from wald_gate.page.values import FORMS, Form, headers, line, shown
from wald_gate.problems import HttpError
from wald_gate.shapes import Shape

_Sequence = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_DOWNLOAD = {"Cache-Control": "no-store", "Content-Security-Policy": "sandbox"}


class Query(Shape, rename={"form": "as"}):
    """In which form the value is wanted."""

    form: Form | None = None


@dataclass(frozen=True)
class Found:
    """What is known of a sequence.

    Attributes:
        record: None if the log does not have it, or if it cannot be read; ``trouble`` says why then.
    """

    where: Whereabouts
    record: Record | None = None
    sender: Sender | None = None
    trouble: str = ""


async def record(call: Call) -> Response:
    """The view at ``/records/{sequence}``."""
    query = call.query(Query)
    found = await _found(call, _sequence(call))
    message = call.words(found.trouble or found.where.message)
    facts: dict[str, Any] = {"found": found, "forms": FORMS, "message": message, "where": Where.of(found.where)}
    if found.record is not None:
        names, count = headers(found.record.headers)
        facts |= {
            "headers": names,
            "headers_left": count - len(names),
            "key": None if found.record.key is None else line(found.record.key),
            "value": await call.read(shown, found.record.value, query.form),
        }
    return await page(call, "record.html", facts)


async def value(call: Call) -> Response:
    """The bytes of a value, to be kept as a file; no browser may take them for a page.

    Raises:
        NotFound: the log does not have the record.
    """
    sequence = _sequence(call)
    found = await _found(call, sequence)
    if found.record is None:
        message = f"record {sequence}: {found.trouble or found.where.message}"
        raise NotFound(message, hint=f"/records/{sequence} says what became of it")
    disposition = {"Content-Disposition": f'attachment; filename="record-{sequence}"'}
    return Response(found.record.value, 200, _DOWNLOAD | disposition, "application/octet-stream")


def _sequence(call: Call) -> int:
    given = call.request.path_params["sequence"]
    try:
        return msgspec.convert(given, _Sequence, strict=False)
    except msgspec.ValidationError:
        raise InvalidInput(f"{given[:40]!r} is not a sequence", hint="/records/250") from None


async def _found(call: Call, sequence: int) -> Found:
    log = call.state.log
    where = await call.read(log.where, sequence)
    _require(call, where)
    return await call.walk(find(log, where))


def find(log: Log, where: Whereabouts) -> Generator[None, None, Found]:
    """Read a record; yields on the way to the end of a long one, for :meth:`Call.walk`."""
    if not where.durable:
        return Found(where)
    route = where.route if where.route is not None and log.root.has_route(where.route) else None
    first = where.sequence
    try:
        for batch in read_without_waiting(log.view(), route=route, start=first, stop=first, on_missing="skip"):
            if isinstance(batch, Batch):
                return Found(where, next(batch.records()), log.sender(batch))
            if batch is not None:
                break
            yield
    except WaldError as error:
        return Found(where, trouble=error.message)
    return Found(where)


def _require(call: Call, where: Whereabouts) -> None:
    """Refuse who may not read its route, without its name; if that is not known, all but who may read everything."""
    client, route = call.client, where.route
    if where.state is State.NEVER_ISSUED or client.admin or (route is not None and client.may_read(route)):
        return
    sequence = call.request.path_params["sequence"]
    message = f"{client.name} may not see this: it needs the right to read the route of record {sequence}"
    raise HttpError(403, "not-permitted", message)

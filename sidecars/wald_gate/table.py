"""The table of verbs: one row for each, which the application and the OpenAPI document are made from."""

from __future__ import annotations

from functools import cache

from starlette.responses import Response

from wald.status import schema
from wald_gate import shapes
from wald_gate.call import Call
from wald_gate.groups import verbs as work
from wald_gate.info import verbs as info
from wald_gate.openapi import document
from wald_gate.records_in.append import IDEMPOTENCY_KEY, Lines, Records, append
from wald_gate.records_in.append import Query as AppendQuery
from wald_gate.records_out.reading import Arrow, Events, Raw
from wald_gate.records_out.records import Query, records
from wald_gate.rights.clients import Right
from wald_gate.shapes import LAST_EVENT_ID, Cursor, CursorPosition, Event, Health, Stored, StoredRecord, encoded
from wald_gate.verbs import JSON, NDJSON, Verb

_GET, _POST = "GET", "POST"


async def _describe(_: Call) -> Response:
    """The OpenAPI document."""
    return Response(_description(), media_type=JSON)


@cache
def _description() -> bytes:
    """It is made from the table below, once: all who can connect may ask for it, and it takes some milliseconds."""
    return encoded(document(VERBS))


VERBS: tuple[Verb, ...] = (
    Verb(
        _POST,
        "/v1/routes/{route}/records",
        "append",
        "Store records; the answer comes once they are on disk.",
        Right.WRITE,
        append,
        query=AppendQuery,
        headers={"Idempotency-Key": IDEMPOTENCY_KEY},
        body={JSON: Records, "text/plain": Lines, NDJSON: Records, "application/octet-stream": None},
        answers={JSON: Stored},
        statuses=(404, 408, 409, 413, 415, 422, 504),
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/records",
        "records",
        "The records of a route from a position on; with follow=1 also what is appended later.",
        Right.READ,
        records,
        query=Query,
        headers={"Last-Event-ID": LAST_EVENT_ID},
        answers={
            JSON: list[StoredRecord],  # first: what generated clients read
            NDJSON: list[StoredRecord],
            Events.media_type: Event,
            Raw.media_type: None,
            Arrow.media_type: None,
        },
        statuses=(404, 406, 410),
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/cursors/{group}",
        "cursor",
        "How far a group has processed a route.",
        Right.LOOK,
        info.get_cursor,
        answers={JSON: Cursor},
        statuses=(404,),
    ),
    Verb(
        "PUT",
        "/v1/routes/{route}/cursors/{group}",
        "set_cursor",
        "Declare up to where a group has processed a route.",
        Right.WORK,
        info.put_cursor,
        body={JSON: CursorPosition},
        answers={JSON: Cursor},
        statuses=(404, 409, 413, 415),
    ),
    *(
        Verb(
            _POST,
            f"/v1/routes/{{route}}/groups/{{group}}/{name}",
            name,
            summary,
            Right.WORK,
            handle,
            body={JSON: body},
            answers={JSON: answer},
            statuses=(404, 408, 410, 413, 415, 423),
        )
        for name, summary, handle, body, answer in (
            (
                "lease",
                "Get records of a route that no other worker of the group has.",
                work.lease,
                shapes.Lease,
                shapes.Leased,
            ),
            ("ack", "Say that records are processed.", work.ack, shapes.Ack, shapes.Settled),
            ("nack", "Give records back.", work.nack, shapes.Nack, shapes.Settled),
            ("extend", "Keep leased records for longer.", work.extend, shapes.Extend, shapes.Settled),
            ("release", "Take records back from a worker.", work.release, shapes.Release, shapes.Released),
        )
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/groups",
        "groups",
        "The groups of a route, and how far they are.",
        Right.READ,
        work.groups,
        answers={JSON: schema.GroupsOfRoute},
        statuses=(404,),
    ),
    Verb(
        "DELETE",
        "/v1/routes/{route}/groups/{group}",
        "remove_group",
        "Remove a group: what it has not processed is not kept for it any more.",
        Right.WORK,
        work.remove,
        answers={JSON: shapes.Removed},
        statuses=(404, 409, 423),
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/groups/{group}/pending",
        "pending",
        "What of a group is with consumers, waits, or is being given up.",
        Right.LOOK,
        work.pending,
        query=shapes.PendingQuery,
        answers={JSON: list[schema.Pending], NDJSON: list[schema.Pending]},
        statuses=(404,),
    ),
    Verb(
        _GET,
        "/v1/routes",
        "routes",
        "The routes, and how far their groups have come.",
        Right.KNOWN,
        info.routes,
        answers={JSON: schema.Routes},
    ),
    Verb(
        _POST,
        "/v1/routes/{route}",
        "add_route",
        "Make a route, or take a retired one back.",
        Right.ADMIN,
        info.add_route,
        answers={JSON: shapes.RouteMade},
        statuses=(409,),
    ),
    Verb(
        _GET,
        "/v1/head",
        "head",
        "How far the log is durable.",
        Right.KNOWN,
        info.head,
        answers={JSON: schema.Head},
        statuses=(404,),
    ),
    Verb(
        _GET,
        "/v1/where/{sequence}",
        "where",
        "What became of a record.",
        Right.ADMIN,
        info.where,
        answers={JSON: schema.Where},
    ),
    Verb(
        _GET,
        "/v1/explain",
        "explain",
        "What pins which bytes.",
        Right.ADMIN,
        info.explain,
        answers={JSON: list[schema.Explained], NDJSON: list[schema.Explained]},
    ),
    Verb(_POST, "/v1/cut", "cut", "Cut the active segment.", Right.ADMIN, info.cut, answers={JSON: shapes.Cut}),
    Verb(_GET, "/healthz", "healthz", "Whether the gate runs.", Right.NONE, info.healthz, answers={JSON: Health}),
    Verb(
        _GET,
        "/readyz",
        "readyz",
        "Whether the log can be read and its daemon answers; 503 says why not.",
        Right.NONE,
        info.readyz,
        answers={JSON: Health},
    ),
    Verb(
        _GET,
        "/metrics",
        "metrics",
        "What the gate counts, as Prometheus reads it.",
        Right.KNOWN,
        info.metrics,
        answers={"text/plain": None},
    ),
    Verb(_GET, "/openapi.json", "openapi", "This document.", Right.NONE, _describe, answers={JSON: dict}),
)

"""The table of verbs, and the application that routes requests to them and answers errors as problems."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Iterable
from functools import cache, lru_cache
from itertools import chain
from typing import Any, get_origin

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from wald.errors import WaldError
from wald.status import schema
from wald_gate import shapes
from wald_gate.auth.clients import require_own_name, require_own_page
from wald_gate.auth.tokens import Client, Right
from wald_gate.call import JSON, NDJSON, Call, Handle, State, Verb
from wald_gate.groups import verbs as work
from wald_gate.http.exchange import Exchange
from wald_gate.info import verbs as info
from wald_gate.info.monitoring import CLIENT, Answered
from wald_gate.openapi import document
from wald_gate.page.frame import HTML, failed
from wald_gate.problems import HttpError, problem
from wald_gate.records_in.append import IDEMPOTENCY_KEY, Lines, Records, append
from wald_gate.records_in.append import Query as AppendQuery
from wald_gate.records_out.reading import Arrow, Events, Query, Raw, records
from wald_gate.responses import compress, may_compress, wants_gzip
from wald_gate.shapes import encoded

_NOT_CACHED = (b"cache-control", b"no-store")
_API = "/v1/"
_NO_VERB = "none"
_NAME = re.compile(r"\\{(\w+)\\}")  # of a parameter in a path, escaped
_NOBODY = Client("anyone")  # the client of a request that needs no right
_KNOWN_PATHS, _KNOWN_LENGTH = 1024, 512
_log = logging.getLogger("wald_gate")


class Application:
    """ASGI application: routes requests to verbs, and answers and counts them.

    The verb of a path is cached, because a path is matched against the pattern of every verb.
    """

    def __init__(self, state: State, verbs: Iterable[Verb]) -> None:
        self._state = state
        self._verbs = [
            (re.compile(_NAME.sub(r"(?P<\1>[^/]+)", re.escape(verb.path))), verb, state.counts.of_verb(verb.name))
            for verb in verbs
        ]
        self._find = lru_cache(_KNOWN_PATHS)(self._match)

    def __call__(self, request: Exchange) -> Awaitable[None]:
        scope = request.scope
        self._state.proxies.apply(scope)
        raw_path: bytes = scope["raw_path"]
        path: str = scope["path"]
        if b"%2" in raw_path and b"%2f" in raw_path.lower():  # decoded, it would be a path separator
            scope["path"] = raw_path.decode("ascii")
            found = None
        else:
            found = (self._find if len(path) <= _KNOWN_LENGTH else self._match)(scope["method"], path)
        if found is None:
            return request.answer(self._not_found(request))
        verb, answered, scope["path_params"] = found
        return self._answer(request, verb, answered)

    def _match(self, method: str, path: str) -> tuple[Verb, Answered, dict[str, str]] | None:
        for pattern, verb, answered in self._verbs:
            if method in _methods_of(verb) and (found := pattern.fullmatch(path)):
                return verb, answered, found.groupdict()
        return None

    def _not_found(self, request: Exchange) -> Response:
        """Answer a request for an unknown path or method: an error for a program, a page for a browser."""
        method, path = request.method, request.scope["path"]
        hint = "/openapi.json lists all paths"
        if path.endswith("/") and self._methods(path.rstrip("/")):
            hint = f"{path.rstrip('/')}, without a slash at its end"
        error = HttpError(404, "no-such-path", f"there is no {path}", hint=hint)
        if "%2f" not in path.lower() and (allowed := ", ".join(self._methods(path))):
            message = f"{path} does not support {method}"
            error = HttpError(405, "method", message, hint=allowed, headers={"Allow": allowed})
        response = failed(request, error) if HTML in request.headers.get("accept", "") else problem(error)
        response.headers.setdefault("cache-control", "no-store")
        self._state.counts.of_verb(_NO_VERB).count(response.status_code, 0.0)
        self._state.request_log.note(request.scope, response, 0.0)
        return response

    def _methods(self, path: str) -> list[str]:
        """Return the methods of a path; nothing if no verb has the path."""
        found = (_methods_of(verb) for pattern, verb, _ in self._verbs if pattern.fullmatch(path))
        return sorted(set(chain.from_iterable(found)))

    async def _answer(self, request: Exchange, verb: Verb, answered: Answered) -> None:
        began = time.perf_counter()
        state = self._state
        try:
            call = Call(request, _NOBODY, state, verb.right, edition=state.rights.edition)
            response = await self._response(call, verb)
            response = request.rejection or response
            if may_compress(response) and wants_gzip(request):
                await state.in_thread(compress, response)
            seconds = time.perf_counter() - began
            for name, _ in response.raw_headers:
                if name == b"cache-control":
                    break
            else:
                response.raw_headers.append(_NOT_CACHED)  # true only now, and for one client
            answered.count(response.status_code, seconds)
            state.request_log.note(request.scope, response, seconds)
            try:
                await request.answer(response)
            except (WaldError, OSError) as error:  # part of it was sent, and a normal end would look complete
                seconds = time.perf_counter() - began
                state.counts.broken_answers += 1
                state.request_log.note(request.scope, response, seconds, broken=str(error))
                request.connection.break_off()
                await request.receive()
        except asyncio.CancelledError:  # the gate stops, and has closed the connection
            return
        finally:
            if request.at_end is not None:
                request.at_end()
            if request.allowance is not None:
                request.allowance.in_flight -= 1

    async def _response(self, call: Call, verb: Verb) -> Response:
        """Authenticate, check the rights and the limits, and call the handler."""
        state, request = self._state, call.request
        try:
            require_own_page(request)
            if verb.right is not Right.NONE:
                require_own_name(request, state.limits.hosts, guarded=state.rights.are_asked_for)
                call.client, call.has_session = state.admission.client(request)
                request.scope[CLIENT] = call.client.name
                request.allowance = state.allowances.begin(call.payer)
                state.admission.require(call.client, verb.right, request)
                await state.readiness.require_same_log()
            if verb.query is None and verb.path.startswith(_API):
                call.require_no_query()
            return await verb.handle(call)
        except (WaldError, OSError) as error:
            response = verb.failed(request, call.shown(error))
            if response.status_code == 500 and not isinstance(error, WaldError):  # the answer does not name the bug
                _log.exception("%s %s", verb.method, verb.path)
            return response
        except ClientDisconnect:
            return Response(status_code=499)  # it is not sent
        except Exception as error:  # noqa: BLE001 - a bug: the client gets an answer, and the log shows it
            _log.exception("%s %s", verb.method, verb.path)
            return verb.failed(request, error)


def _methods_of(verb: Verb) -> tuple[str, ...]:
    return ("GET", "HEAD") if verb.method == "GET" else (verb.method,)


async def _describe(_: Call) -> Response:
    return Response(_description(), media_type=JSON)


@cache  # every client may request it, and making it takes some milliseconds
def _description() -> bytes:
    return encoded(document(VERBS))


_SUMMARIES = {
    "append": "Store records; the response follows once they are on disk.",
    "records": "The records of a route, starting at a position; with follow=1, later ones too.",
    "cursor": "The position of a group on a route.",
    "set_cursor": "Set the position of a group on a route.",
    "lease": "Lease records of a route that no other worker of the group has.",
    "ack": "Acknowledge processed records.",
    "nack": "Return records for redelivery.",
    "extend": "Extend the lease of records.",
    "release": "Revoke the leases of a worker.",
    "groups": "The groups of a route, with their positions.",
    "remove_group": "Remove a group, which then pins no records.",
    "pending": "Records of a group that are leased, wait, or are being given up.",
    "routes": "The routes, with the positions of their groups.",
    "add_route": "Create a route, or reactivate a retired one.",
    "head": "The durable head of the log.",
    "where": "The fate of a record.",
    "explain": "The bytes that each group pins.",
    "cut": "Cut the active segment.",
    "healthz": "Liveness of the gate.",
    "readyz": "Readiness: the log is readable and its daemon responds; otherwise 503 with the reason.",
    "metrics": "The metrics of the gate, for Prometheus.",
    "openapi": "This document.",
}


def _verb(
    line: str, name: str, right: Right, handle: Handle, answer: Any, statuses: tuple[int, ...] = (), **more: Any
) -> Verb:
    """Return a verb for a method, a path, and the shape of the response.

    A list is sent as an array or as lines, as the client prefers.
    """
    method, path = line.split()
    answers = {JSON: answer, NDJSON: answer} if get_origin(answer) is list else {JSON: answer}
    more = {"answers": answers, "statuses": statuses} | more
    return Verb(method, path, name, _SUMMARIES[name], right, handle, **more)


_NONE, _KNOWN, _READ, _WRITE, _LOOK, _WORK, _ADMIN = Right
_ROUTE = "/v1/routes/{route}"
_CURSOR, _GROUP = f"{_ROUTE}/cursors/{{group}}", f"{_ROUTE}/groups/{{group}}"
_LEASING = 404, 408, 410, 413, 415, 423
VERBS: tuple[Verb, ...] = (
    _verb(
        f"POST {_ROUTE}/records",
        "append",
        _WRITE,
        append,
        shapes.Stored,
        (404, 408, 409, 413, 415, 422, 504),
        query=AppendQuery,
        headers={"Idempotency-Key": IDEMPOTENCY_KEY},
        body={JSON: Records, "text/plain": Lines, NDJSON: Records, "application/octet-stream": None},
    ),
    _verb(
        f"GET {_ROUTE}/records",
        "records",
        _READ,
        records,
        None,
        (404, 406, 410),
        query=Query,
        headers={"Last-Event-ID": shapes.LAST_EVENT_ID},
        answers={
            JSON: list[shapes.StoredRecord],  # first: what generated clients read
            NDJSON: list[shapes.StoredRecord],
            Events.media_type: shapes.Event,
            Raw.media_type: None,
            Arrow.media_type: None,
        },
    ),
    _verb(f"GET {_CURSOR}", "cursor", _LOOK, info.get_cursor, shapes.Cursor, (404,)),
    _verb(
        f"PUT {_CURSOR}",
        "set_cursor",
        _WORK,
        info.put_cursor,
        shapes.Cursor,
        (404, 409, 413, 415),
        body={JSON: shapes.CursorPosition},
    ),
    *(
        _verb(f"POST {_GROUP}/{name}", name, _WORK, handle, answer, _LEASING, body={JSON: body})
        for name, handle, body, answer in (
            ("lease", work.lease, shapes.Lease, shapes.Leased),
            ("ack", work.ack, shapes.Ack, shapes.Settled),
            ("nack", work.nack, shapes.Nack, shapes.Settled),
            ("extend", work.extend, shapes.Extend, shapes.Settled),
            ("release", work.release, shapes.Release, shapes.Released),
        )
    ),
    _verb(f"GET {_ROUTE}/groups", "groups", _READ, work.groups, schema.GroupsOfRoute, (404,)),
    _verb(f"DELETE {_GROUP}", "remove_group", _WORK, work.remove, shapes.Removed, (404, 409, 423)),
    _verb(
        f"GET {_GROUP}/pending",
        "pending",
        _LOOK,
        work.pending,
        list[schema.Pending],
        (404,),
        query=shapes.PendingQuery,
    ),
    _verb("GET /v1/routes", "routes", _KNOWN, info.routes, schema.Routes),
    _verb(f"POST {_ROUTE}", "add_route", _ADMIN, info.add_route, shapes.RouteMade, (409,)),
    _verb("GET /v1/head", "head", _KNOWN, info.head, schema.Head, (404,)),
    _verb("GET /v1/where/{sequence}", "where", _ADMIN, info.where, schema.Where),
    _verb("GET /v1/explain", "explain", _ADMIN, info.explain, list[schema.Explained]),
    _verb("POST /v1/cut", "cut", _ADMIN, info.cut, shapes.Cut),
    _verb("GET /healthz", "healthz", _NONE, info.healthz, shapes.Health),
    _verb("GET /readyz", "readyz", _NONE, info.readyz, shapes.Health),
    _verb("GET /metrics", "metrics", _KNOWN, info.metrics, None, answers={"text/plain": None}),
    _verb("GET /openapi.json", "openapi", _NONE, _describe, dict),
)

"""The table of verbs, and the ASGI application that routes requests to them and answers errors as problems."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from wald.errors import WaldError
from wald.status import schema
from wald_gate import shapes
from wald_gate.auth.origins import TrustedProxies, require_own_name, require_own_page
from wald_gate.auth.tokens import Client, Right
from wald_gate.call import JSON, NDJSON, Call, Verb, payer
from wald_gate.groups import verbs as work
from wald_gate.http.connection import BREAK_OFF
from wald_gate.info import verbs as info
from wald_gate.info.monitoring import CLIENT, Answered
from wald_gate.limits import ALLOWANCE
from wald_gate.openapi import document
from wald_gate.page.frame import HTML, failed
from wald_gate.problems import HttpError, problem
from wald_gate.records_in.append import IDEMPOTENCY_KEY, Lines, Records, append
from wald_gate.records_in.append import Query as AppendQuery
from wald_gate.records_out.reading import Arrow, Events, Raw
from wald_gate.records_out.records import Query, records
from wald_gate.responses import compress, may_compress, wait_for_disconnect, wants_gzip
from wald_gate.shapes import LAST_EVENT_ID, Cursor, CursorPosition, Event, Health, Stored, StoredRecord, encoded
from wald_gate.state import State

_NOT_CACHED = (b"cache-control", b"no-store")
_API = "/v1/"
_NO_VERB = "none"
_NOBODY = Client("anyone")  # the client of a request that needs no right
_KNOWN_PATHS, _KNOWN_LENGTH = 1024, 512
_log = logging.getLogger("wald_gate")


class Application:
    """The ASGI application of a gate.

    The verb of a path is cached: Starlette matches a path against the pattern of every verb.
    """

    def __init__(self, state: State, verbs: Iterable[Verb], proxies: TrustedProxies) -> None:
        self._state = state
        self._proxies = proxies
        self._routes = [
            _ExactRoute(
                verb.path,
                _Endpoint(verb, state, state.counts.of_verb(verb.name)),
                methods=[verb.method],
                name=verb.name,
            )
            for verb in verbs
        ]
        self._find = lru_cache(_KNOWN_PATHS)(self._match)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxies.apply(scope)
        raw_path: bytes = scope["raw_path"]
        path: str = scope["path"]
        if b"%2" in raw_path and b"%2f" in raw_path.lower():  # decoded, it would be a path separator
            scope["path"] = raw_path.decode("ascii")
            found = None
        else:
            found = (self._find if len(path) <= _KNOWN_LENGTH else self._match)(scope["method"], path)
        if found is None:
            await self._not_found(_Request(scope))(scope, receive, send)
        else:
            endpoint, scope["path_params"] = found
            await endpoint(scope, receive, send)

    def _match(self, method: str, path: str) -> tuple[_Endpoint, dict[str, Any]] | None:
        scope = {"type": "http", "method": method, "path": path}
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found["endpoint"], found["path_params"]
        return None

    def _not_found(self, request: Request) -> Response:
        """Answer a path or a method that no verb has: an error for a program, or a page for a browser."""
        method, path = request.method, request.scope["path"]
        error = HttpError(404, "no-such-path", f"there is no {path}", hint=self._hint(path))
        if "%2f" not in path.lower() and (methods := self._methods(path)):
            allowed = ", ".join(methods)
            error = HttpError(405, "method", f"{method} is not for {path}", hint=allowed, headers={"Allow": allowed})
        response = failed(request, error) if HTML in request.headers.get("accept", "") else problem(error)
        response.headers.setdefault("cache-control", "no-store")
        self._state.counts.of_verb(_NO_VERB).count(response.status_code, 0.0)
        self._state.request_log.note(request.scope, response, 0.0)
        return response

    def _hint(self, path: str) -> str:
        if path.endswith("/") and self._methods(path.rstrip("/")):
            return f"{path.rstrip('/')}, without a slash at its end"
        return "/openapi.json says what there is"

    def _methods(self, path: str) -> list[str]:
        """Return the methods of a path; nothing if no verb has the path."""
        scope = {"type": "http", "method": "", "path": path}
        found = [route.methods or () for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return sorted({method for methods in found for method in methods})


class _ExactRoute(Route):
    """A path and no other; Starlette also accepts one with a newline at its end, which could pass a proxy's rule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


class _Request(Request):
    """A request with a dict of its headers, which Starlette would scan for each look-up."""

    @cached_property
    def headers(self) -> Headers:
        return _Headers(scope=self.scope)


class _Headers(Headers):
    """Headers by name; of several with one name the first is found, as in Starlette."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self._list)}

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower()]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._first

    def get(self, key: str, default: Any = None) -> Any:
        return self._first.get(key.lower(), default)

    def getlist(self, key: str) -> list[str]:
        return super().getlist(key) if key in self else []


@dataclass(frozen=True)
class _Endpoint:
    """Answers the requests for one verb, and counts them."""

    verb: Verb
    state: State
    answered: Answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request, state = _Request(scope, receive), self.state
        try:
            response = await self._answer(request)
            if may_compress(response) and wants_gzip(request):
                await state.in_thread(compress, response)
            seconds = time.perf_counter() - began
            if not any(name == b"cache-control" for name, _ in response.raw_headers):
                response.raw_headers.append(_NOT_CACHED)  # true only now, and for one client
            self.answered.count(response.status_code, seconds)
            state.request_log.note(scope, response, seconds)
            try:
                await response(scope, receive, send)
            except (WaldError, OSError) as error:  # in the middle of it: a normal end would look complete
                seconds = time.perf_counter() - began
                state.counts.broken_answers += 1
                state.request_log.note(scope, response, seconds, broken=str(error))
                scope[BREAK_OFF]()
                await wait_for_disconnect(request)
        except asyncio.CancelledError:  # the gate stops, and has closed the connection
            return
        finally:
            if ALLOWANCE in scope:
                scope[ALLOWANCE].end()

    async def _answer(self, request: Request) -> Response:
        """Authenticate, check the rights and the limits, and call the handler."""
        verb, state, scope = self.verb, self.state, request.scope
        client, has_session = _NOBODY, False
        try:
            require_own_page(request)
            if verb.right is not Right.NONE:
                require_own_name(request, state.limits.hosts, guarded=state.rights.are_asked_for)
                client, has_session = state.admission.client(request)
                scope[CLIENT] = client.name
                scope[ALLOWANCE] = state.allowances.begin(payer(client, request))
                state.admission.require(client, verb.right, request)
                await state.readiness.require_same_log()
            call = Call(request, client, state, verb.right, has_session)
            if verb.query is None and verb.path.startswith(_API):
                call.require_no_query()
            return await verb.handle(call)
        except (WaldError, OSError) as error:
            call = Call(request, client, state, verb.right, has_session)
            response = verb.failed(request, call.shown(error))
            if response.status_code == 500 and not isinstance(error, WaldError):  # the answer does not name the bug
                _log.exception("%s %s", verb.method, verb.path)
            return response
        except ClientDisconnect:
            return Response(status_code=499)  # it is not sent
        except Exception as error:  # noqa: BLE001 - a bug: the client gets an answer, and the log shows it
            _log.exception("%s %s", verb.method, verb.path)
            return verb.failed(request, error)


_GET, _POST = "GET", "POST"


async def _describe(_: Call) -> Response:
    """Answer with the OpenAPI document."""
    return Response(_description(), media_type=JSON)


@cache  # every client may ask for it, and making it takes some milliseconds
def _description() -> bytes:
    return encoded(document(VERBS))


VERBS: tuple[Verb, ...] = (
    Verb(
        _POST,
        "/v1/routes/{route}/records",
        "append",
        "Store records; the response follows once they are on disk.",
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
        "The records of a route, starting at a position; with follow=1, later ones too.",
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
        "The position of a group on a route.",
        Right.LOOK,
        info.get_cursor,
        answers={JSON: Cursor},
        statuses=(404,),
    ),
    Verb(
        "PUT",
        "/v1/routes/{route}/cursors/{group}",
        "set_cursor",
        "Set the position of a group on a route.",
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
                "Lease records of a route that no other worker of the group has.",
                work.lease,
                shapes.Lease,
                shapes.Leased,
            ),
            ("ack", "Acknowledge processed records.", work.ack, shapes.Ack, shapes.Settled),
            ("nack", "Return records for redelivery.", work.nack, shapes.Nack, shapes.Settled),
            ("extend", "Extend the lease of records.", work.extend, shapes.Extend, shapes.Settled),
            ("release", "Revoke the leases of a worker.", work.release, shapes.Release, shapes.Released),
        )
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/groups",
        "groups",
        "The groups of a route, with their positions.",
        Right.READ,
        work.groups,
        answers={JSON: schema.GroupsOfRoute},
        statuses=(404,),
    ),
    Verb(
        "DELETE",
        "/v1/routes/{route}/groups/{group}",
        "remove_group",
        "Remove a group, which then pins no records.",
        Right.WORK,
        work.remove,
        answers={JSON: shapes.Removed},
        statuses=(404, 409, 423),
    ),
    Verb(
        _GET,
        "/v1/routes/{route}/groups/{group}/pending",
        "pending",
        "Records of a group that are leased, wait, or are being given up.",
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
        "The routes, with the positions of their groups.",
        Right.KNOWN,
        info.routes,
        answers={JSON: schema.Routes},
    ),
    Verb(
        _POST,
        "/v1/routes/{route}",
        "add_route",
        "Create a route, or reactivate a retired one.",
        Right.ADMIN,
        info.add_route,
        answers={JSON: shapes.RouteMade},
        statuses=(409,),
    ),
    Verb(
        _GET,
        "/v1/head",
        "head",
        "The durable head of the log.",
        Right.KNOWN,
        info.head,
        answers={JSON: schema.Head},
        statuses=(404,),
    ),
    Verb(
        _GET,
        "/v1/where/{sequence}",
        "where",
        "The fate of a record.",
        Right.ADMIN,
        info.where,
        answers={JSON: schema.Where},
    ),
    Verb(
        _GET,
        "/v1/explain",
        "explain",
        "The bytes that each group pins.",
        Right.ADMIN,
        info.explain,
        answers={JSON: list[schema.Explained], NDJSON: list[schema.Explained]},
    ),
    Verb(_POST, "/v1/cut", "cut", "Cut the active segment.", Right.ADMIN, info.cut, answers={JSON: shapes.Cut}),
    Verb(_GET, "/healthz", "healthz", "Liveness of the gate.", Right.NONE, info.healthz, answers={JSON: Health}),
    Verb(
        _GET,
        "/readyz",
        "readyz",
        "Readiness: the log is readable and its daemon responds; otherwise 503 with the reason.",
        Right.NONE,
        info.readyz,
        answers={JSON: Health},
    ),
    Verb(
        _GET,
        "/metrics",
        "metrics",
        "The metrics of the gate, for Prometheus.",
        Right.KNOWN,
        info.metrics,
        answers={"text/plain": None},
    ),
    Verb(_GET, "/openapi.json", "openapi", "This document.", Right.NONE, _describe, answers={JSON: dict}),
)

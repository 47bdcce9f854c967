"""The application: finds the verb of a request, asks who it is and whether they may, and answers errors as problems."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from wald.errors import WaldError
from wald_gate.call import Call, payer
from wald_gate.compression import compressed
from wald_gate.http.connection import BREAK_OFF
from wald_gate.info.monitoring import Answered, Sent
from wald_gate.limits import ALLOWANCE
from wald_gate.page.frame import HTML, failed
from wald_gate.presence import gone
from wald_gate.problems import HttpError, problem
from wald_gate.rights.clients import Client, Right
from wald_gate.rights.forwarded import TrustedProxies
from wald_gate.rights.origins import require_own_name, require_own_page
from wald_gate.state import State
from wald_gate.verbs import Verb

_CLIENT = "wald.client"  # in the scope: the name of who asks
_API = "/v1/"
_NO_VERB = "none"
_NOBODY = Client("anyone")  # who asks for what needs no right
_KNOWN_PATHS, _KNOWN_LENGTH = 1024, 512
_log = logging.getLogger("wald_gate")


class Application:
    """The ASGI application of a gate.

    Starlette compares a path with that of each verb, behind two layers that catch errors. What it has found for the
    paths that were asked for last is kept.
    """

    def __init__(self, state: State, verbs: Iterable[Verb], proxies: TrustedProxies) -> None:
        self._proxies = proxies
        self._routes = [
            _Exact(
                verb.path,
                _Endpoint(verb, state, state.counts.of_verb(verb.name)),
                methods=[verb.method],
                name=verb.name,
            )
            for verb in verbs
        ]
        self._not_there = partial(_not_there, state, self._routes)
        self._otherwise = Starlette(routes=self._routes, exception_handlers={HTTPException: self._not_there})
        self._otherwise.router.redirect_slashes = False  # who does not follow it would take it for done
        self._known = lru_cache(_KNOWN_PATHS)(self._find)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxies.apply(scope)
        raw_path: bytes = scope["raw_path"]
        if b"%2" in raw_path and b"%2f" in raw_path.lower():  # decoded, it would be a path separator
            scope["path"] = raw_path.decode("ascii")
            response = await self._not_there(Request(scope), HTTPException(404))
            await response(scope, receive, send)
            return
        path = scope["path"]
        found = self._known(scope["method"], path) if len(path) <= _KNOWN_LENGTH else None
        if found is None:
            await self._otherwise(scope, receive, send)
        else:
            endpoint, scope["path_params"] = found
            await endpoint(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[_Endpoint, dict[str, Any]] | None:
        scope = {"type": "http", "method": method, "path": path}
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found["endpoint"], found["path_params"]
        return None


class _Exact(Route):
    """A path and no other; that of Starlette may have a newline behind it, which would pass by a rule of a proxy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


class _Request(Request):
    """A request whose headers are looked up in a dict; Starlette goes through all of them for each look-up."""

    @cached_property
    def headers(self) -> Headers:
        return _Headers(scope=self.scope)


class _Headers(Headers):
    """Of several with one name, the first one is found, as Starlette does."""

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
        request = _Request(scope, receive)
        try:
            response = await compressed(request, await self._answer(request), self.state)
            seconds = time.perf_counter() - began
            response.headers.setdefault("cache-control", "no-store")  # true only now, and for one client
            self.answered.count(response.status_code, seconds)
            sent = Sent.of(scope, scope.get(_CLIENT, ""))
            self.state.request_log.note(sent, response, seconds)
            try:
                await response(scope, receive, send)
            except (WaldError, OSError) as error:  # in the middle of it: an end would pass for that of the records
                seconds = time.perf_counter() - began
                self.state.counts.broken_answers += 1
                self.state.request_log.note_broken(sent, response.status_code, seconds, str(error))
                scope[BREAK_OFF]()
                await gone(request)
        except asyncio.CancelledError:  # the gate ends, and has closed the connection
            return
        finally:
            if ALLOWANCE in scope:
                scope[ALLOWANCE].end()

    async def _answer(self, request: Request) -> Response:
        client, has_session, admission = _NOBODY, False, self.state.admission
        try:
            require_own_page(request)
            if self.verb.right is not Right.NONE:
                require_own_name(request, self.state.limits.hosts, guarded=self.state.rights.are_asked_for)
                client, has_session = admission.client(request)
                request.scope[_CLIENT] = client.name
                request.scope[ALLOWANCE] = self.state.allowances.begin(payer(client, request))
                admission.require(client, self.verb.right, request)
                await self.state.readiness.require_same_log()
            call = Call(request, client, self.state, self.verb.right, has_session)
            if self.verb.query is None and self.verb.path.startswith(_API):
                call.require_no_query()
            return await self.verb.handle(call)
        except (WaldError, OSError) as error:
            call = Call(request, client, self.state, self.verb.right, has_session)
            response = self.verb.failed(request, call.shown(error))
            if response.status_code == 500 and not isinstance(error, WaldError):  # the answer does not say which it is
                _log.exception("%s %s", self.verb.method, self.verb.path)
            return response
        except ClientDisconnect:
            return Response(status_code=499)  # it is not sent
        except Exception as error:  # noqa: BLE001 - the client gets an answer, and the log says which bug it is
            _log.exception("%s %s", self.verb.method, self.verb.path)
            return self.verb.failed(request, error)


async def _not_there(state: State, routes: Sequence[Route], request: Request, error: Exception) -> Response:
    """A path or a method that no verb has."""
    assert isinstance(error, HTTPException)
    response = _nothing(routes, request, error)
    response.headers.setdefault("cache-control", "no-store")
    state.counts.of_verb(_NO_VERB).count(response.status_code, 0.0)
    state.request_log.note(Sent.of(request.scope), response, 0.0)
    return response


def _nothing(routes: Sequence[Route], request: Request, error: HTTPException) -> Response:
    """An error for a program, or a page for a person."""
    path = request.url.path
    hint, plain = "/openapi.json says what there is", {**request.scope, "path": path.rstrip("/")}
    if path.endswith("/") and any(route.matches(plain)[0] is not Match.NONE for route in routes):
        hint = f"{plain['path']}, without a slash at its end"
    found = HttpError(404, "no-such-path", f"there is no {path}", hint=hint)
    if error.status_code == 405:
        here = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for methods in here for method in methods}))
        found = HttpError(
            405, "method", f"{request.method} is not for {path}", hint=allowed, headers={"Allow": allowed}
        )
    return failed(request, found) if HTML in request.headers.get("accept", "") else problem(found)

"""The parts of a running gate, its requests, and the verbs that handle them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from wald.errors import InvalidInput, NotFound
from wald.format.names import check_group, check_route
from wald.log import Log
from wald.setting_types import duration
from wald.status.findings import socket_of
from wald.status.schema import Head
from wald_gate.auth.clients import ANYONE, PEER, Admission, Rights, TrustedProxies
from wald_gate.auth.tokens import Client, Right
from wald_gate.groups.hosting import Groups
from wald_gate.groups.waits import Processed
from wald_gate.http.exchange import Exchange
from wald_gate.info.monitoring import Counts, Readiness, RequestLog
from wald_gate.limits import Allowances, ConnectionPool, Limits
from wald_gate.page.snapshot import SnapshotPublisher
from wald_gate.problems import HttpError, for_client, problem, without_machine, without_path
from wald_gate.records_in.daemon import DaemonClient
from wald_gate.records_in.publisher import IdempotentPublisher
from wald_gate.records_out.threads import HeadWatcher, ReadThreads, SharedRead
from wald_gate.settings import Settings
from wald_gate.shapes import encoded

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", bound=Struct)
_WHOLE = re.compile(r"-?[0-9]{1,40}", re.ASCII)
_WAIT = duration(0, 300)
_SOME_ROOT = "ROOT"
_PATIENCE_SECONDS = 15.0  # for the daemon
_CHARSET = re.compile(r';[ \t]*charset="?([^";,\s]*)', re.IGNORECASE)
_PLACE = re.compile(r" - at `\$\.(\w+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MANY = 1 << 53  # an upper bound above this means nothing to a person
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}
JSON = "application/json"
NDJSON = "application/x-ndjson"
ANY = ("*/*", "application/*")
"""Media ranges of an Accept header that include those above."""


class State:
    """The parts of a gate, shared by all requests."""

    def __init__(self, log: Log, settings: Settings, threads: ThreadPoolExecutor, readers: ReadThreads) -> None:
        socket = socket_of(log.root)
        self.log = log
        self.threads = threads  # for disk access other than reading records
        self.readers = readers
        self.head = SharedRead(self._read_head, threads)
        self.rights = Rights(Path(settings.tokens) if settings.tokens else None)
        self.admission = Admission(self.rights, log.identity.log_id)
        self.limits = Limits(settings.limits, settings.hosts)
        self.allowances = Allowances(self.limits)
        self.proxies = TrustedProxies(settings.trusted_proxies)
        self.pool = ConnectionPool(settings.limits, is_proxy=self.proxies.has)
        self.counts = Counts()
        self.readiness = Readiness(log, socket)
        self.request_log = RequestLog(every=settings.log_requests)
        self.daemon = DaemonClient(log.root.path, socket, patience=_PATIENCE_SECONDS, require=log.require_continuity)
        self.idempotent = IdempotentPublisher(log, self.daemon)
        self.following = HeadWatcher(log)
        self.watching = SnapshotPublisher(log)
        self.groups = Groups(log, settings.groups)
        self.processed = Processed(log, threads)

    async def in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a short disk access, or one that belongs to a write, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, partial(call, *args, **kwargs))

    def _read_head(self) -> Head:
        found = self.log.head()
        if found is None:
            raise NotFound(f"{self.log.root.head}: no record is durable yet", hint="POST a record")
        return Head.of(self.log.root, found)


@dataclass
class Call:
    """One request of a client."""

    request: Exchange
    client: Client
    state: State
    right: Right  # that its verb requires
    has_session: bool = False  # the session of a browser authenticates the client
    edition: int = field(kw_only=True)  # of the rights that admitted it; a response without an end ends with that

    @property
    def route(self) -> str:
        """The route in the path; InvalidInput if no route can have that name."""
        return check_route(self.request.path_params["route"])

    @property
    def group(self) -> str:
        """The group in the path; InvalidInput if no group can have that name."""
        return check_group(self.request.path_params["group"])

    @property
    def payer(self) -> str:
        """The client whose limits and reading turn the request uses.

        Anonymous clients, which share a name, are identified by their address.
        """
        address = self.request.scope["client"] if self.client is ANYONE else None
        return self.client.name if address is None else str(address[0])

    async def read(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that reads the log, in a thread, when it is the client's turn."""
        return await self.state.readers.run(self.payer, partial(call, *args, **kwargs))

    async def walk(self, way: Generator[None, None, T]) -> T:
        """Read the log in steps; see :meth:`ReadThreads.walk`."""
        return await self.state.readers.walk(self.payer, way)

    @property
    def root(self) -> str:
        """The path of the log in commands for this client; a placeholder if the client may not know it."""
        return os.fspath(self.state.log.root.path) if self.client.admin else _SOME_ROOT

    def shown(self, error: Exception) -> Exception:
        """Return the error that this client may see."""
        route = self.request.path_params.get("route")
        return for_client(error, self.state.log.root, route, is_admin=self.client.admin)

    def words(self, text: str) -> str:
        """Return a text about the log; without the path of the root, unless this client may know it."""
        return text if self.client.admin else without_path(text, self.state.log.root)

    def seen(self, found: object) -> object:
        """Return an answer; only admins and clients on this machine get paths and commands."""
        if self.client.admin or PEER in self.request.scope:
            return found
        return without_machine(found, self.state.log.root)

    def reauthorize(self) -> None:
        """Check a request's rights again after a wait; raise HttpError 401 or 403 if they were lost."""
        self.state.admission.reauthorize(self.request, self.right)

    @property
    def content_type(self) -> tuple[str, str]:
        """Media type and charset of the body, or ""."""
        return _content_type(self.request.headers.get("content-type", ""))

    @property
    def accepts(self) -> list[str]:
        """Media types that the client accepts, in its order of preference."""
        given = self.request.headers.get("accept", "*/*")
        return [each.partition(";")[0].strip().lower() for each in given.split(",")]

    def require_no_query(self) -> None:
        if self.request.scope["query_string"]:
            name = next(iter(self.request.query_params), "")
            message = f"the query: unknown parameter {name[:40]!r}; this request takes none"
            raise InvalidInput(message, hint="see /openapi.json")

    def query(self, shape: type[S]) -> S:
        """Parse the query parameters. A missing one is UNSET, as a client can send null."""
        if not self.request.scope["query_string"]:
            empty: S = _without_parameters(shape)
            return empty
        given: dict[str, Any] = {}
        for name, value in self.request.query_params.multi_items():
            if name in given:
                raise InvalidInput(f"{name} occurs twice in the query", hint=f"?{name}={value}")
            # msgspec accepts 1e3 and null.
            given[name] = "no number" if name in _numbers(shape) and not _WHOLE.fullmatch(value) else value
        try:
            return msgspec.convert(given, shape, strict=False)
        except msgspec.ValidationError as error:
            reason = describe_validation_error(error, shape)
            raise InvalidInput(f"the query: {reason}", hint="see /openapi.json") from None

    async def body(self, shape: type[T]) -> T:
        media_type, _ = self.content_type
        if media_type not in ("", JSON):
            raise HttpError(415, "media-type", f"{media_type}: the body must be JSON", hint=f"Content-Type: {JSON}")
        data = await self.request.read(self.state.limits.settings.json_max_bytes)
        try:
            return msgspec.json.decode(data, type=shape)
        except msgspec.ValidationError as error:
            reason = describe_validation_error(error, shape)
            raise InvalidInput(f"the body: {reason}", hint="see /openapi.json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body: {error}", hint="see /openapi.json") from None


Handle = Callable[[Call], Awaitable[Response]]
Fail = Callable[[Request, Exception], Response]


def listing(call: Call) -> tuple[str, Callable[[Iterable[Any]], bytes]]:
    """Return the media type of a list for this client, and the function that encodes it: as an array or as lines."""
    if next((each for each in call.accepts if each in (JSON, NDJSON, *ANY)), NDJSON) == JSON:
        return JSON, lambda items: b"[%b]\n" % b",\n".join(map(encoded, items))
    return NDJSON, lambda items: b"".join(encoded(each) + b"\n" for each in items)


@dataclass(frozen=True)
class Verb:
    """An operation: a method on a path, with the right it requires and the shapes of its request and response.

    The application and the OpenAPI document are both made from the table of verbs.
    """

    method: str
    path: str  # with ``{route}``, ``{group}`` and ``{sequence}``
    name: str  # the operation in generated clients
    summary: str
    right: Right
    handle: Handle
    query: type[Struct] | None = None
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of requests, with their schemas
    body: Mapping[str, Any] = field(default_factory=dict)  # shape by media type; None for bytes
    answers: Mapping[str, Any] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()  # of errors, in addition to those of every verb
    failed: Fail = lambda _, error: problem(error)  # to a program


_without_parameters = lru_cache(64)(partial(msgspec.convert, {}))  # by shape


@lru_cache(64)
def _content_type(given: str) -> tuple[str, str]:
    """Return the media type and the charset of a Content-Type."""
    charset = _CHARSET.search(given)
    return given.partition(";")[0].strip().lower(), charset[1].lower() if charset else ""


@lru_cache(64)
def _numbers(shape: type[Struct]) -> frozenset[str]:
    """Return the names of the fields that are whole numbers."""
    info = msgspec.inspect.type_info(shape)
    assert isinstance(info, msgspec.inspect.StructType)
    kinds = {each.encode_name: getattr(each.type, "types", (each.type,)) for each in info.fields}
    return frozenset(n for n, of in kinds.items() if any(isinstance(kind, msgspec.inspect.IntType) for kind in of))


@lru_cache(64)
def wait_seconds(given: str) -> float:
    """Parse ``wait=30s``; InvalidInput if it is invalid or too long."""
    try:
        return float(_WAIT.parse(given))
    except ValueError as error:
        raise InvalidInput(f"wait must be {error}", hint="wait=30s") from None


def describe_validation_error(error: msgspec.ValidationError, shape: type) -> str:
    """Describe an invalid parameter or field in JSON terms; msgspec names Python types.

    For an error in a nested field, the message is msgspec's.
    """
    (reference,), components = msgspec.json.schema_components([shape])
    fields = components[reference["$ref"].rpartition("/")[2]]["properties"]
    if unknown := _UNKNOWN.match(str(error)):
        return f"unknown field {unknown[1][:40]!r}; valid fields are {', '.join(fields)}"
    place = _PLACE.search(str(error))
    expected = _expected(fields.get(place[1], {})) if place else ""
    return f"{place[1]} is {expected}" if place and expected else str(error)


def _expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("type") not in _TYPES:
        return " or ".join(filter(None, map(_expected, schema.get("anyOf", ()))))
    kind, least, most = _TYPES[schema["type"]], schema.get("minimum"), schema.get("maximum")
    if "maxLength" in schema:
        return f"{kind} of at most {schema['maxLength']} characters"
    if least is None:
        return kind
    return f"{kind}, {least} or more" if most is None or most > _MANY else f"{kind} from {least} to {most}"

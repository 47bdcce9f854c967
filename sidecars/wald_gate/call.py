"""A request on its way through the gate: what is asked, who asks, and what the gate has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from wald.errors import InvalidInput
from wald.format.names import check_group, check_route
from wald.setting_types import duration
from wald_gate.problems import HttpError, for_client, without_machine, without_path
from wald_gate.rights.clients import ANYONE, PEER, Client, Right
from wald_gate.state import State
from wald_gate.words import in_words

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", bound=Struct)
_WHOLE = re.compile(r"-?[0-9]{1,40}", re.ASCII)
_WAIT = duration(0, 300)
_SOME_ROOT = "ROOT"
_CHARSET = re.compile(r';[ \t]*charset="?([^";,\s]*)', re.IGNORECASE)
_SHAPES = "see /openapi.json"


@dataclass
class Call:
    """One request.

    Attributes:
        request: as Starlette has it.
        client: who asks.
        state: of the gate.
        right: that it needs.
        has_session: whether a session of a browser says who asks.
        edition: of the rights by which it was admitted; what goes on without an end ends with it.
    """

    request: Request
    client: Client
    state: State
    right: Right
    has_session: bool = False
    edition: int = field(init=False)

    def __post_init__(self) -> None:
        self.edition = self.state.rights.edition

    @cached_property
    def route(self) -> str:
        """The route in the path.

        Raises:
            InvalidInput: a name that no route can have.
        """
        return check_route(self.request.path_params["route"])

    @cached_property
    def group(self) -> str:
        """The group in the path.

        Raises:
            InvalidInput: a name that no group can have.
        """
        return check_group(self.request.path_params["group"])

    @property
    def payer(self) -> str:
        """Client whose limits the request counts against, and whose turn to read it takes."""
        return payer(self.client, self.request)

    async def read(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read the log in a thread when it is the client's turn."""
        return await self.state.readers.run(self.payer, partial(call, *args, **kwargs))

    async def walk(self, way: Generator[None, None, T]) -> T:
        """Read the log in steps; see :meth:`ReadThreads.walk`."""
        return await self.state.readers.walk(self.payer, way)

    @property
    def root(self) -> str:
        """The path of the log, in commands for this client; a word for it, if the client may not know it."""
        return os.fspath(self.state.log.root.path) if self.client.admin else _SOME_ROOT

    def shown(self, error: Exception) -> Exception:
        """An error, as this client gets it."""
        route = self.request.path_params.get("route")
        return for_client(error, self.state.log.root, route, is_admin=self.client.admin)

    def words(self, text: str) -> str:
        """Return a text about the log for this client, without the path of the root unless the client may know it."""
        return text if self.client.admin else without_path(text, self.state.log.root)

    def seen(self, found: object) -> object:
        """An answer, as this client gets it: paths and commands are for who runs the log, or is on its machine."""
        if self.client.admin or PEER in self.request.scope:
            return found
        return without_machine(found, self.state.log.root)

    def judge(self) -> None:
        """Judge the request again, which has waited, before it gets what has come meanwhile.

        Raises:
            HttpError: 401, 403, it would not be admitted now.
        """
        self.state.admission.judge(self.request, self.right)

    @property
    def media_type(self) -> str:
        """Of the body, without its parameters; "" if it is not said."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def charset(self) -> str:
        """Of the body, as its media type says; "" if it does not."""
        found = _CHARSET.search(self.request.headers.get("content-type", ""))
        return found[1].lower() if found else ""

    @property
    def accepts(self) -> list[str]:
        """Media types that the client accepts, in the order in which it names them."""
        given = self.request.headers.get("accept", "*/*")
        return [each.partition(";")[0].strip().lower() for each in given.split(",")]

    def require_no_query(self) -> None:
        """
        Raises:
            InvalidInput: there are parameters behind the ``?``.
        """
        if self.request.scope["query_string"]:
            name = next(iter(self.request.query_params), "")
            raise InvalidInput(f"the query: unknown parameter {name[:40]!r}; there are none", hint=_SHAPES)

    def query(self, shape: type[S]) -> S:
        """The parameters behind the ``?``; UNSET is what is not there, as None could be sent: "null".

        Raises:
            InvalidInput: one is unknown, is there twice, or is no such value.
        """
        given: dict[str, Any] = {}
        has_query = bool(self.request.scope["query_string"])
        for name, value in self.request.query_params.multi_items() if has_query else ():
            if name in given:
                raise InvalidInput(f"{name} occurs twice in the query", hint=f"?{name}={value}")
            # Not 1e3, nor null.
            given[name] = "no number" if name in _numbers(shape) and not _WHOLE.fullmatch(value) else value
        try:
            return msgspec.convert(given, shape, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the query: {in_words(error, shape)}", hint="see /openapi.json") from None

    async def body(self, shape: type[T]) -> T:
        """The body, which is JSON.

        Raises:
            HttpError: 413, it is too large; 415, it says that it is something else.
            InvalidInput: it is no JSON, or of another shape.
        """
        if self.media_type not in ("", "application/json"):
            raise HttpError(
                415, "media-type", f"{self.media_type}: this takes JSON", hint="Content-Type: application/json"
            )
        data = await self.state.limits.read(self.request)
        try:
            return msgspec.json.decode(data, type=shape)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the body: {in_words(error, shape)}", hint="see /openapi.json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body: {error}", hint=_SHAPES) from None


def payer(client: Client, request: Request) -> str:
    """Return the name of a client; anonymous clients, which share a name, are identified by their address."""
    return request.client.host if client is ANYONE and request.client is not None else client.name


@lru_cache(64)
def _numbers(shape: type[Struct]) -> frozenset[str]:
    """The fields of a shape that are whole numbers; msgspec would take 1e3 for one."""
    info = msgspec.inspect.type_info(shape)
    assert isinstance(info, msgspec.inspect.StructType)
    kinds = {each.encode_name: getattr(each.type, "types", (each.type,)) for each in info.fields}
    return frozenset(n for n, of in kinds.items() if any(isinstance(kind, msgspec.inspect.IntType) for kind in of))


@lru_cache(64)
def wait_seconds(given: str) -> float:
    """How long a client wants to wait, as ``wait=30s`` says it.

    Raises:
        InvalidInput: it is no such time, or too long.
    """
    try:
        seconds: float = _WAIT.parse(given)
    except ValueError as error:
        raise InvalidInput(f"wait must be {error}", hint="wait=30s") from None
    return seconds

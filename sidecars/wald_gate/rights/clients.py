"""Who asks, and what they may: by a token, by the user at the other end of a unix socket, or as anyone on loopback."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from wald.errors import InvalidInput, user_name
from wald_gate.problems import HttpError

PEER = "wald.peer"  # in the scope of a request: the number of the user at the other end of a unix socket
_SCHEME = "bearer "
_EXAMPLE = '{"name": "shop", "sha256": "…", "read": ["orders"], "write": ["orders"]}'


class Right(Enum):
    """What a client needs for a verb."""

    NONE = "nothing"
    KNOWN = "a token, whatever its routes"
    READ = "to read the route"
    WRITE = "to write to the route"
    ADMIN = "to administer the log"


@dataclass(frozen=True)
class Client:
    """Who asks.

    Attributes:
        name: of the token or the user; the gate writes it into its log.
        reads, writes: patterns of routes, as ``orders`` or ``app.*``.
        admin: whether it may do everything, such as make routes and cut.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    admin: bool = False

    def may(self, right: Right, route: str | None) -> bool:
        """Whether it has a right, on ``route`` where that matters."""
        match right:
            case Right.READ:
                return self.may_read(route or "")
            case Right.WRITE:
                return self.admin or _matches(self.writes, route or "")
            case Right.ADMIN:
                return self.admin
        return True

    def may_read(self, route: str) -> bool:
        """Whether it may see a route and its records; who may write to a route may not for that."""
        return self.admin or _matches(self.reads, route)


ANYONE = Client("anyone", admin=True)
"""Who asks on loopback where there are no tokens: every user of this machine."""


class Rights:
    """Which clients the file of tokens names.

    Args:
        path: the file, of a JSON object a line; None: there is none, and everyone is admitted.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokens: dict[bytes, Client] = {}
        self._users: dict[str, Client] = {}
        self.read()

    def read(self) -> None:
        """Read the file again; if it is wrong, what was known goes on.

        Raises:
            InvalidInput: a line is wrong.
            OSError: it cannot be read.
        """
        if self._path is None:
            return
        tokens: dict[bytes, Client] = {}
        users: dict[str, Client] = {}
        for number, line in enumerate(self._path.read_text().splitlines(), start=1):
            try:
                entry = json.loads(line)
                client = _client(entry)
                if "user" in entry:
                    users[entry["user"]] = client
                else:
                    tokens[bytes.fromhex(entry["sha256"])] = client
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidInput(f"{self._path}:{number}: no token of wald-gate ({error!r})", hint=_EXAMPLE) from None
        self._tokens, self._users = tokens, users

    def client(self, authorization: str | None, user: int | None) -> Client:
        """Who asks.

        Args:
            authorization: the header of that name.
            user: the number of the user at the other end of a unix socket.

        Raises:
            HttpError: 401, it is not said, or the token is not known.
        """
        if authorization is not None:
            return self._of_token(authorization)
        if user is not None:
            return self._of_user(user)
        if self._path is None:
            return ANYONE
        raise _unknown("there is no token in the request")

    def _of_token(self, authorization: str) -> Client:
        if self._path is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise _unknown("this is no bearer token" if self._path else "this gate has no file of tokens")
        digest = digest_of(authorization[len(_SCHEME) :].strip())
        found = None
        for known, client in self._tokens.items():  # all of them, so that the time shows nothing
            if hmac.compare_digest(known, digest):
                found = client
        if found is None:
            raise _unknown("the token is not known")
        return found

    def _of_user(self, user: int) -> Client:
        name = user_name(user)
        if user in (0, os.geteuid()):
            return Client(name, admin=True)
        if name in self._users:
            return self._users[name]
        raise HttpError(
            403,
            "not-permitted",
            f"user {name} has no right here",
            hint=f'{{"name": "{name}", "user": "{name}", "read": ["ROUTE"]}} in the file of --tokens',
        )


def digest_of(token: str) -> bytes:
    """What is kept of a token. It has 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(token.encode()).digest()


def _client(entry: Mapping[str, Any]) -> Client:
    reads, writes, admin = entry.get("read", []), entry.get("write", []), entry.get("admin", False)
    if not isinstance(admin, bool) or not all(isinstance(each, str) for each in (*reads, *writes)):
        raise TypeError("read and write are lists of routes, admin is true or false")
    return Client(str(entry["name"]), tuple(reads), tuple(writes), admin)


def _matches(patterns: Iterable[str], route: str) -> bool:
    return any(fnmatchcase(route, pattern) for pattern in patterns)


def _unknown(why: str) -> HttpError:
    return HttpError(
        401,
        "unauthorized",
        why,
        hint="Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": 'Bearer realm="wald"'},
    )

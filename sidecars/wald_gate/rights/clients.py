"""Who asks, and what they may: by a token, by the user at the other end of a unix socket, or as anyone on loopback."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from wald.hints import user_name
from wald_gate.problems import HttpError
from wald_gate.rights.tokens import digest_of, entries, is_user

CERTIFICATE = "wald.certificate"  # in the scope of a request: the common name of the client's
PEER = "wald.peer"  # in the scope of a request: the number of the user at the other end of a unix socket
_SCHEME = "bearer "


class Right(Enum):
    """What a client needs for a verb."""

    NONE = "nothing"
    KNOWN = "a token, whatever its routes"
    READ = "the right to read the route"
    WRITE = "the right to write to the route"
    LOOK = "the right to read the route, or to work for the group"
    WORK = "the right to work for the group"
    ADMIN = "the right to administer the log"

    def of(self, route: str | None, group: str | None = None) -> str:
        """It in words, with the route or the group that it is about, if it is about one."""
        if self in (Right.LOOK, Right.WORK) and route and group:
            return f"{self.value} {group} of route {route}"
        return f"{self.value} {route}" if route and self in (Right.READ, Right.WRITE) else self.value


@dataclass(frozen=True)
class Client:
    """Who asks.

    Attributes:
        name: of the token or the user; the gate writes it into its log.
        reads, writes: patterns of routes, as ``orders`` or ``app.*``.
        works: patterns of groups, as ``orders/packing``; ``orders`` are all groups of that route.
        admin: whether it may do everything, such as make routes and cut.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    works: tuple[str, ...] = ()
    admin: bool = False

    def may(self, right: Right, route: str | None, group: str | None = None) -> bool:
        """Whether it has a right, on ``route`` and ``group`` where those matter."""
        match right:
            case Right.READ:
                return self.may_read(route or "")
            case Right.WRITE:
                return self.admin or _matches(self.writes, route or "")
            case Right.LOOK:
                return self.may_read(route or "") or self._may_work(route or "", group or "")
            case Right.WORK:
                return self._may_work(route or "", group or "")
            case Right.ADMIN:
                return self.admin
        return True

    def may_read(self, route: str) -> bool:
        """Whether it may see a route and its records; who may write to a route may not for that."""
        return self.admin or _matches(self.reads, route)

    def _may_work(self, route: str, group: str) -> bool:
        patterns = (pattern.partition("/") for pattern in self.works)
        return self.admin or any(
            fnmatchcase(route, of_route) and fnmatchcase(group, of_group or "*") for of_route, _, of_group in patterns
        )


ANYONE = Client("anyone", admin=True)
"""Who asks on loopback where there are no tokens: every user of this machine."""


class Rights:
    """Which clients the file of tokens names.

    Args:
        path: the file, of a JSON object a line; None: there is none, and everyone is admitted.

    Attributes:
        edition: grows when the file says something else, or an authority is none any more; what goes on without an end
            was allowed by one edition, and ends with it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokens: dict[bytes, Client] = {}
        self._users: dict[str, Client] = {}
        self._certificates: dict[str, Client] = {}
        self.edition = 0
        self.read()

    @property
    def are_asked_for(self) -> bool:
        """Whether a client has to show who it is."""
        return self._path is not None

    def read(self) -> None:
        """Read the file again; if it is wrong, what was known goes on.

        Raises:
            InvalidInput: a line is wrong.
            OSError: it cannot be read.
        """
        if self._path is None:
            return
        found: dict[str, dict[str, Client]] = {"sha256": {}, "user": {}, "certificate": {}}
        for each in entries(self._path):
            found[each.way][each.known_by] = Client(each.name, each.reads, each.writes, each.works, each.admin)
        tokens = {bytes.fromhex(known): client for known, client in found["sha256"].items()}
        if (tokens, found["user"], found["certificate"]) != (self._tokens, self._users, self._certificates):
            self.edition += 1
        self._tokens, self._users, self._certificates = tokens, found["user"], found["certificate"]

    def unlikely(self) -> Iterator[str]:
        """What of the file is likely to be a mistake."""
        if self._path is not None and not (self._tokens or self._users or self._certificates):
            yield f"{self._path}: it names no client, so none may do anything over TCP"
        for name in self._users:
            if not is_user(name):
                yield f"{self._path}: there is no user {name!r} on this machine"

    def client(self, authorization: str | None, user: int | None, certificate: str | None = None) -> Client:
        """Who asks.

        Args:
            authorization: the header of that name; it comes first.
            user: the number of the user at the other end of a unix socket.
            certificate: the name in the client's certificate, which a trusted CA has signed.

        Raises:
            HttpError: 401, it is not said, or the token is not known.
        """
        if authorization is not None:
            return self._of_token(authorization)
        if user is not None:
            return self._of_user(user)
        if self._path is None:
            return ANYONE
        if certificate is not None:
            return self._of_certificate(certificate)
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

    def _of_certificate(self, name: str) -> Client:
        if name in self._certificates:
            return self._certificates[name]
        raise _unknown(
            f"the certificate of {name} gives no right here",
            hint='{"name": …, "certificate": NAME, "read": ["ROUTE"]} in the file of --tokens',
        )

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


def _matches(patterns: Iterable[str], route: str) -> bool:
    return any(fnmatchcase(route, pattern) for pattern in patterns)


def _unknown(why: str, *, hint: str = "Authorization: Bearer TOKEN") -> HttpError:
    return HttpError(
        401,
        "unauthorized",
        why,
        hint=hint,
        headers={"WWW-Authenticate": 'Bearer realm="wald"'},
    )

"""The token file: clients and their rights, one JSON object per line; read and replaced as a whole.

    {"name": "shop", "sha256": "…", "write": ["orders"]}
    {"name": "reports", "certificate": "reports.example", "read": ["orders", "app.*"]}
    {"name": "packer", "sha256": "…", "work": ["orders/packing"]}
    {"name": "ann", "user": "ann", "admin": true}

This module imports nothing that the extra ``gate`` installs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from wald.errors import InvalidInput, NotFound
from wald.files.disk import Disk

_EXAMPLE = '{"name": "shop", "sha256": "…", "read": ["orders"], "write": ["orders"]}'
_PREFIX = "wald_"  # recognised by secret scanners
_SECRET_BYTES = 32
_MODE = 0o600  # of a new file
_WAYS = ("sha256", "user", "certificate")
_KEYS = ("name", *_WAYS, "read", "write", "work", "admin")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,126}")
_PATTERN = r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,126}"
_ROUTES, _GROUPS = 'routes, as ["orders", "app.*"]', 'routes and groups, as ["orders", "app.*/packing"]'


class Right(Enum):
    """The right that a verb requires."""

    NONE = "nothing"
    KNOWN = "a token with any rights"
    READ = "the right to read the route"
    WRITE = "the right to write to the route"
    LOOK = "the right to read the route, or to work for the group"
    WORK = "the right to work for the group"
    ADMIN = "the right to administer the log"

    def of(self, route: str | None, group: str | None = None) -> str:
        """Describe the right, with the route or the group that it concerns."""
        if self in (Right.LOOK, Right.WORK) and route and group:
            return f"{self.value} {group} of route {route}"
        return f"{self.value} {route}" if route and self in (Right.READ, Right.WRITE) else self.value


@dataclass(frozen=True)
class Client:
    """A client and its rights."""

    name: str
    reads: tuple[str, ...] = ()  # patterns of routes, as ``orders`` or ``app.*``
    writes: tuple[str, ...] = ()
    works: tuple[str, ...] = ()  # patterns of groups, as ``orders/packing``; ``orders`` are all groups of that route
    admin: bool = False  # True for all rights, including ROUTE ADD and CUT
    way: str = ""  # how it authenticates: by a token (sha256), as a user of this machine, or by a certificate
    known_by: str = ""  # the digest in hexadecimal, the user, or the common name or only subjectAltName

    def may(self, right: Right, route: str | None, group: str | None = None) -> bool:
        if self.admin or right in (Right.NONE, Right.KNOWN):
            return True
        if right in (Right.READ, Right.LOOK) and _matches(self.reads, route):
            return True
        if right in (Right.WORK, Right.LOOK):
            works = (pattern.partition("/") for pattern in self.works)
            return any(_matches([of], route) and _matches([of_group or "*"], group) for of, _, of_group in works)
        return right is Right.WRITE and _matches(self.writes, route)

    def may_read(self, route: str) -> bool:
        """Return True if the client may read a route; the right to write does not include that."""
        return self.may(Right.READ, route)

    def line(self) -> bytes:
        rights = {"read": self.reads, "write": self.writes, "work": self.works, "admin": self.admin}
        fields = {"name": self.name, self.way: self.known_by} | {key: value for key, value in rights.items() if value}
        return json.dumps(fields).encode() + b"\n"


def clients_in(path: Path) -> list[Client]:
    """Read a token file; raise InvalidInput if a line is invalid or repeated, or other users may write the file."""
    try:
        data = read_secure_file(path)
    except FileNotFoundError:
        hint = f"wald-gate token add NAME --tokens {path} --read ROUTE creates it"
        raise NotFound(f"{path}: no such token file", hint=hint) from None
    return _parsed(path, data)


def add(path: Path, client: Client) -> str:
    """Add a client to a file, which is created if necessary; on disk when this returns.

    A client without a way to authenticate gets a token, which is returned and stored nowhere; others get "".
    """
    token = "" if client.way else _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    added = replace(client, way="sha256", known_by=digest_of(token)) if token else client
    with _changing(path) as found:
        if any(each.name == added.name for each in found):
            removing = f"wald-gate token remove {added.name} --tokens {path}"
            raise InvalidInput(f"{path}: client {added.name!r} already exists", hint=removing)
        data = b"".join(each.line() for each in (*found, added))
        _parsed(path, data)
        _replace(path, data)
    return token


def remove(path: Path, name: str) -> None:
    """Remove a client from a file, or raise NotFound; on disk when this returns."""
    with _changing(path) as found:
        kept = [each for each in found if each.name != name]
        if len(kept) == len(found):
            raise NotFound(f"{path}: there is no client {name!r}", hint=f"wald-gate token list --tokens {path}")
        _replace(path, b"".join(each.line() for each in kept))


def digest_of(token: str) -> str:
    """Return the digest of a token in the file. Tokens have 256 random bits, so a fast hash is safe."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def read_secure_file(path: Path) -> bytes:
    """Read a file that identifies clients and grants rights; InvalidInput if other users may write it."""
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            who = "every user" if mode & stat.S_IWOTH else "its group"
            raise InvalidInput(f"{path}: {who} may write it (mode {mode:04o})", hint=f"chmod go-w {path}")
        return file.read()


@contextmanager
def _changing(path: Path) -> Iterator[list[Client]]:
    """Yield the entries of a file while other processes cannot change it."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield clients_in(path) if path.exists() else []
    finally:
        os.close(directory)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file but keep its owner, group and mode, so that the user of a service can still read it."""
    if path.exists():
        status = path.stat()
        Disk().replace(path, data, mode=status.st_mode & 0o777, owner=status.st_uid, group=status.st_gid)
    else:
        Disk().replace(path, data, mode=_MODE)


def _parsed(path: Path, data: bytes) -> list[Client]:
    found: list[Client] = []
    seen: set[tuple[str, str]] = set()
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            client = _client(json.loads(line))
            for key in (("name", client.name), (client.way, client.known_by)):
                if key in seen:
                    raise ValueError(f"duplicate {key[0]} {key[1]!r}")
                seen.add(key)
        except ValueError as error:
            raise InvalidInput(f"{path}:{number}: not a token of wald-gate: {error}", hint=_EXAMPLE) from None
        found.append(client)
    return found


def _client(fields: object) -> Client:
    if not isinstance(fields, dict):
        raise ValueError("each line must be a JSON object")
    if unknown := fields.keys() - set(_KEYS):
        raise ValueError(f"unknown key {min(unknown)!r}; valid keys are {', '.join(_KEYS)}")
    ways = [way for way in _WAYS if way in fields]
    if len(ways) != 1:
        raise ValueError(f"each line needs exactly one of {', '.join(_WAYS)}")
    name, known_by, admin = fields.get("name"), fields[ways[0]], fields.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} may contain only letters, digits, '.', '_', '@' and '-'")
    if not isinstance(known_by, str) or not known_by:
        raise ValueError(f"{ways[0]} must be text")
    if ways[0] == "sha256":
        known_by = known_by.lower()
        if not re.fullmatch("[0-9a-f]{64}", known_by):
            raise ValueError("sha256 must have 64 hexadecimal digits")
    if not isinstance(admin, bool):
        raise ValueError("admin must be true or false")
    patterns = []
    for key, pattern, what in (
        ("read", _PATTERN, _ROUTES),
        ("write", _PATTERN, _ROUTES),
        ("work", f"{_PATTERN}(/{_PATTERN})?", _GROUPS),
    ):
        given = fields.get(key, [])
        if not isinstance(given, list) or not all(isinstance(x, str) and re.fullmatch(pattern, x) for x in given):
            raise ValueError(f"{key} must be a list of {what}, not {given!r}")
        patterns.append(tuple(given))
    reads, writes, works = patterns
    return Client(name, reads, writes, works, admin, ways[0], known_by)


def _matches(patterns: Iterable[str], name: str | None) -> bool:
    return any(fnmatchcase(name or "", pattern) for pattern in patterns)

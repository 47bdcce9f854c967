"""Settings of the gate, with type, default, bounds and help; from options, a file, or the caller.

The file uses the names of the options, and has two kinds of tables:

    listen = "127.0.0.1:7700"
    tokens = "/etc/wald/tokens"

    [limits]
    requests_per_second = 100

    [groups."orders/billing"]  # ROUTE/GROUP
    order = "key"

This module imports nothing that the extra ``gate`` installs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from wald.errors import InvalidInput
from wald.format.names import check_group, check_route
from wald.format.work import TRIES_MAX
from wald.setting_types import FLAG, GIB, KIB, MIB, choice, count, duration, names, size, text
from wald.settings import SettingFile, parse_setting, setting, setting_types
from wald.work.group import DEAD_LETTER, WINDOW

_HELP = "wald-gate serve --help"
_PATH = text("a path")
_HOUR = 3600


def _is_network(network: str) -> bool:
    from ipaddress import ip_network

    try:
        ip_network(network)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """The table [limits]: limits on clients."""

    connections_max: int = setting(
        count(1, 65536), 4096, "maximum number of connections; a new one closes the one that has been idle for longest"
    )
    connections_per_address: int = setting(
        count(0, 65536),
        2048,
        "maximum number of connections of one address, except a trusted proxy's, or of one user on the Unix socket; "
        "0: no limit",
    )
    requests_at_once: int = setting(
        count(1, 65536), 1024, "maximum number of requests of one client in flight, including those that wait"
    )
    requests_per_second: int = setting(
        count(0, 1_000_000), 0, "sustained request rate of one client, with a burst of the same size; 0: no limit"
    )
    bytes_per_second: int = setting(
        size(KIB, 1024 * GIB, zero=True), 0, "sustained rate of request bodies of one client; 0: no limit"
    )
    groups_per_route: int = setting(
        count(1, 65536), 100, "number of groups on a route above which only admins may create another"
    )
    head_max_bytes: int = setting(size(KIB, MIB), "64KiB", "maximum size of a request line with its headers")
    json_max_bytes: int = setting(size(KIB, 64 * MIB), "4MiB", "maximum size of a JSON body")
    body_max_bytes: int = setting(size(KIB, 1024 * GIB), "1GiB", "maximum size of a body of records, decompressed")
    record_max_bytes: int = setting(size(1, 512 * MIB), "16MiB", "maximum size of a record")
    kept_max_bytes: int = setting(
        size(MIB, 1024 * GIB),
        "128MiB",
        "maximum memory for unfinished records, and for leased records until they are sent, of all clients, in "
        "addition to 128 KiB for each",
    )
    head_timeout: float = setting(duration(0.1, _HOUR), "10s", "maximum time to receive a request line and its headers")
    body_timeout: float = setting(duration(0.1, _HOUR), "20s", "maximum time to receive the next 64 KiB of a body")
    send_timeout: float = setting(
        duration(0.1, _HOUR), "30s", "maximum time during which a client reads nothing of a response"
    )
    idle_timeout: float = setting(duration(0.1, 24 * _HOUR), "1m", "maximum time of a connection without a request")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A table [groups."ROUTE/GROUP"]: settings of a work group that the gate hosts."""

    reloadable: ClassVar[frozenset[str]] = frozenset()

    order: str = setting(
        choice("log", "key"), "log", "key: lease the records of one key to one worker at a time, in their order"
    )
    max_tries: int = setting(count(0, TRIES_MAX), 0, "number of tries after which a record is given up; 0: no limit")
    dead_letter: str = setting(text("a route"), DEAD_LETTER, "route for records that are given up")
    window: int = setting(
        count(1, 1 << 40), WINDOW, "maximum distance between the oldest open record and a newly leased one"
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a gate; options override the file, and only the file has tables."""

    reloadable: ClassVar[frozenset[str]] = frozenset({"hosts", "limits"})
    """Settings that SIGHUP may change; it also reloads the certificates and the token file."""

    listen: str = setting(text("HOST:PORT"), "127.0.0.1:7700", 'address for TCP connections; "": none')
    uds: str = setting(_PATH, "", 'path of a Unix socket to listen on; "": none')
    certificate: str = setting(_PATH, "", 'PEM file for TLS, with the certificate chain; "": no TLS')
    key: str = setting(_PATH, "", "PEM file of the private key, unless the certificate's file contains it")
    client_ca: str = setting(
        _PATH, "", "PEM file of the CAs for client certificates, which a client may use instead of a token"
    )
    tokens: str = setting(
        _PATH, "", 'file of clients and their rights (wald-gate token); "": everyone who can connect has all rights'
    )
    insecure: bool = setting(FLAG, False, "listen for other machines even without TLS or tokens")
    hosts: tuple[str, ...] = setting(
        names("host names", re.compile(r"[A-Za-z0-9._-]{1,253}").fullmatch),
        (),
        "accepted host names; without tokens, loopback names and addresses are always accepted; with tokens, [] "
        "accepts any",
    )
    trusted_proxies: tuple[str, ...] = setting(
        names('addresses and networks, as "10.0.0.0/8"', _is_network),
        (),
        "proxies whose X-Forwarded-For and X-Forwarded-Proto headers are trusted; others are ignored",
    )
    log_requests: bool = setting(FLAG, False, "log every request to stderr instead of failed requests only")
    limits: LimitSettings = LimitSettings()
    groups: Mapping[str, GroupSettings] = field(default_factory=lambda: MappingProxyType({}))

    def waiting(self, fresh: Settings) -> list[str]:
        """Return the names of the settings that differ in ``fresh`` and need a restart."""
        return [
            each.name
            for each in fields(self)
            if each.name not in self.reloadable and getattr(self, each.name) != getattr(fresh, each.name)
        ]


_TYPES = setting_types(Settings)
_LIMIT_TYPES = setting_types(LimitSettings)
_GROUP_TYPES = setting_types(GroupSettings)
_HOMES = {
    **dict.fromkeys(_GROUP_TYPES, 'to a table [groups."ROUTE/GROUP"]'),
    **dict.fromkeys(_LIMIT_TYPES, "to [limits]"),
    **dict.fromkeys(_TYPES, "above the first table"),
}


def load(path: Path | None, given: Mapping[str, Any]) -> Settings:
    """Return the settings of the file at ``path``, which the options in ``given`` override."""
    values = {} if path is None else _from_file(SettingFile(path, help_command=_HELP, homes=_HOMES))
    values |= {
        name: parse_setting(f"--{name}", value, _TYPES[name], "the command line", help_command=_HELP)
        for name, value in given.items()
    }
    return Settings(**values)


def _from_file(file: SettingFile) -> dict[str, Any]:
    tables = {name: file.tables.pop(name) for name in ("limits", "groups") if name in file.tables}
    values = file.parse_table(file.tables, _TYPES)
    if "limits" in tables:
        values["limits"] = LimitSettings(**file.parse_table(tables["limits"], _LIMIT_TYPES, "limits"))
    if "groups" in tables:
        values["groups"] = MappingProxyType(dict(_groups(tables["groups"], file)))
    return values


def _groups(tables: object, file: SettingFile) -> Iterable[tuple[str, GroupSettings]]:
    hint = 'write [groups."ROUTE/GROUP"]'
    if not isinstance(tables, dict):
        raise InvalidInput(f"{file.place('groups')}: groups must be tables", hint=hint)
    for name, keys in tables.items():
        route, slash, group = name.partition("/")
        if not slash:
            raise InvalidInput(f"{file.place(name)}: groups.{name} is not a route and a group", hint=hint)
        try:
            check_route(route)
            check_group(group)
            found = GroupSettings(**file.parse_table(keys, _GROUP_TYPES, f'groups."{name}"', after=name))
            is_used = bool(found.max_tries) or "dead_letter" in keys
            if check_route(found.dead_letter) == route and is_used:
                raise InvalidInput(f"route {route}: cannot be its own dead-letter route", hint="dead_letter = ROUTE")
        except InvalidInput as error:
            if error.message.startswith(str(file.path)):
                raise
            raise InvalidInput(f"{file.place(name)}: {error.message}", hint=error.hint) from error
        yield name, found

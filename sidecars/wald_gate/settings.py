"""Every setting of the gate, with its default, bounds and meaning: from the command line, from a file, or given here.

The file has the names of the options, and two kinds of tables:

    listen = "127.0.0.1:7700"
    tokens = "/etc/wald/tokens"

    [limits]
    requests_per_second = 100

    [groups."orders/billing"]  # ROUTE/GROUP
    order = "key"

This imports nothing that the extra ``gate`` brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from wald.errors import InvalidInput
from wald.format.names import check_group, check_route
from wald.format.work import TRIES_MAX
from wald.setting_file import SettingFile, parse_setting, unknown_setting
from wald.setting_types import (
    GIB,
    KIB,
    MIB,
    Choice,
    Count,
    Duration,
    Flag,
    Names,
    Networks,
    Setting,
    SettingType,
    Size,
    Text,
    row_of,
    setting,
)
from wald.work.group import DEAD_LETTER, WINDOW

T = TypeVar("T")
_HELP = "wald-gate serve --help"
_PATH = Text("a path")
_HOUR = 3600


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What clients may take: the table [limits]."""

    connections_max: int = setting(
        Count(1, 65536), 4096, "the most connections at a time; the one that has been idle for longest makes way"
    )
    connections_per_address: int = setting(
        Count(0, 65536),
        2048,
        "the most connections of one address, except a trusted proxy's, or of one user on the unix socket; 0: no limit",
    )
    requests_at_once: int = setting(
        Count(1, 65536), 1024, "the most requests of one client that are under way, those that wait included"
    )
    requests_per_second: int = setting(
        Count(0, 1_000_000), 0, "what one client may ask over time, with room for as many at once; 0: no limit"
    )
    bytes_per_second: int = setting(
        Size(KIB, 1024 * GIB, zero=True), 0, "what one client may send in bodies over time; 0: no limit"
    )
    groups_per_route: int = setting(
        Count(1, 65536), 100, "the number of groups on a route at which only admins may create another"
    )
    head_max_bytes: int = setting(Size(KIB, MIB), "64KiB", "the longest request line with its headers")
    json_max_bytes: int = setting(Size(KIB, 64 * MIB), "4MiB", "the largest body of JSON")
    body_max_bytes: int = setting(Size(KIB, 1024 * GIB), "1GiB", "the largest body of records, decompressed")
    record_max_bytes: int = setting(Size(1, 512 * MIB), "16MiB", "the longest record")
    kept_max_bytes: int = setting(
        Size(MIB, 1024 * GIB),
        "128MiB",
        "the most bytes in memory of unfinished records, and of leased ones until they are taken, of all clients, "
        "beyond 128 KiB of each",
    )
    head_timeout: float = setting(Duration(0.1, _HOUR), "10s", "the time for a request line and its headers to come")
    body_timeout: float = setting(Duration(0.1, _HOUR), "20s", "the time for the next 64 KiB of a body to come")
    send_timeout: float = setting(Duration(0.1, _HOUR), "30s", "how long a client may take nothing of an answer")
    idle_timeout: float = setting(Duration(0.1, 24 * _HOUR), "1m", "how long a connection may be without a request")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How a work group gives out records, if the gate is its host: a table [groups."ROUTE/GROUP"]."""

    order: str = setting(
        Choice(("log", "key")), "log", "key: the records of one key are with one worker at a time, in their order"
    )
    max_tries: int = setting(Count(0, TRIES_MAX), 0, "a record is given up after so many tries; 0: never")
    dead_letter: str = setting(Text("a route"), DEAD_LETTER, "the route for records that are given up")
    window: int = setting(Count(1, 1 << 40), WINDOW, "how far beyond the oldest open record new ones are leased")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a gate; the file may have each, and the command line those outside of tables."""

    reloadable: ClassVar[frozenset[str]] = frozenset({"hosts", "limits"})
    """What SIGHUP may change; besides, it reads the certificates and the file of tokens again."""

    listen: str = setting(Text("HOST:PORT"), "127.0.0.1:7700", 'where TCP connections are taken; "": nowhere')
    uds: str = setting(_PATH, "", 'a unix socket to listen on, too; "": none')
    certificate: str = setting(_PATH, "", 'for TLS: a file in PEM, with the certificates above it; "": no TLS')
    key: str = setting(_PATH, "", "its key, if it is in another file")
    authorities: str = setting(_PATH, "", "a file in PEM: of these a client may show a certificate in place of a token")
    tokens: str = setting(
        _PATH, "", 'who may do what (wald-gate token); "": everyone who can connect may do everything'
    )
    insecure: bool = setting(Flag(), False, "listen for other machines without TLS or tokens all the same")
    hosts: tuple[str, ...] = setting(
        Names("host names", r"[A-Za-z0-9._-]{1,253}"),
        (),
        "the names by which clients may ask; without tokens those of loopback, and addresses, are always there; with "
        "tokens [] is any",
    )
    trusted_proxies: tuple[str, ...] = setting(
        Networks(),
        (),
        "the proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted; they are ignored from others",
    )
    log_requests: bool = setting(Flag(), False, "a line about each request on stderr, and not of failures only")
    limits: LimitSettings = field(
        default=LimitSettings(), metadata={"meaning": "a table [limits]: what clients may take"}
    )
    groups: Mapping[str, GroupSettings] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"meaning": 'a table [groups."ROUTE/GROUP"] each: how a work group gives out records'},
    )

    def waiting(self, fresh: Settings) -> list[str]:
        """The names of what differs in ``fresh``, and waits for a restart."""
        return [
            each.name
            for each in fields(self)
            if each.name not in self.reloadable and getattr(self, each.name) != getattr(fresh, each.name)
        ]


def load(path: Path | None, given: Mapping[str, Any]) -> Settings:
    """The settings of the command line and of the file at ``path``.

    Args:
        given: those of the command line, by name; they come first.

    Raises:
        InvalidInput: the file cannot be read, a key does not exist, a value is out of bounds; it names file and line.
    """
    values = {} if path is None else _from_file(SettingFile.read(path))
    types = _types(Settings)
    values |= {
        name: parse_setting(f"--{name}", value, types[name], "the command line", help_command=_HELP)
        for name, value in given.items()
    }
    return Settings(**values)


def reference(table: type[Settings | LimitSettings | GroupSettings] = Settings) -> list[Setting]:
    """Every setting of a table with its type, unit, default, bounds and meaning, in the order of explanation."""
    reloadable = {Settings: Settings.reloadable, LimitSettings: {each.name for each in fields(LimitSettings)}}
    return [
        row_of(each, reloadable=each.name in reloadable.get(table, ())) for each in fields(table) if _has_type(each)
    ]


def _from_file(file: SettingFile) -> dict[str, Any]:
    tables = {"limits", "groups"} & file.tables.keys()
    values = _parsed(Settings, {name: value for name, value in file.tables.items() if name not in tables}, file)
    if "limits" in tables:
        values["limits"] = LimitSettings(**_parsed(LimitSettings, file.tables["limits"], file, "limits"))
    if "groups" in tables:
        values["groups"] = MappingProxyType(dict(_groups(file.tables["groups"], file)))
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
            found = GroupSettings(**_parsed(GroupSettings, keys, file, f'groups."{name}"', after=name))
            is_used = bool(found.max_tries) or "dead_letter" in keys
            if check_route(found.dead_letter) == route and is_used:
                raise InvalidInput(f"route {route}: cannot be its own dead-letter route", hint="dead_letter = ROUTE")
        except InvalidInput as error:
            if error.message.startswith(str(file.path)):
                raise
            raise InvalidInput(f"{file.place(name)}: {error.message}", hint=error.hint) from error
        yield name, found


def _parsed(
    table: type[Settings | LimitSettings | GroupSettings],
    keys: object,
    file: SettingFile,
    name: str = "",
    *,
    after: str = "",
) -> dict[str, Any]:
    """The checked values of one table."""
    if not isinstance(keys, dict):
        raise InvalidInput(f"{file.place(name)}: {name} must be a table", hint=f"write [{name}]")
    types = _types(table)
    values: dict[str, Any] = {}
    for key, value in keys.items():
        place = file.place(key, after=after or name)
        if key not in types:
            raise _misplaced(key, types, place, name)
        full = f"{name}.{key}" if name else key
        values[key] = parse_setting(full, value, types[key], place, help_command=_HELP)
    return values


def _misplaced(key: str, known: Iterable[str], place: str, table: str) -> InvalidInput:
    """The error for a key that ``table`` ("": none) does not have; it may be one that stands elsewhere."""
    for home, where in ((LimitSettings, "[limits]"), (GroupSettings, 'a table [groups."ROUTE/GROUP"]')):
        if not table and key in _types(home):
            return InvalidInput(f"{place}: {key!r} is above all tables", hint=f"move {key} to {where}")
    if table and key in _types(Settings):
        return InvalidInput(f"{place}: {key!r} is inside [{table}]", hint=f"move {key} above the first table")
    return unknown_setting(key, known, place, table=f" in [{table}]" if table else "", help_command=_HELP)


def _types(table: type[Settings | LimitSettings | GroupSettings]) -> dict[str, SettingType]:
    return {each.name: each.metadata["type"] for each in fields(table) if _has_type(each)}


def _has_type(described: Any) -> bool:
    return "type" in described.metadata

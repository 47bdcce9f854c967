"""Every setting of the daemon and of wald-reclaim, with its unit, default, bounds and meaning: checked once.

A setting comes from the first of: the variable ``WALD_<NAME>``, the file, its default. Sizes are bytes or "64MiB",
durations seconds or "10s", "5m", "1h". Routes have a table each:

    [routes.access]
    fifo = true             # make routes/access/in
    mode = "0620"           # of the FIFO
    writers = ["www-data"]  # users, by name or number, that may write over the socket; empty: all users
    consumers = "billing"   # the group whose members may leave cursors
    max_age = "7d"          # and other limits, of which [retention] has the defaults
"""

from __future__ import annotations

import difflib
import pwd
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from wald.errors import InvalidInput
from wald.format.names import check_route
from wald.limits import Retention, RouteLimits, in_force
from wald.setting_file import SettingFile, parse_setting, unknown_setting
from wald.setting_types import (
    GIB,
    KIB,
    MIB,
    TIB,
    Choice,
    Count,
    Duration,
    Flag,
    Fraction,
    Group,
    Mode,
    Setting,
    SettingType,
    Size,
    Text,
    row_of,
    setting,
)

ENVIRONMENT_PREFIX = "WALD_"
_HELP = "wald run --help"
_NEARLY = 0.8  # as alike as this, a variable is a misspelt setting; Kubernetes sets WALD_PORT and more, which are not
_DAY = 86400
_GUARDED_MODE = 0o600  # of the FIFO of a route with writers


@dataclass(frozen=True, slots=True)
class RouteConfig(RouteLimits):
    """What the file says about one route.

    Attributes:
        fifo: there is a FIFO ``routes/NAME/in``.
        mode: the FIFO's permission bits. With ``writers`` only its owner may have any, because a FIFO does not check
            which user writes. None: it keeps those it has, and a new one gets 0620.
        writers: user ids that may write over the socket; empty: all that can reach it.
        consumers: the group whose members may leave cursors, as :class:`Group` parses it; "": none. None: as it is.
    """

    fifo: bool = False
    mode: int | None = None
    writers: frozenset[int] = frozenset()
    consumers: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one daemon; :func:`reference` lists them for people."""

    reloadable: ClassVar[frozenset[str]] = frozenset(
        {"segment_max_bytes", "segment_max_age", "free_space_min", "on_full", "log_level", "retention", "routes"}
    )
    """What SIGHUP may change; anything else needs a restart."""

    segment_max_bytes: int = setting(
        Size(64 * KIB, 64 * GIB), "64MiB", "a segment is cut before it grows larger than this"
    )
    segment_max_age: float = setting(
        Duration(1, 366 * _DAY, zero=True), "1h", "a segment that holds records is cut at this age; 0: never"
    )
    segment_age_jitter: float = setting(
        Fraction(0.9), 0.1, "how much earlier a segment may be cut, at random, so that many logs do not cut at once"
    )
    sync: str = setting(
        Choice(("commit", "interval", "never")),
        "commit",
        "when to call fdatasync: at every commit, every sync_interval, or never; without it at every commit a host "
        "crash loses what was acknowledged since the last one",
    )
    sync_interval: float = setting(Duration(0.001, 3600), "1s", 'time between syncs where sync = "interval"')
    free_space_min: int = setting(
        Size(MIB, 1024 * TIB, zero=True),
        "256MiB",
        "free space that is left to others, besides room to seal and for the next segment",
    )
    on_missing_root: str = setting(
        Choice(("make", "refuse")),
        "make",
        "whether a root that is no log yet is made one or refused; a mount point without its file system is no log",
    )
    on_full: str = setting(
        Choice(("block", "reject")),
        "block",
        "whether requests over the socket wait while the disk is full, or are answered ERR full",
    )
    socket: str = setting(Text("a path"), "", "path of the unix socket; empty: ROOT/wald.sock")
    socket_mode: int = setting(Mode(), 0o660, "permission bits of the socket")
    connections_max: int = setting(Count(1, 65536), 256, "the most connections at a time")
    connections_per_user: int = setting(
        Count(1, 65536),
        128,
        "the most connections of one user; the log's owner and root are not limited, and some places are kept for them",
    )
    idle_timeout: float = setting(
        Duration(0.1, _DAY), "5s", "a connection that has been idle for this long is closed when its place is needed"
    )
    frame_timeout: float = setting(
        Duration(0.1, _DAY),
        "30s",
        "a client that sends less than the next 256 KiB of a half-sent request in this time, or reads no reply, is "
        "disconnected",
    )
    record_max_bytes: int = setting(Size(KIB, GIB), "512MiB", "the longest record that a pipe may carry")
    request_max_bytes: int = setting(Size(128 * KIB, 512 * MIB), "64MiB", "the largest payload of one request")
    compression_level: int = setting(Count(1, 19), 3, "zstd level of sealed segments")
    metrics: str = setting(
        Text('an address such as "127.0.0.1:9464"', r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):\d{1,5}"),
        "",
        "where /metrics and /healthz are served; empty: nowhere",
    )
    stall_timeout: float = setting(
        Duration(1, _DAY), "60s", "input that waits for this long while the head does not move is unhealthy"
    )
    log_format: str = setting(
        Choice(("auto", "json", "console")),
        "auto",
        "format of messages on stderr; auto: console on a terminal, else json",
    )
    log_level: str = setting(
        Choice(("debug", "info", "warning", "error")), "info", "the least severe messages that are logged"
    )
    retention: Retention = field(
        default=Retention(), metadata={"meaning": "a table [retention]: what wald-reclaim keeps, for how long"}
    )
    routes: Mapping[str, RouteConfig] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"meaning": "made at start, one table [routes.NAME] each: fifo, mode, writers, consumers, limits"},
    )
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Where each setting comes from that has not its default: a variable, or a file and a line. No setting itself."""

    def taking_over(self, fresh: Config) -> tuple[Config, set[str], set[str]]:
        """This one with what SIGHUP may change; the names of what changed, and of what waits for a restart."""
        names = [each.name for each in fields(fresh) if each.compare]
        changed = {name for name in names if getattr(fresh, name) != getattr(self, name)}
        waiting = changed - self.reloadable
        values = {name: getattr(fresh, name) for name in changed - waiting}
        origins = {name: origin for name, origin in fresh.origins.items() if name not in waiting}
        origins |= {name: origin for name, origin in self.origins.items() if name in waiting}
        return replace(self, **values, origins=MappingProxyType(origins)), changed - waiting, waiting

    def limits(self, route: str) -> RouteLimits:
        """The limits in force for a route; None is no limit."""
        return in_force(self.routes.get(route, RouteLimits()), self.retention)


def setting_types(table: type[Config | RouteLimits]) -> dict[str, SettingType]:
    """The type of each setting of a table, but of the tables in it."""
    return {each.name: each.metadata["type"] for each in fields(table) if "type" in each.metadata}


_TYPES = setting_types(Config)
_RETENTION_TYPES = setting_types(Retention)
ROUTE_TYPES: dict[str, SettingType] = {
    "fifo": Flag(),
    "mode": Mode(),
    "consumers": Group(),
    **setting_types(RouteLimits),
}
_ROUTE_KEYS = (*ROUTE_TYPES, "writers")
_TABLES = ("retention", "routes")


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The settings from the variables in ``environ`` and the file at ``path``.

    Raises:
        InvalidInput: the file cannot be read, a key does not exist, a value is out of bounds; it names file and line.
    """
    origins: dict[str, str] = {}
    values: dict[str, Any] = {} if path is None else _from_file(path, origins)
    values |= _from_environment(environ, origins)
    return Config(**values, origins=MappingProxyType(origins))


def reference(table: type[Config | RouteLimits] = Config) -> list[Setting]:
    """Every setting of a table with its type, unit, default, bounds and meaning, in the order of explanation.

    Of :class:`Retention` only those that a route does not have.
    """
    rows = []
    inherited = {each.name for each in fields(RouteLimits)} if table is Retention else ()
    for each in fields(table):
        if each.name in inherited or not each.metadata:
            continue
        reloadable = table is not Config or each.name in Config.reloadable
        if "type" not in each.metadata:
            kind = "table" if each.name == "retention" else "tables"
            rows.append(Setting(each.name, kind, "", "", kind, each.metadata["meaning"], reloadable))
        else:
            rows.append(row_of(each, reloadable=reloadable))
    return rows


def _from_file(path: Path, origins: dict[str, str]) -> dict[str, Any]:
    file = SettingFile.read(path)
    values: dict[str, Any] = {}
    for name, value in file.tables.items():
        place = file.place(name)
        origins |= _origins(name, value, file)
        if name == "routes":
            values[name] = MappingProxyType(_routes(value, file))
        elif name == "retention":
            values[name] = _retention(value, file)
        elif name in _TYPES:
            values[name] = _parse(name, value, place)
        else:
            raise _misplaced(name, "", (*_TYPES, *_TABLES), place)
    return values


def _origins(name: str, value: object, file: SettingFile) -> dict[str, str]:
    """Where a setting is in the file; of a table, every key in it, under the names of the tables and its own."""
    if not isinstance(value, dict):
        return {name: file.place(name)}
    found: dict[str, str] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            found |= {f"{name}.{key}.{each}": file.place(each, after=key) for each in inner}
        else:
            found[f"{name}.{key}"] = file.place(key, after=name)
    return found


def _from_environment(environ: Mapping[str, str], origins: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in _TYPES:
            values[name] = _parse(name, value, variable)
            origins[name] = variable
        elif difflib.get_close_matches(name, _TYPES, cutoff=_NEARLY):
            raise unknown_setting(name, _TYPES, variable, help_command=_HELP)
    return values


def _retention(keys: object, file: SettingFile) -> Retention:
    if not isinstance(keys, dict):
        raise InvalidInput(f"{file.place('retention')}: retention must be a table", hint="write [retention]")
    values: dict[str, Any] = {}
    for key, value in keys.items():
        place = file.place(key, after="retention")
        if key not in _RETENTION_TYPES:
            raise _misplaced(key, "[retention]", _RETENTION_TYPES, place)
        values[key] = _parse(f"retention.{key}", value, place, _RETENTION_TYPES[key])
    return Retention(**values)


def _routes(tables: object, file: SettingFile) -> dict[str, RouteConfig]:
    if not isinstance(tables, dict):
        raise InvalidInput(f"{file.place('routes')}: routes must be tables", hint="write [routes.NAME]")
    routes = {}
    for name, keys in tables.items():
        place = file.place(name)
        if not isinstance(keys, dict):
            raise InvalidInput(f"{place}: routes.{name} must be a table", hint=f"write [routes.{name}]")
        try:
            check_route(name)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error.message}", hint=error.hint) from error
        routes[name] = _route(name, keys, file)
    return routes


def _route(route: str, keys: dict[str, object], file: SettingFile) -> RouteConfig:
    values: dict[str, Any] = {}
    for key, value in keys.items():
        place = file.place(key, after=route)
        name = f"routes.{route}.{key}"
        if key == "writers":
            values[key] = _writers(name, value, place)
        elif key in ROUTE_TYPES:
            values[key] = _parse(name, value, place, ROUTE_TYPES[key])
        else:
            raise _misplaced(key, f"[routes.{route}]", _ROUTE_KEYS, place)
    if values.get("writers") and values.setdefault("mode", _GUARDED_MODE) & ~_GUARDED_MODE:
        place = file.place("mode", after=route)
        message = f"{place}: routes.{route} has writers, and a FIFO admits every user that its mode does"
        raise InvalidInput(message, hint=f'mode = "{_GUARDED_MODE:04o}", or no writers')
    return RouteConfig(**values)


def _writers(name: str, users: object, place: str) -> frozenset[int]:
    if not isinstance(users, list) or not all(isinstance(user, int | str) for user in users):
        raise InvalidInput(
            f"{place}: {name} must be a list of users", hint='write names or numbers, as in ["root", 33]'
        )
    try:
        return frozenset(pwd.getpwnam(user).pw_uid if isinstance(user, str) else int(user) for user in users)
    except KeyError as error:
        raise InvalidInput(f"{place}: {name}: {error.args[0]}", hint="getent passwd lists users") from None


def _parse(name: str, value: object, place: str, type_: SettingType | None = None) -> Any:
    """The checked value."""
    return parse_setting(name, value, type_ or _TYPES[name], place, help_command=_HELP)


def _misplaced(key: str, table: str, known: Iterable[str], place: str) -> InvalidInput:
    """The error for a key that ``table`` ("": none) does not have; it may be one that stands elsewhere."""
    homes = {"routes": "write [routes.NAME]", "retention": "write [retention]"}
    homes |= dict.fromkeys(_RETENTION_TYPES, f"move {key} to [retention]")
    homes |= dict.fromkeys(_TYPES, f"move {key} above the first table")
    if key in homes:
        where = f"inside {table}, and is no setting of it" if table else "above all tables"
        return InvalidInput(f"{place}: {key!r} is {where}", hint=homes[key])
    return unknown_setting(key, known, place, table=f" in {table}" if table else "", help_command=_HELP)

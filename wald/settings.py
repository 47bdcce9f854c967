"""Settings of the daemon and of wald-reclaim: their types, defaults, bounds and help, and the TOML file.

The variable ``WALD_<NAME>`` overrides the file, which overrides the default. A size is in bytes or like "64MiB", a
duration in seconds or like "5m".
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from wald.errors import InvalidInput
from wald.format.names import check_route
from wald.setting_types import (
    FLAG,
    GIB,
    KIB,
    MIB,
    MODE,
    OS_GROUP,
    TIB,
    USERS,
    SettingType,
    choice,
    count,
    duration,
    fraction,
    size,
    text,
)

_PREFIX = "WALD_"
DEFAULT = "default"
_HELP = "wald run --help"
_SIMILARITY_MIN = 0.8  # of a misspelt variable to a setting; lower values would reject WALD_PORT, set by Kubernetes
_DAY = 86400
_CENTURY = 36_600 * _DAY
_BYTES_MAX = 1024 * TIB
_RECORDS_MAX = 10**18
_GUARDED_MODE = 0o600  # maximum for the FIFO of a route with writers


class Setting(NamedTuple):
    """Row of the settings reference; ``default`` and ``bounds`` are TOML."""

    name: str
    unit: str
    default: str
    bounds: str
    meaning: str
    reloadable: bool


def setting(type_: SettingType, default: object, meaning: str) -> Any:
    return field(default=type_.parse(default), metadata={"type": type_, "meaning": meaning})


def _optional(type_: SettingType, default: object, meaning: str, *, unset: object = None) -> Any:
    """Return a dataclass field with the value ``unset`` unless the file sets it."""
    return field(default=unset, metadata={"type": type_, "default": type_.parse(default), "meaning": meaning})


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Limits on a route's own records and payload bytes; None and "" mean unset, 0 unlimited."""

    max_age: float | None = _optional(
        duration(1, _CENTURY, zero=True),
        0,
        "delete records whose segment has been complete for longer than this; 0: no limit",
    )
    max_bytes: int | None = _optional(
        size(1, _BYTES_MAX, zero=True), 0, "payload bytes of the newest records to keep; 0: no limit"
    )
    max_records: int | None = _optional(count(0, _RECORDS_MAX), 0, "number of the newest records to keep; 0: no limit")
    unread: str = _optional(
        choice("keep", "expire"),
        "keep",
        "keep: limits spare records that a consumer group has not read; expire: limits delete them, which LOSES DATA; "
        "the ledger counts the loss",
        unset="",
    )
    pinned_max_bytes: int | None = _optional(
        size(1, _BYTES_MAX, zero=True), 0, "maximum unread payload bytes of a consumer group; 0: no limit"
    )
    on_pinned: str = _optional(
        choice("block", "reject", "expire"),
        "block",
        "above pinned_max_bytes: block the producers of the route, reject their requests with ERR full, or delete the "
        "oldest unread segments, which LOSES DATA",
        unset="",
    )


@dataclass(frozen=True, slots=True)
class Retention(RouteLimits):
    """The table [retention]; its limits apply to routes that do not set their own."""

    min_age: float = setting(duration(0, _CENTURY), 0, "keep segments that have been complete for less than this time")
    keep_bytes: int = setting(size(0, _BYTES_MAX), 0, "keep at least this many of the newest bytes")
    require_archived: bool = setting(FLAG, False, "keep records until wald-archive has written them to a bundle")
    verify: bool = setting(FLAG, False, "read every frame of a sealed segment before deleting it")
    shrink_pinned: bool = setting(
        FLAG, False, "rewrite a sealed segment that a few unread records pin, keeping only the unread records"
    )
    grace: float = setting(
        duration(0, 366 * _DAY), "60s", "time that a released segment remains for readers that are about to open it"
    )
    log_max_age: float = setting(
        duration(1, _CENTURY, zero=True), 0, "like max_age, for the log instead of each route; 0: no limit"
    )
    log_max_bytes: int = setting(
        size(1, _BYTES_MAX, zero=True), 0, "like max_bytes, for file sizes of the log's complete segments; 0: no limit"
    )
    log_max_records: int = setting(count(0, _RECORDS_MAX), 0, "like max_records, for the log; 0: no limit")


@dataclass(frozen=True, slots=True)
class RouteConfig(RouteLimits):
    """The table [routes.NAME] of a route."""

    fifo: bool = setting(FLAG, False, "create the FIFO routes/NAME/in")
    mode: int | None = _optional(
        MODE, 0o620, "permission bits of the FIFO; unset: those of an existing FIFO; with writers at most 0600"
    )
    writers: frozenset[int] = _optional(
        USERS, [], "users allowed to write over the socket; empty: all users", unset=frozenset()
    )
    consumers: str | None = _optional(
        OS_GROUP, "", "OS group whose members may keep cursors in this route; unset: unchanged"
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one daemon."""

    reloadable: ClassVar[frozenset[str]] = frozenset(
        {"segment_max_bytes", "segment_max_age", "free_space_min", "on_full", "log_level", "retention", "routes"}
    )
    """Settings that SIGHUP may change; others need a restart."""

    segment_max_bytes: int = setting(size(64 * KIB, 64 * GIB), "64MiB", "cut a segment before it exceeds this size")
    segment_max_age: float = setting(
        duration(1, 366 * _DAY, zero=True), "1h", "cut a segment with records once it reaches this age; 0: never"
    )
    segment_age_jitter: float = setting(
        fraction(0.9),
        0.1,
        "cut earlier at random, by up to this fraction of segment_max_age, so that many logs do not cut at once",
    )
    sync: str = setting(
        choice("commit", "interval", "never"),
        "commit",
        "call fdatasync at every commit, every sync_interval, or never; with interval or never, a host crash loses the "
        "records acknowledged since the last call",
    )
    sync_interval: float = setting(duration(0.001, 3600), "1s", 'time between calls of fdatasync if sync = "interval"')
    free_space_min: int = setting(
        size(MIB, _BYTES_MAX, zero=True),
        "256MiB",
        "free space left to other programs, in addition to space for sealing and for the next segment",
    )
    on_missing_root: str = setting(
        choice("make", "refuse"),
        "make",
        "make: create a log in a root that has none; refuse: do not start, which protects a mount point whose file "
        "system is not mounted",
    )
    on_full: str = setting(
        choice("block", "reject"),
        "block",
        "when the disk is full, let socket requests wait, or reject them with ERR full",
    )
    socket: str = setting(text("a path"), "", "path of the Unix socket; empty: ROOT/wald.sock")
    socket_mode: int = setting(MODE, 0o660, "permission bits of the socket")
    connections_max: int = setting(count(1, 65536), 256, "maximum number of connections")
    connections_per_user: int = setting(
        count(1, 65536),
        128,
        "maximum number of connections of one user; root and the log's owner are exempt, and some connections are "
        "reserved for them",
    )
    idle_timeout: float = setting(
        duration(0.1, _DAY), "5s", "close a connection that has been idle for this long if a new one needs its place"
    )
    frame_timeout: float = setting(
        duration(0.1, _DAY),
        "30s",
        "disconnect a client that takes longer than this to send the next 256 KiB of an unfinished request, or to read "
        "a reply",
    )
    record_max_bytes: int = setting(size(KIB, GIB), "512MiB", "maximum size of a record from a pipe")
    request_max_bytes: int = setting(size(128 * KIB, 512 * MIB), "64MiB", "maximum payload of one request")
    compression_level: int = setting(count(1, 19), 3, "zstd compression level of sealed segments")
    metrics: str = setting(
        text('an address such as "127.0.0.1:9464"', r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):\d{1,5}"),
        "",
        "address on which to serve /metrics and /healthz; empty: off",
    )
    stall_timeout: float = setting(
        duration(1, _DAY), "60s", "report unhealthy if input has waited for this long without the head moving"
    )
    log_format: str = setting(
        choice("auto", "json", "console"),
        "auto",
        "format of messages on stderr; auto: console on a terminal, json otherwise",
    )
    log_level: str = setting(choice("debug", "info", "warning", "error"), "info", "minimum severity of messages")
    retention: Retention = field(
        default=Retention(), metadata={"bounds": "table", "meaning": "what wald-reclaim keeps: the table [retention]"}
    )
    routes: Mapping[str, RouteConfig] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"bounds": "tables", "meaning": "routes to create at start, each in a table [routes.NAME]"},
    )
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """The variable, or file and line, that set each setting (not itself a setting)."""

    def reload(self, loaded: Config) -> tuple[Config, set[str], set[str]]:
        """Return the settings after SIGHUP, the changed names, and the names that need a restart."""
        names = [each.name for each in fields(loaded) if each.compare]
        changed = {name for name in names if getattr(loaded, name) != getattr(self, name)}
        deferred = changed - self.reloadable
        values = {name: getattr(loaded, name) for name in changed - deferred}
        origins = {name: origin for name, origin in loaded.origins.items() if name not in deferred}
        origins |= {name: origin for name, origin in self.origins.items() if name in deferred}
        return replace(self, **values, origins=MappingProxyType(origins)), changed - deferred, deferred

    def limits(self, route: str) -> RouteLimits:
        """Return a route's limits, with those of [retention] as defaults; None is unlimited."""
        values: dict[str, Any] = {}
        for each in fields(RouteLimits):
            settings = (getattr(table, each.name) for table in (self.routes.get(route, RouteLimits()), self.retention))
            value = next((value for value in settings if value not in (None, "")), each.metadata["default"])
            values[each.name] = value or None
        return RouteLimits(**values)


def setting_types(table: type[Any]) -> dict[str, SettingType]:
    return {each.name: each.metadata["type"] for each in fields(table) if "type" in each.metadata}


_TYPES = setting_types(Config)
_RETENTION_TYPES = setting_types(Retention)
_ROUTE_TYPES = setting_types(RouteConfig)
_HOMES = {
    **dict.fromkeys(_RETENTION_TYPES, "to [retention]"),
    **dict.fromkeys(_TYPES, "above the first table"),
    "routes": "to tables [routes.NAME]",
    "retention": "to a table [retention]",
}


def reference(table: type[Any] = Config) -> list[Setting]:
    """Return the reference rows of a settings table, without inherited limits."""
    rows = []
    for each in fields(table):
        meta, type_ = each.metadata, each.metadata.get("type")
        if meta and each.name in table.__annotations__:
            default = type_.show(meta.get("default", each.default)) if type_ else ""
            bounds, unit = (type_.bounds, type_.unit) if type_ else (meta["bounds"], "")
            is_reloadable = each.name in getattr(table, "reloadable", {each.name})  # only Config has exceptions
            rows.append(Setting(each.name, unit, default, bounds, meta["meaning"], is_reloadable))
    return rows


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read the settings from variables and a file; InvalidInput names the file and line."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        file = SettingFile(path, help_command=_HELP, homes=_HOMES)
        tables = {name: file.tables.pop(name) for name in ("retention", "routes") if name in file.tables}
        values, origins = file.parse_table(file.tables, _TYPES), file.origins
        if "retention" in tables:
            values["retention"] = Retention(**file.parse_table(tables["retention"], _RETENTION_TYPES, "retention"))
        if "routes" in tables:
            values["routes"] = MappingProxyType(_routes(tables["routes"], file))
    for variable, value in environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX):
            continue
        if name in _TYPES:
            values[name] = parse_setting(name, value, _TYPES[name], variable, help_command=_HELP)
            origins[name] = variable
        elif _similar(name, _TYPES, _SIMILARITY_MIN):
            raise _unknown_setting(name, _TYPES, variable, help_command=_HELP)
    return Config(**values, origins=MappingProxyType(origins))


def effective_settings(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each setting's name, TOML value and origin; settings of tables only if the file has them.

    The origin is a variable, a file and a line, or DEFAULT.
    """
    for name, type_ in _TYPES.items():
        yield name, type_.show(getattr(config, name)), config.origins.get(name, DEFAULT)
    for name, origin in config.origins.items():
        table, _, rest = name.partition(".")
        if table == "retention":
            yield name, _RETENTION_TYPES[rest].show(getattr(config.retention, rest)), origin
        elif table == "routes":
            route, _, key = rest.rpartition(".")
            yield name, _ROUTE_TYPES[key].show(getattr(config.routes[route], key)), origin


class SettingFile:
    """A TOML file of settings; errors name the file and the line."""

    def __init__(self, path: Path, *, help_command: str, homes: Mapping[str, str]) -> None:
        import tomllib

        self.path = path
        self.help_command = help_command  # lists all settings
        self.homes = homes  # where a misplaced key belongs, as in "to [retention]"
        self.origins: dict[str, str] = {}  # path:line by setting, as in "retention.grace"
        try:
            # An editor may have added a byte order mark; after a change of user, importing its codec may fail.
            self.content = path.read_bytes().removeprefix(BOM_UTF8).decode()
            self.tables = tomllib.loads(self.content)
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", case="file-unreadable", path=path) from error
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{path}: not UTF-8 text: invalid byte at offset {error.start}", case="file-is-not-text", path=path
            ) from error
        except tomllib.TOMLDecodeError as error:
            is_duplicate = re.match("Cannot (declare|overwrite)", str(error))
            reason = "a table or a setting may occur only once" if is_duplicate else "in TOML, text must be quoted"
            raise InvalidInput(
                f"{path}: not TOML: {error}", case="file-is-not-toml", path=path, reason=reason
            ) from error

    def place(self, key: str, *, after: str = "") -> str:
        """Return ``path:line`` of ``key`` in table ``after``, by text search: the parser gives no line numbers."""
        start = 0
        heading = rf"""^\s*\[.*(?<![\w-]){re.escape(after)}(?![\w-]).*\]"""
        if after and (table := re.search(heading, self.content, re.MULTILINE)):
            start = table.end()
        pattern = re.compile(rf"""^\s*(\[.*)?["']?(?<![\w-]){re.escape(key)}["']?\s*[]=.]""", re.MULTILINE)
        match = pattern.search(self.content, start)
        return f"{self.path}:{self.content.count(chr(10), 0, match.end()) + 1}" if match else str(self.path)

    def parse_table(
        self, keys: object, types: Mapping[str, SettingType], table: str = "", *, after: str = ""
    ) -> dict[str, Any]:
        """Return the checked values of ``table``, or of the keys above all tables if it is "".

        ``after`` is the part of the name that :meth:`place` looks for.
        """
        if not isinstance(keys, dict):
            raise InvalidInput(
                f"{self.place(after or table)}: {table} must be a table", case="setting-is-not-a-table", table=table
            )
        values: dict[str, Any] = {}
        for key, value in keys.items():
            place = self.place(key, after=after or table)
            if key in types:
                name = f"{table}.{key}" if table else key
                values[key] = parse_setting(name, value, types[key], place, help_command=self.help_command)
                self.origins[name] = place
            elif key in self.homes:
                raise InvalidInput(
                    f"{place}: {key!r} is {f'inside [{table}]' if table else 'above all tables'}",
                    case="setting-misplaced",
                    key=key,
                    home=self.homes[key],
                )
            else:
                suffix = f" in [{table}]" if table else ""
                raise _unknown_setting(key, types, place, table=suffix, help_command=self.help_command)
        return values


def parse_setting(name: str, value: object, type_: SettingType, place: str, *, help_command: str) -> Any:
    try:
        return type_.parse(value)
    except ValueError as error:
        raise InvalidInput(
            f"{place}: {name} must be {error}",
            case="setting-is-not-a-list-of-users" if type_ is USERS else "setting-is-not-valid",
            help_command=help_command,
        ) from None


def _similar(name: str, known: Iterable[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=1, cutoff=cutoff)


def _unknown_setting(
    name: str, known: Iterable[str], place: str, *, table: str = "", help_command: str
) -> InvalidInput:
    return InvalidInput(
        f"{place}: there is no setting {name!r}{table}",
        case="no-such-setting",
        nearest=_similar(name, known, 0.6),
        help_command=help_command,
    )


def _routes(tables: object, file: SettingFile) -> dict[str, RouteConfig]:
    if not isinstance(tables, dict):
        raise InvalidInput(f"{file.place('routes')}: routes must be tables", case="routes-are-not-tables")
    routes = {}
    for route, keys in tables.items():
        try:
            check_route(route)
        except InvalidInput as error:
            raise InvalidInput(f"{file.place(route)}: {error.message}", hint=error.hint) from error
        values = file.parse_table(keys, _ROUTE_TYPES, f"routes.{route}", after=route)
        if values.get("writers") and values.setdefault("mode", _GUARDED_MODE) & ~_GUARDED_MODE:
            place = file.place("mode", after=route)
            message = f"{place}: routes.{route} has writers, but the mode of its FIFO admits other users"
            raise InvalidInput(message, case="fifo-mode-too-open", mode=_GUARDED_MODE)
        routes[route] = RouteConfig(**values)
    return routes

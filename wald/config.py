"""Every setting of the daemon, with its unit, default, bounds and meaning: from TOML and the environment, checked once.

A setting comes from the first of: the variable ``WALD_<NAME>``, the file, its default. Sizes are bytes or "64MiB",
durations seconds or "10s", "5m", "1h". Routes have a table each:

    [routes.access]
    fifo = true             # make routes/access/in
    mode = "0620"           # of the FIFO
    writers = ["www-data"]  # users, by name or number, that may write over the socket; empty: everyone
"""

from __future__ import annotations

import difflib
import pwd
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from wald.errors import InvalidInput
from wald.format.names import check_route
from wald.kinds import GIB, KIB, MIB, TIB, Choice, Count, Duration, Fraction, Kind, Mode, Size, Text

ENVIRONMENT_PREFIX = "WALD_"
_NEARLY = 0.8  # as alike as this, a variable is a misspelt setting; Kubernetes sets WALD_PORT and more, which are not
_DAY = 86400
_GUARDED_MODE = 0o600  # of the FIFO of a route with writers


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """What the file says about one route.

    Attributes:
        fifo: there is a FIFO ``routes/NAME/in``.
        mode: the FIFO's permission bits; with ``writers`` nobody but the owner may have any, for a FIFO does not ask
            who writes. None: it keeps those it has, and a new one gets 0620.
        writers: user ids that may write over the socket; empty: everyone who can reach it.
    """

    fifo: bool = False
    mode: int | None = None
    writers: frozenset[int] = frozenset()


def _setting(kind: Kind, default: object, meaning: str) -> Any:
    """A dataclass field; the type is the annotation's."""
    return field(default=kind.parse(default), metadata={"kind": kind, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one daemon; :func:`reference` lists them for people."""

    reloadable: ClassVar[frozenset[str]] = frozenset(
        {"segment_max_bytes", "segment_max_age", "free_space_min", "on_full", "log_level", "routes"}
    )
    """What SIGHUP may change; anything else needs a restart."""

    segment_max_bytes: int = _setting(Size(64 * KIB, 64 * GIB), "64MiB", "a segment is cut before it outgrows this")
    segment_max_age: float = _setting(
        Duration(1, 366 * _DAY, zero=True), "1h", "a segment that holds records is cut at this age; 0: never"
    )
    segment_age_jitter: float = _setting(
        Fraction(0.9), 0.1, "how much earlier, at random, so that many logs do not cut at once"
    )
    sync: str = _setting(
        Choice(("commit", "interval", "never")),
        "commit",
        "when to fdatasync: at every commit; or every sync_interval, or when the kernel likes: a host crash then loses "
        "what was acknowledged since",
    )
    sync_interval: float = _setting(Duration(0.001, 3600), "1s", 'time between syncs where sync = "interval"')
    free_space_min: int = _setting(
        Size(MIB, 1024 * TIB, zero=True),
        "256MiB",
        "free space that is left to others, beside room to seal and for the next segment",
    )
    on_missing_root: str = _setting(
        Choice(("make", "refuse")),
        "make",
        "a root that is no log yet is made one, or refused: a mount point without its file system looks like that",
    )
    on_full: str = _setting(Choice(("block", "reject")), "block", "sockets wait then, or are answered ERR full")
    socket: str = _setting(Text("a path"), "", "of the unix socket; empty: ROOT/wald.sock")
    socket_mode: int = _setting(Mode(), 0o660, "permission bits of the socket")
    connections_max: int = _setting(Count(1, 65536), 256, "connections at a time")
    connections_per_user: int = _setting(
        Count(1, 65536), 128, "of one user, but for the log's owner and root, for whom some places are kept besides"
    )
    idle_timeout: float = _setting(
        Duration(0.1, _DAY), "5s", "who has had nothing under way for this long is hung up on when his place is needed"
    )
    frame_timeout: float = _setting(Duration(0.1, _DAY), "30s", "a half-sent request may stand still for this long")
    record_max_bytes: int = _setting(Size(KIB, GIB), "512MiB", "the longest record a pipe may bring")
    request_max_bytes: int = _setting(Size(128 * KIB, 512 * MIB), "64MiB", "the largest payload of one request")
    compression_level: int = _setting(Count(1, 19), 3, "zstd level of sealed segments")
    metrics: str = _setting(
        Text('an address such as "127.0.0.1:9464"', r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):\d{1,5}"),
        "",
        "where /metrics and /healthz are served; empty: nowhere",
    )
    stall_timeout: float = _setting(
        Duration(1, _DAY), "60s", "input that waits for this long while the head stands still is unhealthy"
    )
    log_format: str = _setting(
        Choice(("auto", "json", "console")), "auto", "of messages on stderr; auto: console on a terminal, else json"
    )
    log_level: str = _setting(Choice(("debug", "info", "warning", "error")), "info", "the least that is told")
    routes: Mapping[str, RouteConfig] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"meaning": "made at start, one table [routes.NAME] each: fifo, mode, writers"},
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings; default and bounds are as one would write them in the file."""

    name: str
    unit: str
    default: str
    bounds: str
    meaning: str
    reloadable: bool


_KINDS: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(Config) if "kind" in each.metadata}
_ROUTE_KEYS = tuple(each.name for each in fields(RouteConfig))


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The settings from the variables in ``environ`` and the file at ``path``.

    Raises:
        InvalidInput: the file cannot be read, a key does not exist, a value is out of bounds; it names file and line.
    """
    values: dict[str, Any] = {} if path is None else _from_file(path)
    values |= _from_environment(environ)
    return Config(**values)


def reference() -> list[Setting]:
    """Every setting, in the order in which they are best explained."""
    rows = []
    for each in fields(Config):
        kind = _KINDS.get(each.name)
        unit, default, bounds = (kind.unit, kind.show(each.default), kind.bounds()) if kind else ("", "", "tables")
        rows.append(Setting(each.name, unit, default, bounds, each.metadata["meaning"], each.name in Config.reloadable))
    return rows


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
        told = tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not text, at offset {error.start}", hint=f"file {path}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path}: not TOML: {error}", hint=f"edit {path}; in TOML words are quoted") from error
    values: dict[str, Any] = {}
    for name, value in told.items():
        place = _place(path, text, name)
        if name == "routes":
            values[name] = MappingProxyType(_routes(value, path, text))
        elif name in _KINDS:
            values[name] = _parse(name, value, place)
        else:
            raise _unknown(name, (*_KINDS, "routes"), place)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in _KINDS:
            values[name] = _parse(name, value, variable)
        elif difflib.get_close_matches(name, _KINDS, cutoff=_NEARLY):
            raise _unknown(name, _KINDS, variable)
    return values


def _routes(told: object, path: Path, text: str) -> dict[str, RouteConfig]:
    if not isinstance(told, dict):
        raise InvalidInput(f"{_place(path, text, 'routes')}: routes must be tables", hint="write [routes.NAME]")
    routes = {}
    for name, keys in told.items():
        place = _place(path, text, name)
        if not isinstance(keys, dict):
            raise InvalidInput(f"{place}: routes.{name} must be a table", hint=f"write [routes.{name}]")
        try:
            check_route(name)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error.message}", hint=error.hint) from error
        routes[name] = _route(name, keys, path, text)
    return routes


def _route(route: str, keys: dict[str, object], path: Path, text: str) -> RouteConfig:
    values: dict[str, Any] = {}
    for key, value in keys.items():
        place = _place(path, text, key, after=route)
        name = f"routes.{route}.{key}"
        if key == "fifo":
            if not isinstance(value, bool):
                raise InvalidInput(f"{place}: {name} must be true or false, not {value!r}", hint=f"edit {path}")
            values[key] = value
        elif key == "mode":
            values[key] = _parse(name, value, place, Mode())
        elif key == "writers":
            values[key] = _writers(name, value, place)
        else:
            raise _unknown(key, _ROUTE_KEYS, place)
    if values.get("writers") and values.setdefault("mode", _GUARDED_MODE) & ~_GUARDED_MODE:
        place = _place(path, text, "mode", after=route)
        words = f"{place}: routes.{route} has writers, and a FIFO lets in whoever its mode does"
        raise InvalidInput(words, hint=f'mode = "{_GUARDED_MODE:04o}", or no writers')
    return RouteConfig(**values)


def _writers(name: str, told: object, place: str) -> frozenset[int]:
    if not isinstance(told, list) or not all(isinstance(user, int | str) for user in told):
        raise InvalidInput(
            f"{place}: {name} must be a list of users", hint='write names or numbers, as in ["root", 33]'
        )
    try:
        return frozenset(pwd.getpwnam(user).pw_uid if isinstance(user, str) else int(user) for user in told)
    except KeyError as error:
        raise InvalidInput(f"{place}: {name}: {error.args[0]}", hint="getent passwd lists users") from None


def _parse(name: str, value: object, place: str, kind: Kind | None = None) -> Any:
    """The checked value; its type is the kind's."""
    try:
        return (kind or _KINDS[name]).parse(value)
    except ValueError as error:
        raise InvalidInput(f"{place}: {name} must be {error}", hint="wald run --help lists every setting") from None


def _unknown(name: str, known: Iterable[str], place: str) -> InvalidInput:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return InvalidInput(f"{place}: there is no setting {name!r}", hint=f"did you mean {nearest[0]!r}?")


def _place(path: Path, text: str, key: str, *, after: str = "") -> str:
    """``path:line`` of ``key``, looked for below the table of the route ``after``; the parser keeps no lines itself."""
    start = 0
    if after and (table := re.search(rf"""^\s*\[.*(?<![\w-]){re.escape(after)}(?![\w-]).*\]""", text, re.MULTILINE)):
        start = table.end()
    found = re.compile(rf"""^\s*(\[.*)?["']?(?<![\w-]){re.escape(key)}["']?\s*[]=.]""", re.MULTILINE).search(
        text, start
    )
    return f"{path}:{text.count(chr(10), 0, found.end()) + 1}" if found else str(path)

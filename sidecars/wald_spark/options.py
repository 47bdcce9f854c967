"""The options of the data source, checked once: what a query asks for, in numbers.

    path, paths                             .load("/var/spool/wald"), .load(["/a", "/b"]); patterns are allowed
    route, routes                           "access", "access,orders"; without: every route
    startingSequence, endingSequence        records numbered so, both included
    startingTimestamp, endingTimestamp      appended from then on, and before: ISO 8601, or ms since 1970
    timeZone                                the zone of times that name none: "America/New_York"; Spark does not hand
                                            the session's to a Python source, so without this they are refused
    includeActive                           "false": leave out the segment that is being written; default "true"
    maxBytesPerPartition                    raw bytes that one task reads at most; default 64MiB
    maxValueBytes                           a longer value ends the query; default 64MiB
    mode                                    FAILFAST (default): damage ends the query; PERMISSIVE: it is passed over
    damagePath                              a directory for reports of what was passed over
    failOnDataLoss                          "false": go on where RECLAIM has removed what was asked for; default "true"
    jsonSchema                              "status INT, host STRING": columns parsed from values that are JSON

Names are case-insensitive, as everywhere in Spark.
"""

from __future__ import annotations

import difflib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from wald.errors import InvalidInput
from wald.format.names import check_route
from wald.format.times import nanoseconds
from wald.setting_types import GIB, KIB, MIB, TIB, Choice, Count, SettingType, Size
from wald_spark.damage import STRICT, Tolerance

PARTITION_BYTES = 64 * MIB
VALUE_BYTES = 64 * MIB
_LAST = (1 << 63) - 1
_MILLISECONDS_DIGITS = 12  # from 1973 on; fewer are seconds by mistake, or a date
_SEQUENCE = Count(1, 10**18 - 1)
_KNOWN = (
    "path",
    "paths",
    "route",
    "routes",
    "startingSequence",
    "endingSequence",
    "startingTimestamp",
    "endingTimestamp",
    "timeZone",
    "includeActive",
    "maxBytesPerPartition",
    "maxValueBytes",
    "mode",
    "damagePath",
    "failOnDataLoss",
    "jsonSchema",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a query asks for.

    Attributes:
        paths: as they were given.
        routes: None: all.
        first, last: sequences; ``first`` is None where nobody asked for a beginning.
        from_ns, until_ns: append times, from ≤ t < until; None where nobody asked.
        json_ddl: the columns that are parsed from values, as DDL; "": none.
        given: all of it as it came, names in lower case.
    """

    paths: tuple[str, ...]
    routes: frozenset[str] | None = None
    first: int | None = None
    last: int = _LAST
    from_ns: int | None = None
    until_ns: int | None = None
    active: bool = True
    partition_bytes: int = PARTITION_BYTES
    value_bytes: int = VALUE_BYTES
    tolerance: Tolerance = STRICT
    json_ddl: str = ""
    given: Mapping[str, str] = field(default_factory=dict)


def parse_options(given: Mapping[str, str], *, also: tuple[str, ...] = ()) -> Options:
    """
    Args:
        also: names of further options that somebody else parses.

    Raises:
        InvalidInput: an option that does not exist, or a value that cannot be.
    """
    told = _Told({name.lower(): value for name, value in given.items()})
    told.check_names((*_KNOWN, *also))
    options = Options(
        paths=_paths(told),
        routes=_routes(told),
        first=told.number("startingSequence", _SEQUENCE, 0) or None,
        last=told.number("endingSequence", _SEQUENCE, _LAST),
        from_ns=told.time("startingTimestamp"),
        until_ns=told.time("endingTimestamp"),
        active=told.flag("includeActive"),
        partition_bytes=told.number("maxBytesPerPartition", Size(64 * KIB, TIB), PARTITION_BYTES),
        value_bytes=told.number("maxValueBytes", Size(1, 2 * GIB - 1), VALUE_BYTES),
        tolerance=Tolerance(
            damage=told.word("mode", "FAILFAST", "PERMISSIVE") == "PERMISSIVE",
            loss=not told.flag("failOnDataLoss"),
            report=os.path.abspath(told.text("damagePath")) if told.text("damagePath") else "",
        ),
        json_ddl=told.text("jsonSchema"),
        given=told.options,
    )
    if (options.first or 1) > options.last:
        raise InvalidInput(f"records {options.first} to {options.last} are none", hint="startingSequence is the lower")
    if options.from_ns is not None and options.until_ns is not None and options.from_ns >= options.until_ns:
        raise InvalidInput("no time is between startingTimestamp and endingTimestamp", hint="the first is the earlier")
    return options


@dataclass(frozen=True, slots=True)
class _Told:
    """The options as Spark hands them over, names in lower case."""

    options: Mapping[str, str]

    def check_names(self, known: tuple[str, ...]) -> None:
        if self.options.keys() >= {"owner", "provider"}:  # Spark forgets the options of a table when it reads it
            raise InvalidInput(
                "a table cannot be of format wald", hint="CREATE TEMPORARY VIEW name USING wald OPTIONS (path '…')"
            )
        lower = {name.lower(): name for name in known}
        for name in self.options:
            if name not in lower and "." not in name:  # names with dots are Spark's own
                near = difflib.get_close_matches(name, lower, n=1)
                hint = f"did you mean {lower[near[0]]}?" if near else f"there are {', '.join(known)}"
                raise InvalidInput(f"there is no option {name!r}", hint=hint)

    def text(self, name: str, default: str = "") -> str:
        return self.options.get(name.lower(), default)

    def number(self, name: str, kind: Size | Count, default: int) -> int:
        given = self.options.get(name.lower())
        return default if given is None else int(self._parsed(name, kind, given))

    def word(self, name: str, *words: str) -> str:
        """One of some words, the first of which is the default; in any case."""
        given = self.text(name, words[0])
        return str(self._parsed(name, Choice(words), next((word for word in words if word == given.upper()), given)))

    def flag(self, name: str) -> bool:
        """True where nothing else is said."""
        return self._parsed(name, Choice(("true", "false")), self.text(name, "true").lower()) == "true"

    def time(self, name: str) -> int | None:
        given = self.options.get(name.lower())
        if given is None:
            return None
        if given.isdecimal() and len(given) >= _MILLISECONDS_DIGITS:
            return int(given) * 1_000_000
        try:
            moment = datetime.fromisoformat(given)
        except ValueError:
            raise InvalidInput(
                f"{name} must be a time, or milliseconds since 1970, not {given!r}",
                hint=f'.option("{name}", "2026-11-21T10:00:00Z")',
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=self._zone(name, given))
        return nanoseconds(moment)

    def _zone(self, name: str, given: str) -> ZoneInfo:
        """The zone of ``given``, which names none."""
        zone = self.text("timeZone")
        if not zone:
            raise InvalidInput(
                f"{name} is {given!r}, which names no time zone, and the session's is not known to the source",
                hint=f'.option("{name}", "2026-11-21T10:00:00Z"), or .option("timeZone", "America/New_York")',
            )
        try:
            return ZoneInfo(zone)
        except (ValueError, OSError, ZoneInfoNotFoundError):
            raise InvalidInput(
                f"timeZone must be the name of a time zone, not {zone!r}",
                hint='.option("timeZone", spark.conf.get("spark.sql.session.timeZone"))',
            ) from None

    @staticmethod
    def _parsed(name: str, kind: SettingType, given: str) -> int | str:
        try:
            parsed: int | str = kind.parse(given)
        except ValueError as error:
            raise InvalidInput(f"{name} must be {error}", hint=f'.option("{name}", …), or leave it out') from None
        return parsed


def _paths(told: _Told) -> tuple[str, ...]:
    if not (paths := told.text("paths")):
        return (told.text("path"),) if told.text("path") else ()
    try:
        listed = json.loads(paths)  # .load([…]) comes as JSON
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise InvalidInput(f"paths must be a JSON list of paths, not {paths!r}", hint='.load(["/a", "/b"])')
    return tuple(listed)


def _routes(told: _Told) -> frozenset[str] | None:
    """An empty list is an error of whoever made it, and not all routes."""
    given = [told.options[name] for name in ("route", "routes") if name in told.options]
    return frozenset(check_route(name.strip()) for name in ",".join(given).split(",")) if given else None


STREAM_OPTIONS = ("startingOffsets", "maxRecordsPerTrigger", "maxBytesPerTrigger")
_QUERIES_ONLY = ("startingSequence", "endingSequence", "startingTimestamp", "endingTimestamp", "includeActive")
_RECORDS = Count(1, 10**15)
_BYTES = Size(1, 1024 * TIB)
_SEQUENCE = Count(1, 10**18 - 1)
_STARTS_HINT = '.option("startingOffsets", "latest"), or \'{"<log id>": 251}\''


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one trigger may read; None: all there is.

    Attributes:
        records: of the routes that are read.
        raw_bytes: as they are in a segment before it is compressed.
    """

    records: int | None = None
    raw_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream asks for.

    Attributes:
        starting: the place of a log that ``first`` does not name.
        first: id of the log, in hexadecimal → the first record wanted.
    """

    starting: Literal["earliest", "latest"] = "earliest"
    first: Mapping[str, int] = field(default_factory=dict)
    limits: Limits = Limits()


def parse_stream_options(given: Mapping[str, str]) -> StreamOptions:
    """
    Args:
        given: all options, names in lower case.

    Raises:
        InvalidInput: a value that cannot be, or an option that streams do not have.
    """
    for name in _QUERIES_ONLY:
        if name.lower() in given:
            raise InvalidInput(
                f"a stream has no {name}: it begins where startingOffsets says, and has no end", hint=_STARTS_HINT
            )
    limits = Limits(
        records=_number(given, "maxRecordsPerTrigger", _RECORDS), raw_bytes=_number(given, "maxBytesPerTrigger", _BYTES)
    )
    starting = given.get("startingoffsets", "earliest").strip()
    if starting.lower() == "latest":
        return StreamOptions("latest", limits=limits)
    if starting.lower() == "earliest":
        return StreamOptions(limits=limits)
    return StreamOptions(first=_first(starting), limits=limits)


def _number(given: Mapping[str, str], name: str, kind: Count | Size) -> int | None:
    if (told := given.get(name.lower())) is None:
        return None
    try:
        return kind.parse(told)
    except ValueError as error:
        raise InvalidInput(f"{name} must be {error}", hint=f'.option("{name}", …), or leave it out') from None


def _first(told: str) -> dict[str, int]:
    try:
        named = json.loads(told)
        return {uuid.UUID(log).hex: _SEQUENCE.parse(first) for log, first in named.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"startingOffsets must be earliest, latest, or JSON with the first record wanted of each log, not {told!r}"
            f" ({error})",
            hint=_STARTS_HINT,
        ) from None

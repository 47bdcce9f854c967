"""Options of the data source for queries and streams, parsed once; and the handling of damage.

The pages docs/spark/source.md and docs/spark/streams.md list them. A stream with a checkpoint continues at its end,
and a log that appears later is read from its oldest record, regardless of ``startingOffsets``. Names are
case-insensitive, as everywhere in Spark.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from wald.errors import Damaged, InvalidInput
from wald.format.names import check_route
from wald.format.times import nanoseconds, parse_time
from wald.setting_types import GIB, KIB, MIB, TIB, SettingType, choice, count, size
from wald_spark.locations import local_path

PARTITION_BYTES = 64 * MIB
VALUE_BYTES = 64 * MIB
PARTIAL_OPTION = '.option("partial", "true")'
PARTIAL_HINT = (
    f"put the segments back; if this is a copy without them, {PARTIAL_OPTION} begins with the oldest record present"
)
_SHOWN = 10  # messages per piece on stderr; the report has all
_LAST = (1 << 63) - 1
_MILLISECONDS_DIGITS = 12  # since 1973; fewer digits are probably seconds, or a date
_SEQUENCE = count(1, 10**18 - 1)
_KNOWN = (
    *("path", "paths", "route", "routes", "timeZone", "maxBytesPerPartition", "maxValueBytes"),
    *("mode", "damagePath", "partial", "failOnDataLoss", "jsonSchema"),
)
_QUERIES_ONLY = ("startingSequence", "endingSequence", "startingTimestamp", "endingTimestamp", "includeActive")
STREAM_OPTIONS = ("startingOffsets", "maxRecordsPerTrigger", "maxBytesPerTrigger")
_MEANT = {
    "startingoffsets": 'only streams have it; a query begins at .option("startingSequence", …) or startingTimestamp',
    "endingoffsets": 'a query ends with .option("endingSequence", …) or endingTimestamp; a stream has no end, but '
    ".trigger(availableNow=True) stops at the records that exist when it starts",
    "maxrecordspertrigger": "only streams have it: spark.readStream",
    "maxbytespertrigger": "only streams have it: spark.readStream",
}
_OFFSET = re.compile(r"(?:UTC|GMT)?([+-])(\d\d?)(?::?([0-5]\d))?")  # forms of Spark's session time zone
_log = logging.getLogger("wald.spark")
_STARTS_HINT = '.option("startingOffsets", "latest"), or \'{"<log id>": 251}\''


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance for missing data."""

    damage: bool = False  # True to skip unreadable records (mode=PERMISSIVE)
    loss: bool = False  # True to skip records that RECLAIM has deleted (failOnDataLoss=false)
    report: str = ""  # a directory for a file of JSON lines for each piece with skipped records; "" for none
    partial: bool = False  # True if records before the oldest segment may be missing (partial=true)


STRICT = Tolerance()


@dataclass(slots=True)
class DamageReport:
    """Damage found in one piece; ``name`` identifies the piece."""

    tolerance: Tolerance
    name: str
    messages: list[str] = field(default_factory=list)

    def add(self, error: Damaged) -> None:
        if not self.tolerance.damage:
            raise Damaged(error.message, hint=f'{error.hint}; .option("mode", "PERMISSIVE") skips unreadable records')
        self.messages.append(error.message)

    def close(self) -> None:
        """Report skipped records on stderr and in a file, which replaces that of an earlier attempt."""
        for message in self.messages[:_SHOWN]:
            _log.warning("skipped: %s", message)
        if len(self.messages) > _SHOWN:
            _log.warning("skipped: %d more like these in %s", len(self.messages) - _SHOWN, self.name)
        if (directory := self.tolerance.report) and self.messages:
            os.makedirs(directory, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", suffix=".tmp", delete=False) as file:
                for message in self.messages:
                    file.write(json.dumps({"reading": self.name, "message": message}) + "\n")
            os.replace(file.name, os.path.join(directory, f"{self.name}.jsonl"))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a query."""

    paths: tuple[str, ...]  # as given
    routes: frozenset[str] | None = None  # None for all
    first: int | None = None  # a sequence; None if not given
    last: int = _LAST
    from_ns: int | None = None  # append times from here, …
    until_ns: int | None = None  # … and before this
    active: bool = True
    partition_bytes: int = PARTITION_BYTES
    value_bytes: int = VALUE_BYTES
    tolerance: Tolerance = STRICT
    json_ddl: str = ""  # the columns parsed from values, as DDL; "" for none
    given: Mapping[str, str] = field(default_factory=dict)  # all options as given, names in lower case


def parse_options(given: Mapping[str, str], *, also: tuple[str, ...] = ()) -> Options:
    """Parse the options of a query; options named in ``also`` are allowed but not parsed here."""
    asked = _Given({name.lower(): value for name, value in given.items()})
    asked.check_names((*_KNOWN, *_QUERIES_ONLY, *also))
    options = Options(
        paths=_paths(asked),
        routes=_routes(asked),
        first=asked.number("startingSequence", _SEQUENCE),
        last=asked.number("endingSequence", _SEQUENCE) or _LAST,
        from_ns=asked.time("startingTimestamp"),
        until_ns=asked.time("endingTimestamp"),
        active=asked.flag("includeActive"),
        partition_bytes=asked.number("maxBytesPerPartition", size(64 * KIB, TIB)) or PARTITION_BYTES,
        value_bytes=asked.number("maxValueBytes", size(1, 2 * GIB - 1)) or VALUE_BYTES,
        tolerance=Tolerance(
            damage=asked.word("mode", "FAILFAST", "PERMISSIVE") == "PERMISSIVE",
            loss=not asked.flag("failOnDataLoss"),
            partial=asked.flag("partial", default=False),
            report=asked.directory("damagePath"),
        ),
        json_ddl=asked.text("jsonSchema"),
        given=asked.options,
    )
    if (options.first or 1) > options.last:
        raise InvalidInput(f"{options.first} to {options.last} is empty", hint="startingSequence is the lower one")
    if options.from_ns is not None and options.until_ns is not None and options.from_ns >= options.until_ns:
        raise InvalidInput("endingTimestamp is not after startingTimestamp", hint="the first must be the earlier one")
    return options


@dataclass(frozen=True, slots=True)
class _Given:
    """Options as passed by Spark, with names in lower case."""

    options: Mapping[str, str]

    def check_names(self, known: tuple[str, ...]) -> None:
        if self.options.keys() >= {"owner", "provider"}:  # Spark loses the options of a table when it reads it
            raise InvalidInput(
                "a table cannot be of format wald", hint="CREATE TEMPORARY VIEW name USING wald OPTIONS (path '…')"
            )
        lower = {name.lower(): name for name in known}
        for name in self.options:
            if name not in lower and "." not in name:  # names with dots are Spark's own
                near = difflib.get_close_matches(name, lower, n=1)
                hint = f"did you mean {lower[near[0]]}?" if near else f"options: {', '.join(known)}"
                raise InvalidInput(f"unknown option {name!r}", hint=_MEANT.get(name, hint))

    def text(self, name: str, default: str = "") -> str:
        return self.options.get(name.lower(), default)

    def directory(self, name: str) -> str:
        given = local_path(self.text(name), hint=f'.option("{name}", "/a/directory"), the same on every machine')
        return os.path.abspath(given) if given else ""

    def number(self, name: str, kind: SettingType) -> int | None:
        given = self.options.get(name.lower())
        return None if given is None else int(self._parsed(name, kind, given))

    def word(self, name: str, *words: str) -> str:
        """Return one of ``words``, given in upper or lower case; the first is the default."""
        given = self.text(name, words[0])
        return str(self._parsed(name, choice(*words), next((word for word in words if word == given.upper()), given)))

    def flag(self, name: str, *, default: bool = True) -> bool:
        return self._parsed(name, choice("true", "false"), self.text(name, str(default)).lower()) == "true"

    def time(self, name: str) -> int | None:
        given = self.options.get(name.lower())
        if given is None:
            return None
        if given.isdecimal() and len(given) >= _MILLISECONDS_DIGITS:
            return int(given) * 1_000_000
        zone = self.text("timeZone")
        try:
            found = parse_time(given, datetime.now(self._zone(name, given) if zone else UTC))
        except ValueError:
            raise InvalidInput(
                f"{name} must be a time, or milliseconds since 1970, not {given!r}",
                hint=f'.option("{name}", "2026-11-21T10:00:00Z"), .option("{name}", "1h ago")',
            ) from None
        if found.tzinfo is None:
            found = found.replace(tzinfo=self._zone(name, given))
        return nanoseconds(found)

    def _zone(self, name: str, given: str) -> tzinfo:
        zone = self.text("timeZone")
        if not zone:
            raise InvalidInput(
                f"{name} is {given!r}, which names no time zone, and the source does not know the session's",
                hint=f'.option("{name}", "2026-11-21T10:00:00Z"), or .option("timeZone", "America/New_York")',
            )
        try:
            if match := _OFFSET.fullmatch(zone):
                offset = timedelta(hours=int(match[2]), minutes=int(match[3] or 0))
                return timezone(offset if match[1] == "+" else -offset)
            return ZoneInfo(zone)
        except (ValueError, OSError, ZoneInfoNotFoundError):
            raise InvalidInput(
                f"timeZone must be the name of a time zone or an offset, not {zone!r}",
                hint='.option("timeZone", "America/New_York"), or .option("timeZone", "+02:00")',
            ) from None

    @staticmethod
    def _parsed(name: str, kind: SettingType, given: str) -> int | str:
        try:
            parsed: int | str = kind.parse(given)
        except ValueError as error:
            raise InvalidInput(f"{name} must be {error}", hint=f'.option("{name}", …), or leave it out') from None
        return parsed


def _paths(asked: _Given) -> tuple[str, ...]:
    if not (paths := asked.text("paths")):
        return (asked.text("path"),) if asked.text("path") else ()
    try:
        listed = json.loads(paths)  # .load([…]) comes as JSON
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise InvalidInput(f"paths must be a JSON list of paths, not {paths!r}", hint='.load(["/a", "/b"])')
    return tuple(listed)


def _routes(asked: _Given) -> frozenset[str] | None:
    """Return the routes; an empty list is an error rather than all routes."""
    given = [asked.options[name] for name in ("route", "routes") if name in asked.options]
    return frozenset(check_route(name.strip()) for name in ",".join(given).split(",")) if given else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one trigger; None for no limit."""

    records: int | None = None  # of the routes that are read
    raw_bytes: int | None = None  # size in a segment before compression


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream."""

    starting: Literal["earliest", "latest"] = "earliest"  # where to begin in logs that are not in ``first``
    first: Mapping[str, int] = field(default_factory=dict)  # id of the log, in hexadecimal → the first record to read
    limits: Limits = Limits()


def parse_stream_options(given: Mapping[str, str]) -> StreamOptions:
    for name in _QUERIES_ONLY:
        if name.lower() in given:
            raise InvalidInput(
                f"a stream has no {name}: it begins at startingOffsets, and has no end", hint=_STARTS_HINT
            )
    asked = _Given(given)
    limits = Limits(
        asked.number("maxRecordsPerTrigger", count(1, 10**15)), asked.number("maxBytesPerTrigger", size(1, 1024 * TIB))
    )
    starting = asked.text("startingOffsets", "earliest").strip()
    if starting.lower() == "latest":
        return StreamOptions("latest", limits=limits)
    return StreamOptions(first={} if starting.lower() == "earliest" else _first(starting), limits=limits)


def _first(text: str) -> dict[str, int]:
    try:
        named = json.loads(text)
        return {uuid.UUID(log).hex: _SEQUENCE.parse(first) for log, first in named.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"startingOffsets must be earliest, latest, or JSON with the first record to read of each log, not {text!r}"
            f" ({error})",
            hint=_STARTS_HINT,
        ) from None

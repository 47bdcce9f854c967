"""The options that only a stream has, checked once.

    startingOffsets        where a new stream begins: earliest (default), latest, or JSON {"<log id>": SEQUENCE}, the
                           first record wanted of each log; a log that is not named there begins with its oldest record
    maxRecordsPerTrigger   of the routes that are read, from all logs together
    maxBytesPerTrigger     raw bytes, about; at least one record is read, whatever its length

A stream that goes on from a checkpoint begins where that ends, and a log that appears later begins with its oldest
record, whatever ``startingOffsets`` says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from wald.errors import InvalidInput
from wald.kinds import TIB, Count, Size
from wald_spark.admission import Limits

OPTIONS = ("startingOffsets", "maxRecordsPerTrigger", "maxBytesPerTrigger")
_QUERIES_ONLY = ("startingSequence", "endingSequence", "startingTimestamp", "endingTimestamp", "includeActive")
_RECORDS = Count(1, 10**15)
_BYTES = Size(1, 1024 * TIB)
_SEQUENCE = Count(1, 10**18 - 1)
_STARTS_HINT = '.option("startingOffsets", "latest"), or \'{"<log id>": 251}\''


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream asks for.

    Attributes:
        starting: the place of a log that ``first`` does not name.
        first: id of the log, in hexadecimal → the first record wanted.
    """

    starting: Literal["earliest", "latest"] = "earliest"
    first: Mapping[str, int] = field(default_factory=dict)
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen


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

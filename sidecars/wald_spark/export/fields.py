"""The types of named fields of JSON, found out from records: what a person would have written as DDL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from wald.errors import InvalidInput
from wald_spark.pieces import LogPiece

SAMPLE = 10_000
_TYPES: dict[type, str] = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "STRING"}


def ddl_of(names: Sequence[str], values: Iterable[bytes]) -> str:
    """DDL for ``names``, from the first :data:`SAMPLE` values that are JSON objects.

    Raises:
        InvalidInput: a field is in none of them, is of several types, or is no scalar.
    """
    objects = list(islice(_objects(values), SAMPLE))
    return ", ".join(f"`{name.replace('`', '``')}` {_type_of(name, objects)}" for name in names)


def values_of(pieces: Iterable[LogPiece]) -> Iterator[bytes]:
    """The values of all records, read as far as somebody asks for them."""
    for piece in pieces:
        for batch in piece.batches():
            yield from (record.value for record in batch.records())


def _objects(values: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for value in values:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _type_of(name: str, objects: Sequence[dict[str, object]]) -> str:
    kinds = {type(found[name]) for found in objects if found.get(name) is not None}
    if kinds == {int, float}:
        kinds = {float}
    if len(kinds) != 1 or not kinds <= _TYPES.keys():
        words = "is of no single scalar type in" if kinds else "is in none of"
        raise InvalidInput(
            f"field {name} {words} the first {len(objects)} records",
            hint=f"say its type: --json-schema '{name} STRING'",
        )
    return _TYPES[kinds.pop()]

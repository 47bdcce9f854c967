"""Says in words what a parameter or a field may be, where msgspec names types of Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_PLACE = re.compile(r" - at `\$\.(\w+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MANY = 1 << 53  # an upper bound from here on says nothing to a person
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


def in_words(error: msgspec.ValidationError, shape: type) -> str:
    """What is wrong with something that should be of ``shape``; what msgspec says, if that is deeper in it."""
    (reference,), components = msgspec.json.schema_components([shape])
    fields = components[reference["$ref"].rpartition("/")[2]]["properties"]
    if unknown := _UNKNOWN.match(str(error)):
        return f"there is no {unknown[1][:40]!r}; there are {', '.join(fields)}"
    place = _PLACE.search(str(error))
    expected = _expected(fields.get(place[1], {})) if place else ""
    return f"{place[1]} is {expected}" if place and expected else str(error)


def _expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("type") not in _TYPES:
        return " or ".join(filter(None, map(_expected, schema.get("anyOf", ()))))
    return _TYPES[schema["type"]] + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    if "maxLength" in schema:
        return f" of at most {schema['maxLength']} characters"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return ""
    return f", {least} or more" if most is None or most > _MANY else f" from {least} to {most}"

"""The OpenAPI 3.1 document, made from the table of verbs and the shapes that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

import wald
from wald_gate.auth.tokens import Right
from wald_gate.call import Verb
from wald_gate.problems import MEDIA_TYPE
from wald_gate.shapes import NAME, SEQUENCE_MAX, Problem

_REFERENCE = "#/components/schemas/{name}"
_NAME = re.compile(r"\{(\w+)\}")
_NAMES: Mapping[str, Mapping[str, Any]] = {
    "route": {"type": "string", "pattern": NAME},
    "group": {"type": "string", "pattern": NAME},
    "sequence": {"type": "integer", "minimum": 1, "maximum": SEQUENCE_MAX},
}
_NDJSON, _A_LINE = "application/x-ndjson", "One item per line."
_BYTES = {"type": "string", "contentMediaType": "application/octet-stream"}
_STATUSES = {
    400: "The request is invalid.",
    401: "The client is not authenticated, or the token is unknown.",
    403: "The client may not do this.",
    404: "There is no such route, group or record.",
    405: "The path does not support this method.",
    406: "The gate has none of the formats that the client accepts.",
    408: "The body did not arrive in time.",
    409: "The request would break a promise of the log.",
    410: "Requested records were reclaimed.",
    413: "The request is too large.",
    415: "The path does not accept this media type.",
    422: "Another body was sent with this Idempotency-Key.",
    423: "Another process works for this group.",
    421: "The request is for another host.",
    429: "The client exceeds its limits, or the daemon is busy; Retry-After says when to try again.",
    500: "Something is damaged, or the gate has failed.",
    504: "The records are stored, and the group has not processed them in time.",
    503: "The daemon does not answer, or the disk is full; Retry-After says when to try again.",
}
_OPTIONAL = {  # fields for some clients only, or of some groups
    "Group": ("path", "work"),
    "GroupOfRoute": ("path",),
    "Owner": ("command",),
    "WorkOfGroup": ("commands",),
}
_SECONDS = {"schema": {"type": "integer", "minimum": 1}}
_REPLAYED = {"schema": {"enum": ["true"]}, "description": "The whole request was already stored under the same key."}
_SECURITY: list[dict[str, list[str]]] = [{"token": []}, {}]
_ANY_VERB = (400, 405, 500, 503)


def document(verbs: Sequence[Verb]) -> dict[str, Any]:
    shapes = {shape for verb in verbs for shape in (*verb.body.values(), *verb.answers.values()) if shape is not None}
    components = _components({Problem, *(part for shape in shapes for part in _parts(shape))})
    paths: dict[str, dict[str, Any]] = {}
    for verb in verbs:
        paths.setdefault(verb.path, {})[verb.method.lower()] = _operation(verb)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "wald",
            "version": wald.__version__,
            "summary": "A durable spool: records in, an append-only log, readers at their own pace.",
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "."}],
        "security": _SECURITY,
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _parts(shape: Any) -> tuple[Any, ...]:
    """Return the classes of a union of dataclasses, or of a list of such a union; msgspec does not describe these."""
    inner = get_args(shape)[0] if get_origin(shape) is list else shape
    return get_args(inner) if isinstance(inner, UnionType) else (shape,)


def _components(shapes: Iterable[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(sorted(shapes, key=str), ref_template=_REFERENCE)
    for name, optional in _OPTIONAL.items():
        components[name]["required"] = [each for each in components[name]["required"] if each not in optional]
    for component in components.values():
        if component.get("properties", {}).get("kind", {}).pop("default", None):  # answers always have it
            component["required"].insert(0, "kind")
    return {name: _for_clients(schema) for name, schema in components.items()}


def _operation(verb: Verb) -> dict[str, Any]:
    right = "" if verb.right is Right.NONE else f" Needs {verb.right.value}."
    in_path = {"in": "path", "required": True}
    operation: dict[str, Any] = {
        "operationId": verb.name,
        "summary": verb.summary,
        "description": f"{verb.summary}{right}",
        "parameters": [
            *({"name": name, **in_path, "schema": _for_clients(_NAMES[name])} for name in _NAME.findall(verb.path)),
            *_in_query(verb.query),
            *({"name": name, "in": "header", "schema": schema} for name, schema in verb.headers.items()),
        ],
        "responses": _responses(verb),
    }
    if verb.body:
        operation["requestBody"] = {"required": True, "content": _content(verb.body)}
    operation["security"] = [] if verb.right is Right.NONE else _SECURITY
    return operation


def _in_query(shape: type[Struct] | None) -> Iterator[dict[str, Any]]:
    if shape is None:
        return
    (reference,), components = msgspec.json.schema_components([shape], ref_template=_REFERENCE)
    described = components[reference["$ref"].rpartition("/")[2]]
    for name, schema in described["properties"].items():
        required = name in described.get("required", ())
        yield {"name": name, "in": "query", "required": required, "schema": _for_clients(schema)}


def _responses(verb: Verb) -> dict[str, Any]:
    secured = () if verb.right is Right.NONE else (401, 403, 421, 429)
    statuses = sorted({*_ANY_VERB, *secured, *verb.statuses})
    found: dict[str, Any] = {"200": {"description": "It is done.", "content": _content(verb.answers)}}
    if "Idempotency-Key" in verb.headers:
        found["200"]["headers"] = {"Idempotency-Replayed": _REPLAYED}
    for status in statuses:
        found[str(status)] = {
            "description": _STATUSES[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE.format(name="Problem")}}},
            **({"headers": {"Retry-After": _SECONDS}} if status in (429, 503) else {}),
        }
    return found


def _content(shapes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        media_type: {"schema": _schema(shape) | ({"description": _A_LINE} if media_type == _NDJSON else {})}
        for media_type, shape in shapes.items()
    }


def _schema(shape: Any) -> Any:
    if shape is None:
        return _BYTES
    parts = _parts(shape)
    references, _ = msgspec.json.schema_components(parts, ref_template=_REFERENCE)
    if len(parts) == 1:
        return _for_clients(references[0])
    kinds = [get_args(get_type_hints(part)["kind"])[0] for part in parts]
    mapping = {kind: each["$ref"] for kind, each in zip(kinds, references, strict=True)}
    found = {"oneOf": list(references), "discriminator": {"propertyName": "kind", "mapping": mapping}}
    return {"type": "array", "items": found} if get_origin(shape) is list else found


def _for_clients(schema: Any) -> Any:
    """Return a schema without constructs that generated clients misread.

    Without a width, integers would have 32 bits. TypeScript would merge the alternatives of a tagged union. A default
    of a choice has no type.
    """
    if isinstance(schema, list):
        return [_for_clients(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _for_clients(each) for name, each in schema.items()}
    if found.get("type") == "integer":
        found["format"] = "int64"
    if "anyOf" in found:
        found.pop("default", None)
    if "discriminator" in found:
        found["oneOf"] = found.pop("anyOf")
    return found

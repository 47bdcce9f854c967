"""Schemathesis hooks for the gate, beyond the OpenAPI document: JSON lines, and slow requests.

Schemathesis loads this module in its process.
"""

import json
import re
from typing import Any

import schemathesis

from wald_gate.shapes import NAME, WAIT

NDJSON = "application/x-ndjson"
NAMES = {"route": "orders", "group": "packing"}  # they exist: most requests get past "there is no such route"
WAIT_SECONDS = 0.01


@schemathesis.serializer(NDJSON)
def as_lines(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """Return a body as lines, one object each; a value that is not an array is one line."""
    lines = value if isinstance(value, list) else [value]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@schemathesis.deserializer(NDJSON)
def of_lines(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    """Return an answer as the array that the document describes."""
    return [json.loads(line) for line in response.content.splitlines()]


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case[Any], **__: Any) -> None:
    """Bound the time of an answer and use existing names; replace only valid values, by valid ones."""
    operation = case.operation.definition.raw["operationId"]
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    for name, there in NAMES.items():
        if operation != "add_route" and _is_like(NAME, case.path_parameters.get(name)):
            case.path_parameters[name] = there
    if _is_like(WAIT, case.query.get("wait")):
        case.query["wait"] = f"{WAIT_SECONDS}s"
    if case.query.get("follow") in ("1", 1):
        case.query["follow"] = "0"
    if case.query.get("format") == "events":  # endless without a count
        case.query.setdefault("limit", 3)
    if "to" in case.query and is_valid:  # which of two positions is the first one depends on the log
        case.query |= {"from": "earliest", "to": "now"}
        if case.headers:
            case.headers.pop("Last-Event-ID", None)
    if is_valid and case.query.get("from") != "cursor":
        case.query.pop("group", None)
    if is_valid and operation == "append" and "wait_processed" not in case.query:
        case.query.pop("wait", None)
    case.body = _whole(case.body)
    if operation == "append" and case.query.get("as") == "value":  # then any JSON is a value, and text is not
        case.query.pop("as")
    if not is_valid and operation == "append" and isinstance(case.body, dict):
        case.body = None  # an object may be a record, although the document has arrays alone
    if is_valid and isinstance(case.body, dict) and "worker" in case.body:  # its Unicode tables differ from ours
        case.body["worker"] = "".join(each for each in str(case.body["worker"]) if each.isprintable()) or "ann"
    if isinstance(case.body, dict) and isinstance(wait := case.body.get("wait"), int | float) and 0 < wait <= 300:
        case.body["wait"] = WAIT_SECONDS
    elif isinstance(case.body, dict) and _is_like(WAIT, case.body.get("wait")):
        case.body["wait"] = f"{WAIT_SECONDS}s"


def _whole(value: Any) -> Any:
    """Return the value with 3 for 3.0, which is an integer to JSON Schema but not to most JSON parsers."""
    match value:
        case dict():
            return {key: _whole(each) for key, each in value.items()}
        case list():
            return [_whole(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _is_like(pattern: str, value: object) -> bool:
    return isinstance(value, str | int) and re.search(pattern, str(value)) is not None

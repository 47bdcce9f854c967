"""The OpenAPI document is correct: it is checked against responses, docs/json.md, and with a generic API tester."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from gating import GROUP, Gate
from json_page import sections

from wald.status import schema
from wald_gate import shapes
from wald_gate.app import VERBS

SUPPORT = Path(__file__).parents[2] / "support"
ROUTE = "/v1/routes/orders"
OF_GROUP = f"{ROUTE}/groups/{GROUP}"
SHAPES = {verb.name: verb.answers for verb in VERBS}
SHAPES_OF_COMMANDS: dict[str, Any] = {
    "wald route list": schema.Routes,
    "wald head": schema.Head,
    "wald where": schema.Where,
    "wald cut": shapes.Cut,
    "wald explain": schema.Explained,
    "wald group pending": schema.Pending,
}
SEED = 20261124
CONFIG = """
hooks = "openapi_hooks"
max-stream-events = 3
request-timeout = 60
warnings = false

[phases.stateful]
enabled = false

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404", "409", "410", "422"]  # these depend on what is in the log

[[operations]]
include-operation-id = "append"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]  # of wait_processed
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422", "504"]
"""


def differences(document: Any, schema: Any, found: Any, at: str = "") -> Iterator[str]:
    """Yield the places at which a response has keys missing from its schema or lacks required ones."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "discriminator" in schema:
        yield from differences(document, {"$ref": schema["discriminator"]["mapping"][found["kind"]]}, found, at)
    elif "anyOf" in schema:
        candidates = [list(differences(document, each, found, at)) for each in schema["anyOf"]]
        yield from min(candidates, key=len)
    elif isinstance(found, list):
        for each in found:
            yield from differences(document, schema["items"], each, f"{at}[]")
    elif isinstance(found, dict) and "properties" in schema:
        properties = schema["properties"]
        for key in found.keys() - properties.keys() | {*schema.get("required", ())} - found.keys():
            yield f"{at}.{key}"
        for key in found.keys() & properties.keys():
            yield from differences(document, properties[key], found[key], f"{at}.{key}")
    elif (found is None) != (schema.get("type") == "null"):
        yield f"{at} is {found!r}"


def test_answers_have_the_keys_of_their_schemas_and_no_others(gate: Gate) -> None:
    timed = {"value": "1", "key": "ann", "headers": {"a": "b"}, "event_time_ns": 5}
    lines = [timed, {"value_base64": "/w=="}, {"value": "3"}]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    answers = {"append": gate.post(f"{ROUTE}/records", body, "application/x-ndjson")}
    answers |= {"add_route": gate.post("/v1/routes/made"), "cut": gate.post("/v1/cut")}
    gate.make_group(GROUP)
    taken: dict[str, Any] = {"worker": "w"}
    answers["lease"] = gate.post(f"{OF_GROUP}/lease", taken)
    answers["nack"] = gate.post(f"{OF_GROUP}/nack", taken | {"sequences": [1, 9], "delay": 60})
    answers["extend"] = gate.post(f"{OF_GROUP}/extend", taken | {"sequences": [2]})
    answers["ack"] = gate.post(f"{OF_GROUP}/ack", taken | {"sequences": [3]})
    answers["set_cursor"] = gate.ask("PUT", f"{ROUTE}/cursors/g", b'{"sequence": 1}')
    for name, path in (
        ("records", f"{ROUTE}/records"),
        ("cursor", f"{ROUTE}/cursors/g"),
        ("pending", f"{OF_GROUP}/pending"),
        ("groups", f"{ROUTE}/groups"),
        ("routes", "/v1/routes"),
        ("head", "/v1/head"),
        ("where", "/v1/where/2"),
        ("explain", "/v1/explain"),
        ("healthz", "/healthz"),
        ("readyz", "/readyz"),
    ):
        answers[name] = gate.get(path)
    answers["release"] = gate.post(f"{OF_GROUP}/release", taken)
    answers["remove_group"] = gate.ask("DELETE", OF_GROUP)

    assert answers.keys() == SHAPES.keys() - {"metrics", "openapi"}
    document = gate.get("/openapi.json").json()
    verbs = {verb["operationId"]: verb for path in document["paths"].values() for verb in path.values()}
    for name, answer in answers.items():
        assert answer.status == 200, answer.body
        media_type = answer.headers["content-type"]
        described = verbs[name]["responses"]["200"]["content"][media_type]["schema"]
        found = answer.lines() if media_type == "application/x-ndjson" else answer.json()
        assert list(differences(document, described, found)) == [], name


@pytest.mark.parametrize(("command", "shape"), SHAPES_OF_COMMANDS.items())
def test_a_fact_is_described_as_docs_json_describes_what_its_command_prints(command: str, shape: Any) -> None:
    """Rare keys are included; the command prints the route and group of pending records, which the path has here."""
    hints = [get_type_hints(each) for each in get_args(shape) or (shape,)]
    kinds = {get_args(each["kind"])[0] if "kind" in each else None: set(each) for each in hints}
    tables = {kind: table for table in sections()[command] for kind in table.values or (None,)}

    assert kinds.keys() == tables.keys()
    for kind, table in tables.items():
        keys = {re.match(r"\w+", path)[0] for path in table.types}  # type: ignore[index]  # each has a name
        given = {"route", "group"} if shape is schema.Pending else set()
        assert kinds[kind] - {"kind"} == keys - given - {"kind"}


@pytest.mark.slow
def test_a_stranger_finds_no_answer_that_the_document_does_not_allow(gate: Gate, tmp_path: Path) -> None:
    """Schemathesis sends 1,500 requests, with all checks except those of request chains."""
    gate.post(f"{ROUTE}/records", b'one\n{"two": 2}\n\xff\n')
    gate.make_group(GROUP)
    gate.post(f"{OF_GROUP}/lease", {"worker": "ann", "max_records": 1})
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    program = [sys.executable, "-m", "schemathesis.cli", "run", f"{gate.origin}/openapi.json", "--no-color"]
    bounded = ["--seed", str(SEED), "--max-examples", "60", "--generation-database", "none"]
    done = subprocess.run(
        [*program, *bounded, "--continue-on-failure"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Tested: {len(VERBS)}\n" in done.stdout
    assert gate.process.poll() is None

"""The gate reports the same facts about the log as the commands, and its OpenAPI document covers every verb."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from gating import Gate
from logs import Built
from reading import result_of
from running import wald

from wald_gate.app import VERBS
from wald_gate.info.verbs import explained

CURSOR = "/v1/routes/orders/cursors/billing"


@pytest.mark.parametrize(
    ("path", "command"),
    [("/v1/routes", "route list"), ("/v1/head", "head"), ("/v1/where/2", "where 2"), ("/v1/where/9", "where 9")],
)
def test_a_fact_is_what_its_command_prints(gate: Gate, root: Path, path: str, command: str) -> None:
    """The responses differ only in the schema key, which versions the command's output."""
    gate.post("/v1/routes/orders/records", b"one\ntwo\n")
    said = gate.get(path).json()
    printed = json.loads(wald(*command.split(), "--json", "--root", root).stdout)

    assert {"schema": printed["schema"], **said} == printed


def test_routes_are_made_and_segments_cut(gate: Gate) -> None:
    assert gate.post("/v1/routes/made").json() == {"route": "made"}
    assert gate.post("/v1/cut").json() == {"cut": False, "segment": 1}
    gate.post("/v1/routes/made/records", b"one\n")
    assert gate.post("/v1/cut").json() == {"cut": True, "segment": 2}
    assert gate.get("/v1/explain").lines()


def test_a_parameter_that_a_request_does_not_have_is_refused(gate: Gate) -> None:
    for method, path in [
        ("GET", "/v1/explain?route=orders"),
        ("GET", "/v1/routes?limit=1"),
        ("GET", "/v1/head?token=secret"),
        ("POST", "/v1/routes/orders/groups/packing/lease?wait=3"),
    ]:
        answer = gate.ask(method, path, b'{"worker": "w"}' if method == "POST" else None)

        name, _, value = path.partition("?")[2].partition("=")
        assert (answer.status, answer.json()["detail"]) == (
            400,
            f"the query: unknown parameter {name!r}; there are none",
        )
        assert len(value) < 2 or value.encode() not in answer.body


def test_a_cursor_moves_forward_and_back_only_if_that_is_meant(gate: Gate) -> None:
    gate.post("/v1/routes/orders/records", b"one\ntwo\n")
    moved = [
        gate.ask("PUT", CURSOR, json.dumps(body).encode()).status
        for body in ({"sequence": 2}, {"sequence": 1}, {"sequence": 1, "rewind": True}, {"sequnce": 1}, {"sequence": 9})
    ]

    assert moved == [200, 409, 200, 400, 409]
    assert gate.get(CURSOR).json()["sequence"] == 1
    assert gate.get("/v1/routes/orders/cursors/nobody").status == 404


def test_the_document_has_every_verb_and_refers_to_nothing_that_is_missing(gate: Gate) -> None:
    found = gate.get("/openapi.json").json()
    verbs = {(method.upper(), path) for path, item in found["paths"].items() for method in item}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found)))

    assert verbs == {(verb.method, verb.path) for verb in VERBS}
    assert references == found["components"]["schemas"].keys()
    assert {"Problem", "Stored", "Cursor", "CursorPosition"} <= references


def test_what_there_is_not(gate: Gate) -> None:
    for method, path, status in [("GET", "/v1/nothing", 404), ("DELETE", "/v1/head", 405)]:
        answer = gate.ask(method, path)

        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")


def test_a_path_with_a_newline_behind_it_is_no_path(gate: Gate) -> None:
    """Such a path would bypass a proxy's rule for the path without the newline."""
    for path in ["/healthz%0A", "/v1/head%0A", "/v1/routes/orders/records%0A?limit=1"]:
        assert gate.get(path).status == 404


def test_an_encoded_slash_separates_nothing(gate: Gate) -> None:
    """Names contain no slash, and a proxy compares the path before decoding."""
    gate.post("/v1/routes/orders/records", b"one\n")
    gate.make_group("billing")
    for method, path in [
        ("GET", "/v1/routes/orders%2frecords"),
        ("GET", "/v1/routes/orders%2Frecords?limit=1"),
        ("POST", "/v1/routes/orders%2Frecords"),
        ("POST", "/v1/routes/made%2f"),
        ("GET", "/v1/routes/orders/groups%2Fbilling/pending"),
        ("GET", "/v1%2fhead"),
        ("GET", "/routes/orders%2Fx"),
    ]:
        answer = gate.ask(method, path, b"two\n" if method == "POST" else None, {"Content-Type": "text/plain"})

        assert (answer.status, answer.json()["code"]) == (404, "no-such-path")
    assert len(gate.get("/v1/routes/orders/records").lines()) == 1


def test_a_number_is_written_in_digits(gate: Gate) -> None:
    for limit in ["1e3", "1.0", "", "٣", "0x1"]:
        answer = gate.get(f"/v1/routes/orders/records?limit={quote(limit)}")

        assert (answer.status, answer.json()["code"]) == (400, "invalid")
        assert "limit" in answer.json()["detail"]


def test_a_log_of_many_segments_is_explained_in_steps(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(20):
        built.lines("a", [b"x"])
        built.cut()
    way = explained(built.log)
    for _ in range(20):
        next(way)
    kinds = [each.kind for each in result_of(way)]
    assert kinds == ["segment"] * 21 + ["group", "log"]

"""Facts equal those of the commands; the OpenAPI document describes every answer, and clients are generated from it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import openapi_generator_cli
import programs
import pytest
from gating import NDJSON, ORDERS, Gate, entry
from json_page import sections
from logs import Built
from reading import result_of
from running import TIMEOUT_SECONDS, Daemon, wald

from wald.status import schema
from wald_gate import shapes
from wald_gate.app import VERBS
from wald_gate.info.verbs import explained
from wald_gate.openapi import document
from wald_gate.shapes import encoded

SUPPORT = Path(__file__).parents[2] / "support"
ROUTE = "/v1/routes/orders"
OF_GROUP = f"{ROUTE}/groups/packing"
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
    answers = {"append": gate.post(ORDERS, body, NDJSON)}
    answers |= {"add_route": gate.post("/v1/routes/made"), "cut": gate.post("/v1/cut")}
    gate.make_group("packing")
    taken: dict[str, Any] = {"worker": "w"}
    answers["lease"] = gate.post(f"{OF_GROUP}/lease", taken)
    answers["nack"] = gate.post(f"{OF_GROUP}/nack", taken | {"sequences": [1, 9], "delay": 60})
    answers["extend"] = gate.post(f"{OF_GROUP}/extend", taken | {"sequences": [2]})
    answers["ack"] = gate.post(f"{OF_GROUP}/ack", taken | {"sequences": [3]})
    answers["set_cursor"] = gate.put(f"{ROUTE}/cursors/g", {"sequence": 1})
    paths = {
        "records": ORDERS,
        "cursor": f"{ROUTE}/cursors/g",
        "pending": f"{OF_GROUP}/pending",
        "groups": f"{ROUTE}/groups",
        "healthz": "/healthz",
        "readyz": "/readyz",
        "where": "/v1/where/2",
        **{name: f"/v1/{name}" for name in ("routes", "head", "explain")},
    }
    answers |= {name: gate.get(path) for name, path in paths.items()}
    answers["release"] = gate.post(f"{OF_GROUP}/release", taken)
    answers["remove_group"] = gate.ask("DELETE", OF_GROUP)

    assert answers.keys() == SHAPES.keys() - {"metrics", "openapi"}
    document = gate.get("/openapi.json").json()
    verbs = {verb["operationId"]: verb for path in document["paths"].values() for verb in path.values()}
    for name, answer in answers.items():
        assert answer.status == 200, answer.body
        media_type = answer.headers["content-type"]
        described = verbs[name]["responses"]["200"]["content"][media_type]["schema"]
        found = answer.lines() if media_type == NDJSON else answer.json()
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
    """Schemathesis sends about 750 requests, with all checks except those of request chains."""
    gate.post(ORDERS, b'one\n{"two": 2}\n\xff\n')
    gate.make_group("packing")
    gate.post(f"{OF_GROUP}/lease", {"worker": "ann", "max_records": 1})
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    program = [sys.executable, "-m", "schemathesis.cli", "run", f"{gate.origin}/openapi.json", "--no-color"]
    bounded = ["--seed", str(SEED), "--max-examples", "30", "--generation-database", "none"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [*program, *bounded, "--continue-on-failure"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Tested: {len(VERBS)}\n" in done.stdout
    assert gate.process.poll() is None


CURSOR = "/v1/routes/orders/cursors/billing"


def test_a_fact_is_what_its_command_prints(shared: Gate) -> None:
    """The responses differ only in the schema key, which versions the command's output."""
    shared.post(ORDERS, b"one\ntwo\n")
    for path, command in (
        ("routes", ("route", "list")),
        ("head", ("head",)),
        ("where/2", ("where", 2)),
        ("where/99999", ("where", 99999)),
    ):
        said = shared.get(f"/v1/{path}").json()
        printed = json.loads(wald(*command, "--json", "--root", shared.root).stdout)
        assert {"schema": printed["schema"], **said} == printed


def test_routes_are_made_and_segments_cut(shared: Gate) -> None:
    assert shared.post("/v1/routes/made").json() == {"route": "made"}
    active = shared.post("/v1/cut").json()["segment"]
    assert shared.post("/v1/cut").json() == {"cut": False, "segment": active}
    stored = shared.post("/v1/routes/made/records", b"one\n").json()
    assert shared.post("/v1/cut").json() == {"cut": True, "segment": stored["last"] + 1}
    assert shared.get("/v1/explain").lines()


def test_a_parameter_of_a_request_without_parameters_is_refused(shared: Gate) -> None:
    for method, path in [
        ("GET", "/v1/explain?route=orders"),
        ("GET", "/v1/routes?limit=1"),
        ("GET", "/v1/head?token=secret"),
        ("POST", "/v1/routes/orders/groups/packing/lease?wait=3"),
    ]:
        answer = shared.ask(method, path, b'{"worker": "w"}' if method == "POST" else None)

        name, _, value = path.partition("?")[2].partition("=")
        assert (answer.status, answer.json()["detail"]) == (
            400,
            f"the query: unknown parameter {name!r}; this request takes none",
        )
        assert len(value) < 2 or value.encode() not in answer.body


def test_a_cursor_moves_forward_and_back_only_if_that_is_meant(shared: Gate) -> None:
    last = shared.post(ORDERS, b"one\ntwo\n").json()["last"]
    bodies = ({"sequence": 2}, {"sequence": 1}, {"sequence": 1, "rewind": True}, {"sequnce": 1}, {"sequence": last + 1})
    moved = [shared.put(CURSOR, body).status for body in bodies]

    assert moved == [200, 409, 200, 400, 409]
    assert shared.get(CURSOR).json()["sequence"] == 1
    assert shared.get("/v1/routes/orders/cursors/nobody").status == 404


def test_an_encoded_slash_or_newline_is_part_of_no_path(shared: Gate, stored: Callable[[], list[bytes]]) -> None:
    """Names contain neither, and a proxy compares the path before decoding."""
    shared.make_group("packing")
    for method, path in [
        ("GET", "/healthz%0A"),
        ("GET", "/v1/head%0A"),
        ("GET", "/v1/routes/orders/records%0A?limit=1"),
        ("GET", "/v1/routes/orders%2frecords"),
        ("GET", "/v1/routes/orders%2Frecords?limit=1"),
        ("POST", "/v1/routes/orders%2Frecords"),
        ("POST", "/v1/routes/made%2f"),
        ("GET", "/v1/routes/orders/groups%2Fpacking/pending"),
        ("GET", "/v1%2fhead"),
        ("GET", "/routes/orders%2Fx"),
    ]:
        answer = shared.ask(method, path, b"two\n" if method == "POST" else None, {"Content-Type": "text/plain"})

        assert (answer.status, answer.json()["code"]) == (404, "no-such-path")
    assert stored() == []


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


CLIENTS = Path(__file__).with_name("clients")
JAR = Path(openapi_generator_cli.__file__).with_name("openapi-generator.jar")
PACKAGE = "openapi_client"
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
GO_MODULE = """module generated

go 1.18

require gopkg.in/validator.v2 v2.0.1

replace gopkg.in/validator.v2 => ./validator
"""
NO_RULES = "package validator\n\nfunc Validate(any) error { return nil }\n"  # the client uses no validation rules
ANSWERS = {
    "stored": [1, 2, 2],
    "records": [[1, "one", "ann"], [2, "[2]", None]],
    "times": True,
    "cursor": [1, "valid"],
    "leased": [[2, 1, "[2]"]],
    "pending": [["out", "ann"]],
    "refused": [9],
    "problems": [[404, "not-found"], [403, "not-permitted"]],
}


@pytest.fixture
def guarded(daemon: Daemon) -> Iterator[Gate]:
    """A gate that requires a token."""
    tokens = entry("shop", read=["orders"], write=["orders"], work=["orders"])
    with Gate(daemon.root, tokens=tokens) as running:
        yield running


def run(*command: object, at: Path, **environment: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=at,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def generate(gate: Gate, generator: str, folder: Path, *options: str) -> None:
    """Generate a client from the gate's OpenAPI document."""
    at = folder.parent
    (at / "openapi.json").write_bytes(gate.get("/openapi.json").body)
    command = [programs.program("java"), "-jar", JAR, "generate", "-i", "openapi.json", "-g", generator]
    run(*command, "-o", folder, "--global-property", "apiTests=false,modelTests=false", *options, at=at)


def python(gate: Gate, at: Path) -> list[object]:
    generate(gate, "python", at / "generated", f"--package-name={PACKAGE}")
    (at / "generated" / PACKAGE).rename(at / PACKAGE)
    shutil.copy(CLIENTS / "client.py", at)
    run(sys.executable, "-W", "error", "-m", "compileall", "-q", PACKAGE, at=at)
    return [sys.executable, "client.py"]


def go(gate: Gate, at: Path) -> list[object]:
    compiler = programs.program("go")
    generate(gate, "go", at / PACKAGE, f"--package-name={PACKAGE}", "--additional-properties=withGoMod=false")
    (at / "validator").mkdir()
    (at / "validator" / "validator.go").write_text(NO_RULES)
    (at / "validator" / "go.mod").write_text("module gopkg.in/validator.v2\n\ngo 1.18\n")
    (at / "go.mod").write_text(GO_MODULE)
    shutil.copy(CLIENTS / "client.go", at)
    run(compiler, "build", "-o", "client", ".", at=at, GOCACHE=str(at / "cache"), GOPROXY="off", GOFLAGS="-mod=mod")
    return ["./client"]


def typescript(gate: Gate, at: Path) -> list[object]:
    compiler, node = programs.program("tsc"), programs.program("node")
    generate(gate, "typescript-fetch", at / PACKAGE)
    shutil.copy(CLIENTS / "client.ts", at)
    modern = ["--target", "es2020", "--lib", "es2020,dom", "--module", "commonjs"]
    # TypeScript before 4.9 infers an implicit `any` for properties that the generated code checks with `in`.
    run(compiler, "--strict", "--noImplicitAny", "false", *modern, "--outDir", "compiled", "client.ts", at=at)
    return [node, "compiled/client.js"]


@pytest.mark.slow
@pytest.mark.parametrize("language", [python, go, typescript])
def test_a_generated_client_appends_reads_works_and_tells_errors(
    guarded: Gate, tmp_path: Path, language: Callable[[Gate, Path], list[object]]
) -> None:
    at = tmp_path / "client"
    at.mkdir()
    command = language(guarded, at)

    assert json.loads(run(*command, guarded.origin, "shop-token", at=at)) == ANSWERS


def test_the_document_is_one_of_openapi() -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # slow to import, and each worker collects this file

    found = json.loads(encoded(document(VERBS)))

    assert list(OpenAPIV31SpecValidator(found).iter_errors()) == []
    assert found["servers"]
    assert found["info"]["license"]["identifier"] == tomllib.loads(PROJECT.read_text())["project"]["license"]
    assert found["security"]

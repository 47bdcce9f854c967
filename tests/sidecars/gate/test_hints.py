"""Error messages and hints for HTTP clients say what to do over HTTP and reveal nothing about the gate's machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from gating import Gate
from running import Daemon, eventually, wald

import wald as library
from wald.client.payloads import column_payloads
from wald_gate import problems
from wald_gate.records_in import daemon as daemons

ROUTE = "/v1/routes/orders"
TOKENS: dict[str, dict[str, Any]] = {"ann": {"admin": True}, "bob": {"read": ["*"], "write": ["*"], "work": ["*"]}}


@pytest.fixture(scope="module")
def gate_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate with the admin ann and the restricted client bob; packing has processed the three records of orders."""
    root = tmp_path_factory.mktemp("hints") / "log"
    tokens = root.with_name("tokens")
    lines = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **rights} for name, rights in TOKENS.items()
    ]
    tokens.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens.chmod(0o600)
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD orders")
        daemon.ask("PUB orders 6\n1\n2\n3\n")
        with Gate(root, "--tokens", tokens) as gate:
            told(gate, "ann", "PUT", f"{ROUTE}/cursors/packing", {"sequence": 0})
            lease = {"worker": "w", "done": [1, 2, 3]}
            told(gate, "ann", "POST", f"{ROUTE}/groups/packing/lease", {"worker": "w", "max_records": 3})
            told(gate, "ann", "POST", f"{ROUTE}/groups/packing/lease", lease)
            eventually(lambda: told(gate, "ann", "GET", f"{ROUTE}/cursors/packing")["sequence"] == 3)
            told(gate, "ann", "PUT", f"{ROUTE}/cursors/billing", {"sequence": 2})
            yield gate


def told(
    gate: Gate, name: str, method: str, path: str, body: dict[str, Any] | bytes | None = None, **headers: str
) -> dict[str, Any]:
    """Return the response to a request by the client ``name``."""
    kind = "application/json" if isinstance(body, dict) else "text/plain"
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = {"Authorization": f"Bearer {name}", "Content-Type": kind}
    sent |= {key.replace("_", "-"): value for key, value in headers.items()}
    answer: dict[str, Any] = gate.ask(method, path, data, sent).json()
    return answer


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize(
    ("method", "path", "body", "hint"),
    [
        ("GET", f"{ROUTE}/records?from=99", None, "?from=end&follow=1 waits for the next record"),
        ("GET", "/v1/routes/ordres/records", None, "POST /v1/routes/ordres makes it"),
        ("POST", "/v1/routes/ordres/records", b"1\n", "POST /v1/routes/ordres makes it"),
        ("PUT", f"{ROUTE}/cursors/billing", {"sequence": 1}, '{"sequence": 1, "rewind": true} moves it all the same'),
        ("PUT", f"{ROUTE}/cursors/billing", {"sequence": 9}, "GET /v1/head shows the last durable record"),
        (
            "PUT",
            f"{ROUTE}/cursors/packing",
            {"sequence": 1, "rewind": True},
            "who runs the gate can remove the work group: wald group remove orders packing",
        ),
        (
            "POST",
            f"{ROUTE}/records?wait_processed=billing&wait=10ms",
            b"4\n",
            f"GET {ROUTE}/cursors/billing shows how far it is; do not send them again",
        ),
        ("POST", f"{ROUTE}/records?wait_processed=nobody", b"4\n", "GET /v1/routes shows the groups that have"),
    ],
)
def test_hints_say_what_to_do_over_http(
    gate_of_two: Gate, name: str, method: str, path: str, body: dict[str, Any] | bytes | None, hint: str
) -> None:
    answer = told(gate_of_two, name, method, path, body)

    assert answer["hint"] == hint
    assert (str(gate_of_two.root) in json.dumps(answer)) <= (name == "ann")


def test_a_retired_route_comes_back_over_http(gate_of_two: Gate) -> None:
    told(gate_of_two, "ann", "POST", "/v1/routes/gone")
    assert wald("--root", gate_of_two.root, "route", "retire", "gone").returncode == 0

    answer = told(gate_of_two, "ann", "POST", "/v1/routes/gone/records", b"1\n")
    assert (answer["code"], answer["hint"]) == ("not-found", "POST /v1/routes/gone reactivates it")
    told(gate_of_two, "ann", "POST", "/v1/routes/gone")
    assert told(gate_of_two, "ann", "POST", "/v1/routes/gone/records", b"1\n")["count"] == 1


def test_storing_and_reading_know_a_route_or_not_in_the_same_words(gate_of_two: Gate) -> None:
    stored = told(gate_of_two, "ann", "POST", "/v1/routes/ordres/records", b"1\n")

    assert stored == told(gate_of_two, "ann", "GET", "/v1/routes/ordres/records")


def test_commands_for_the_machine_of_the_gate_are_for_those_who_may_administer_the_log(gate_of_two: Gate) -> None:
    cursor = gate_of_two.root / "routes" / "orders" / "cursors" / "broken.cursor"
    cursor.write_bytes(b"no cursor\n")
    path = f"{ROUTE}/records?from=cursor&group=broken"

    by_admin, by_other = (told(gate_of_two, name, "GET", path) for name in TOKENS)

    assert str(gate_of_two.root) in by_admin["hint"]
    assert str(cursor) in by_admin["detail"]
    assert "hint" not in by_other
    assert "routes/orders/cursors/broken.cursor" in by_other["detail"]
    assert str(gate_of_two.root) not in by_other["detail"]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("limit=x", "the query: limit is a whole number, 0 or more"),
        ("limit=-1", "the query: limit is a whole number, 0 or more"),
        ("follow=yes", "the query: follow is one of 0, 1"),
        ("format=xml", "the query: format is one of arrow, events, json, ndjson, raw"),
        ("to=" + "9" * 65, "the query: to is a text of at most 64 characters"),
    ],
)
def test_a_wrong_parameter_is_told_what_it_may_be(gate_of_two: Gate, query: str, detail: str) -> None:
    assert told(gate_of_two, "bob", "GET", f"{ROUTE}/records?{query}")["detail"] == detail


def test_an_unknown_parameter_is_told_which_there_are(gate_of_two: Gate) -> None:
    answer = told(gate_of_two, "bob", "GET", f"{ROUTE}/records?limt=1")

    assert (
        answer["detail"]
        == "the query: there is no 'limt'; there are from, to, limit, format, group, wait, follow, heartbeat"
    )


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"worker": "w", "wait": "long"}, "wait must be "),
        ({"worker": "w", "max_records": 0}, "max_records is a whole number from 1 to 10000"),
        ({"worker": 5}, "worker is a text"),
    ],
)
def test_so_is_a_wrong_field(gate_of_two: Gate, body: dict[str, Any], detail: str) -> None:
    assert detail in told(gate_of_two, "bob", "POST", f"{ROUTE}/groups/packing/lease", body)["detail"]


@pytest.mark.parametrize(
    ("key", "detail"),
    [
        ("a b", "Idempotency-Key 'a b' has a space, and no quotes around it"),
        ("\xc3\xbc", "Idempotency-Key 'ü' has more than plain ASCII"),
        ("a" * 256, "Idempotency-Key has 256 characters; 1 to 255 are allowed"),
        ('""', "Idempotency-Key has 0 characters; 1 to 255 are allowed"),
    ],
)
def test_a_wrong_key_is_told_what_is_wrong_with_it(gate_of_two: Gate, key: str, detail: str) -> None:
    answer = told(gate_of_two, "bob", "POST", f"{ROUTE}/records", b"5\n", idempotency_key=key)

    assert answer["detail"] == detail


def test_a_number_that_is_taken_is_told_to_those_who_are_no_admin(daemon: Daemon) -> None:
    """The test sends a request as the gate does, with a number that another request already uses."""
    root = library.open(daemon.root).root

    async def test() -> None:
        to_daemon = daemons.DaemonClient(root.path, daemon.socket_path, patience=30)
        end = asyncio.get_running_loop().time() + 30
        (payload,), (other,) = column_payloads([b"a"]), column_payloads([b"b"])
        await to_daemon.publish_as(daemons.Producer(5, 1), "orders", payload, seen=0, until=end)
        with pytest.raises(daemons.Overtaken) as overtaken:
            await to_daemon.publish_as(daemons.Producer(5, 1), "orders", other, seen=0, until=end)
        await to_daemon.close()
        shown = problems.for_client(overtaken.value, root, "orders", is_admin=False)

        assert isinstance(shown, daemons.Overtaken)
        assert shown.message == "batch 1 was already sent with different contents"
        assert shown.hint.startswith("GET the records")

    asyncio.run(test())


def test_the_document_names_the_header_of_an_answer_that_is_repeated(gate_of_two: Gate) -> None:
    append = told(gate_of_two, "bob", "GET", "/openapi.json")["paths"]["/v1/routes/{route}/records"]["post"]

    assert "Idempotency-Replayed" in append["responses"]["200"]["headers"]
    assert "Retry-After" in append["responses"]["503"]["headers"]
    assert "Idempotency-Key" in [each["name"] for each in append["parameters"]]

"""Error messages and hints for HTTP clients say what to do over HTTP and reveal nothing about the gate's machine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gating import Gate, entry
from running import Daemon, eventually, reclaim, wald

import wald as library
from wald.client.payloads import column_payloads
from wald.errors import NotFound
from wald.format.names import Kind, segment_name
from wald_gate import problems
from wald_gate.problems import HttpError
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


def test_hints_say_what_to_do_over_http(gate_of_two: Gate) -> None:
    cases: list[tuple[str, str, dict[str, Any] | bytes | None, str]] = [
        ("GET", f"{ROUTE}/records?from=99", None, "?from=end&follow=1 waits for the next record"),
        ("GET", "/v1/routes/ordres/records", None, "POST /v1/routes/ordres creates it"),
        ("POST", "/v1/routes/ordres/records", b"1\n", "POST /v1/routes/ordres creates it"),
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
    ]
    for method, path, body, hint in cases:
        for name in TOKENS:
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


def test_an_invalid_parameter_is_told_what_it_may_be(gate_of_two: Gate) -> None:
    for query, detail in [
        ("limit=x", "the query: limit is a whole number, 0 or more"),
        *(
            (f"limit={each}", "the query: limit is a whole number, 0 or more")
            for each in ("-1", "1e3", "1.0", "", "%D9%A3", "0x1")
        ),
        (
            "limt=1",
            "the query: there is no 'limt'; there are from, to, limit, format, group, wait, follow, heartbeat",
        ),
        ("follow=yes", "the query: follow is one of 0, 1"),
        ("format=xml", "the query: format is one of arrow, events, json, ndjson, raw"),
        ("to=" + "9" * 65, "the query: to is a text of at most 64 characters"),
    ]:
        assert told(gate_of_two, "bob", "GET", f"{ROUTE}/records?{query}")["detail"] == detail


def test_an_invalid_field_is_told_what_it_may_be(gate_of_two: Gate) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"worker": "w", "wait": "long"}, "wait must be "),
        ({"worker": "w", "max_records": 0}, "max_records is a whole number from 1 to 10000"),
        ({"worker": 5}, "worker is a text"),
    ]
    for body, detail in cases:
        assert detail in told(gate_of_two, "bob", "POST", f"{ROUTE}/groups/packing/lease", body)["detail"]


def test_an_invalid_idempotency_key_is_told_what_is_wrong_with_it(gate_of_two: Gate) -> None:
    for key, detail in [
        ("a b", "Idempotency-Key 'a b' has a space, and no quotes around it"),
        ("\xc3\xbc", "Idempotency-Key 'ü' has more than plain ASCII"),
        ("a" * 256, "Idempotency-Key has 256 characters; 1 to 255 are allowed"),
        ('""', "Idempotency-Key has 0 characters; 1 to 255 are allowed"),
    ]:
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


RECORDS = "/v1/routes/orders/records"
READER, CHIEF = {"Authorization": "Bearer reader-token"}, {"Authorization": "Bearer chief-token"}


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log whose first record is reclaimed and whose third is unreadable."""
    root = tmp_path_factory.mktemp("paths") / "log"
    tokens = root.with_name("tokens")
    rights = ["orders", "payroll"]
    tokens.write_text(entry("reader", read=rights, write=rights, work=rights) + entry("chief", admin=True))
    with Daemon(root) as daemon:
        for route in rights:
            daemon.ask(f"ROUTE ADD {route}")
        daemon.ask("PUB orders 2\nx\n")
        daemon.ask("CUT")
        daemon.ask("PUB orders 2\nx\n")
        daemon.ask("PUB orders 2\ny\n")
        library.open(root).set_cursor("orders", 1, "billing")
        reclaim(root, "--grace", "0")
        position = library.open(root).where(3).position
        assert position is not None
        with (root / "segments" / segment_name(2, Kind.RAW)).open("r+b") as segment:
            segment.seek(position)
            segment.write(b"\x55" * 8)
        (root / "routes" / "orders" / "cursors" / "broken.cursor").write_bytes(b"no cursor\n")
        with Gate(root, "--tokens", tokens) as gate:
            yield gate


def test_no_answer_to_a_reader_names_the_root(reclaimed: Gate) -> None:
    for path, status in [
        (f"{RECORDS}?from=1", 410),
        (f"{RECORDS}?from=3", 500),
        (f"{RECORDS}?from=99", 404),
        (f"{RECORDS}?from=cursor&group=broken", 500),
        ("/v1/routes", 200),
        ("/v1/routes/orders/groups", 200),
        ("/v1/routes/orders/cursors/broken", 500),
        ("/", 200),
        ("/routes", 200),
        ("/routes/orders", 200),
        ("/records?route=orders", 200),
        ("/records?route=orders&from=1", 200),
        ("/records?route=orders&from=99", 404),
        ("/records?route=orders&follow=1", 200),
        ("/records/1", 403),
        ("/records/1/value", 403),
        ("/records/3", 403),
        ("/records/3/value", 403),
        ("/readyz", 200),
        ("/metrics", 200),
    ]:
        answer = reclaimed.ask("GET", path, headers=READER)

        assert answer.status == status, answer.body
        assert str(reclaimed.root.parent) not in answer.body.decode()


def test_a_reader_still_learns_what_is_missing_and_an_admin_where(reclaimed: Gate) -> None:
    path = f"{RECORDS}?from=1"
    by_reader, by_chief = (reclaimed.ask("GET", path, headers=each).json()["detail"] for each in (READER, CHIEF))

    assert by_reader == "segments: RECLAIM has removed record 1: 1 record of route orders is missing"
    assert by_chief == f"{reclaimed.root}/{by_reader}"


def test_the_page_of_a_damaged_log_does_not_name_the_root_to_a_reader(reclaimed: Gate) -> None:
    head = reclaimed.root / "head"
    kept = head.read_bytes()
    try:
        head.write_bytes(b"x" * len(kept))
        eventually(lambda: "head" in reclaimed.ask("GET", "/", headers=CHIEF).body.decode().partition("notice bad")[2])
        for path in ("/", "/routes/orders", "/records?route=orders", RECORDS):
            answer = reclaimed.ask("GET", path, headers=READER)
            assert str(reclaimed.root.parent) not in answer.body.decode(), path
    finally:
        head.write_bytes(kept)


def test_an_error_loses_the_root_and_keeps_the_rest(reclaimed: Gate) -> None:
    for error, detail in [
        (OSError(errno.EIO, "Input/output error", "ROOT/segments/1.wal"), "segments/1.wal: Input/output error"),
        (OSError(errno.EMFILE, "Too many open files", "ROOT"), "Too many open files"),
        (PermissionError(errno.EACCES, "Permission denied", "ROOT/head"), "head: permission denied"),
        (NotFound("there is no log in ROOT"), "there is no log in the log"),
        (NotFound("ROOT2/head is not in ROOT, but in ROOT/old"), "ROOT2/head is not in the log, but in old"),
        (HttpError(410, "lost", "ROOT/segments: lost; see ROOT/lost", more={"next": 2}), "segments: lost; see lost"),
    ]:
        root = library.open(reclaimed.root).root
        with_root = _with_root(error, reclaimed.root)

        shown = problems.problem(problems.for_client(with_root, root, "orders", is_admin=False))
        to_admin = problems.problem(problems.for_client(with_root, root, "orders", is_admin=True))

        assert detail.replace("ROOT2", f"{reclaimed.root}2") in bytes(shown.body).decode()
        assert str(reclaimed.root).encode() in bytes(to_admin.body)
        assert (shown.status_code, b"next" in bytes(shown.body)) == (
            to_admin.status_code,
            b"next" in bytes(to_admin.body),
        )


def _with_root(error: Exception, root: Path) -> Exception:
    """Return the same error with this root's path."""
    if isinstance(error, OSError):
        return type(error)(error.errno, error.strerror, str(error.filename).replace("ROOT", str(root)))
    if isinstance(error, HttpError):
        return HttpError(error.status, error.code, error.message.replace("ROOT", str(root)), more=error.more)
    assert isinstance(error, NotFound)
    return NotFound(error.message.replace("ROOT", str(root)))

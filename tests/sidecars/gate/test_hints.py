"""Error messages and hints for HTTP clients say what to do over HTTP and reveal nothing about the gate's machine."""

import asyncio
import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest
from gating import ORDERS, Gate, entry, serving
from running import Daemon, eventually, reclaim, wald

import wald as library
from wald.client.payloads import column_payloads
from wald.errors import NotFound
from wald.format.names import Kind, segment_name
from wald_gate import problems
from wald_gate.problems import HttpError
from wald_gate.records_in import daemon as daemons

ROUTE = "/v1/routes/orders"
TOKENS = entry("chief", admin=True) + entry("reader", read=["*"], write=["*"], work=["*"])


@pytest.fixture(scope="module")
def gate_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate with an admin and a restricted client; packing has processed the three records of orders."""
    with serving(tmp_path_factory.mktemp("hints") / "log", tokens=TOKENS) as gate:
        gate.post(ORDERS, b"1\n2\n3\n", by="chief")
        gate.put(f"{ROUTE}/cursors/packing", {"sequence": 0}, by="chief")
        for lease in ({"worker": "w", "max_records": 3}, {"worker": "w", "done": [1, 2, 3]}):
            gate.post(f"{ROUTE}/groups/packing/lease", lease, by="chief")
        eventually(lambda: gate.get(f"{ROUTE}/cursors/packing", "chief").json()["sequence"] == 3)
        gate.put(f"{ROUTE}/cursors/billing", {"sequence": 2}, by="chief")
        yield gate


def test_hints_say_what_to_do_over_http(gate_of_two: Gate) -> None:
    shows = f"GET {ROUTE}/cursors/billing shows how far it is; do not send them again"
    remove = "the gate's operator can remove the work group: wald group remove orders packing"
    cases: list[tuple[str, str, dict[str, Any] | bytes | None, str]] = [
        ("GET", f"{ORDERS}?from=99", None, "?from=end&follow=1 waits for the next record"),
        ("GET", "/v1/routes/ordres/records", None, "POST /v1/routes/ordres creates it"),
        ("POST", "/v1/routes/ordres/records", b"1\n", "POST /v1/routes/ordres creates it"),
        ("PUT", f"{ROUTE}/cursors/billing", {"sequence": 1}, '{"sequence": 1, "rewind": true} moves it anyway'),
        ("PUT", f"{ROUTE}/cursors/billing", {"sequence": 9}, "GET /v1/head shows the last durable record"),
        ("PUT", f"{ROUTE}/cursors/packing", {"sequence": 1, "rewind": True}, remove),
        ("POST", f"{ORDERS}?wait_processed=billing&wait=10ms", b"4\n", shows),
        ("POST", f"{ORDERS}?wait_processed=nobody", b"4\n", "GET /v1/routes shows the groups that have"),
    ]
    for method, path, body, hint in cases:
        for name in ("chief", "reader"):
            headers = {"Content-Type": "text/plain"} if isinstance(body, bytes) else None
            answer = gate_of_two.ask(method, path, body, headers, by=name)
            assert answer.json()["hint"] == hint
            assert (str(gate_of_two.root).encode() in answer.body) <= (name == "chief")


def test_storing_and_reading_know_a_route_or_not_in_the_same_words(gate_of_two: Gate) -> None:
    stored = gate_of_two.post("/v1/routes/ordres/records", b"1\n", by="chief")
    assert stored.json() == gate_of_two.get("/v1/routes/ordres/records", "chief").json()
    gate_of_two.post("/v1/routes/gone", by="chief")
    assert wald("--root", gate_of_two.root, "route", "retire", "gone").returncode == 0
    answer = gate_of_two.post("/v1/routes/gone/records", b"1\n", by="chief").json()
    assert (answer["code"], answer["hint"]) == ("not-found", "POST /v1/routes/gone reactivates it")
    gate_of_two.post("/v1/routes/gone", by="chief")
    assert gate_of_two.post("/v1/routes/gone/records", b"1\n", by="chief").json()["count"] == 1


def test_an_invalid_parameter_field_or_key_is_told_what_it_may_be(gate_of_two: Gate) -> None:
    number = "the query: limit is a whole number, 0 or more"
    queries = {f"limit={each}": number for each in ("x", "-1", "1e3", "1.0", "", "%D9%A3", "0x1")} | {
        "limt=1": "the query: unknown field 'limt'; "
        "valid fields are from, to, limit, format, group, wait, follow, heartbeat",
        "follow=yes": "the query: follow is one of 0, 1",
        "format=xml": "the query: format is one of arrow, events, json, ndjson, raw",
        "to=" + "9" * 65: "the query: to is a text of at most 64 characters",
    }
    for query, detail in queries.items():
        assert gate_of_two.get(f"{ORDERS}?{query}", "reader").json()["detail"] == detail
    fields: list[tuple[dict[str, Any], str]] = [
        ({"worker": "w", "wait": "long"}, "wait must be "),
        ({"worker": "w", "max_records": 0}, "max_records is a whole number from 1 to 10000"),
        ({"worker": 5}, "worker is a text"),
    ]
    for body, detail in fields:
        assert detail in gate_of_two.post(f"{ROUTE}/groups/packing/lease", body, by="reader").json()["detail"]
    keys = {
        "a b": "Idempotency-Key 'a b' has a space, and no quotes around it",
        "\xc3\xbc": "Idempotency-Key 'ü' has non-ASCII characters",
        "a" * 256: "Idempotency-Key has 256 characters; 1 to 255 are allowed",
        '""': "Idempotency-Key has 0 characters; 1 to 255 are allowed",
    }
    for key, detail in keys.items():
        headers = {"Content-Type": "text/plain", "Idempotency-Key": key}
        assert gate_of_two.ask("POST", ORDERS, b"5\n", headers, by="reader").json()["detail"] == detail


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


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log whose first record is reclaimed and whose third is unreadable."""
    rights = ["orders", "payroll"]
    tokens = entry("reader", read=rights, write=rights, work=rights) + entry("chief", admin=True)
    with serving(tmp_path_factory.mktemp("paths") / "log", routes=rights, tokens=tokens) as gate:
        for words in ("PUB orders 2\nx", "CUT", "PUB orders 2\nx", "PUB orders 2\ny"):
            assert gate.daemon.ask(words).startswith("OK")
        library.open(gate.root).set_cursor("orders", 1, "billing")
        reclaim(gate.root, "--grace", "0")
        position = library.open(gate.root).where(3).position
        assert position is not None
        with (gate.root / "segments" / segment_name(2, Kind.RAW)).open("r+b") as segment:
            segment.seek(position)
            segment.write(b"\x55" * 8)
        (gate.root / "routes" / "orders" / "cursors" / "broken.cursor").write_bytes(b"no cursor\n")
        yield gate


STATUSES = {
    f"{ORDERS}?from=1": 410,
    f"{ORDERS}?from=3": 500,
    f"{ORDERS}?from=99": 404,
    f"{ORDERS}?from=cursor&group=broken": 500,
    "/v1/routes/orders/cursors/broken": 500,
    **dict.fromkeys(("/v1/routes", "/v1/routes/orders/groups", "/", "/routes", "/routes/orders", "/readyz"), 200),
    **dict.fromkeys(("/metrics", "/records?route=orders", "/records?route=orders&from=1"), 200),
    "/records?route=orders&from=99": 404,
    "/records?route=orders&follow=1": 200,
    **dict.fromkeys(("/records/1", "/records/1/value", "/records/3", "/records/3/value"), 403),
}


def test_no_answer_to_a_reader_names_the_root(reclaimed: Gate) -> None:
    for path, status in STATUSES.items():
        answer = reclaimed.get(path, "reader")
        assert answer.status == status, answer.body
        assert str(reclaimed.root.parent) not in answer.body.decode()
    # A reader still learns what is missing, and an admin where.
    path = f"{ORDERS}?from=1"
    by_reader, by_chief = (reclaimed.get(path, name).json()["detail"] for name in ("reader", "chief"))
    assert by_reader == "segments: RECLAIM has removed record 1: 1 record of route orders is missing"
    assert by_chief == f"{reclaimed.root}/{by_reader}"
    # Commands for the machine of the gate are for an admin.
    path = f"{ORDERS}?from=cursor&group=broken"
    to_reader, to_chief = (reclaimed.get(path, name).json() for name in ("reader", "chief"))
    assert str(reclaimed.root) in to_chief["hint"]
    assert f"{reclaimed.root}/routes/orders/cursors/broken.cursor" in to_chief["detail"]
    assert "hint" not in to_reader
    assert "routes/orders/cursors/broken.cursor" in to_reader["detail"]


def test_the_page_of_a_damaged_log_does_not_name_the_root_to_a_reader(reclaimed: Gate) -> None:
    head = reclaimed.root / "head"
    kept = head.read_bytes()
    try:
        head.write_bytes(b"x" * len(kept))
        eventually(lambda: "head" in reclaimed.get("/", "chief").body.decode().partition("notice bad")[2])
        for path in ("/", "/routes/orders", "/records?route=orders", ORDERS):
            assert str(reclaimed.root.parent) not in reclaimed.get(path, "reader").body.decode(), path
    finally:
        head.write_bytes(kept)


def test_an_error_loses_the_root_and_keeps_the_rest(reclaimed: Gate) -> None:
    root = library.open(reclaimed.root).root
    at = str(root.path)
    lost = HttpError(410, "lost", f"{at}/segments: lost; see {at}/lost", more={"next": 2})
    for error, detail in [
        (OSError(errno.EIO, "Input/output error", f"{at}/segments/1.wal"), "segments/1.wal: Input/output error"),
        (OSError(errno.EMFILE, "Too many open files", at), "Too many open files"),
        (PermissionError(errno.EACCES, "Permission denied", f"{at}/head"), "head: permission denied"),
        (NotFound(f"there is no log in {at}"), "there is no log in the log"),
        (NotFound(f"{at}2/head is not in {at}, but in {at}/old"), f"{at}2/head is not in the log, but in old"),
        (lost, "segments: lost; see lost"),
    ]:
        shown, to_admin = (
            problems.problem(problems.for_client(error, root, "orders", is_admin=is_admin))
            for is_admin in (False, True)
        )
        assert detail in json.loads(bytes(shown.body))["detail"]
        assert at.encode() in bytes(to_admin.body)
        assert shown.status_code == to_admin.status_code
        assert (b"next" in bytes(shown.body)) == (b"next" in bytes(to_admin.body)) == (error is lost)

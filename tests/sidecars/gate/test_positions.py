"""Errors for unreadable positions differ: reclaimed, never issued, misspelt, or without a cursor."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from gating import Gate
from running import Daemon, eventually, reclaim

import wald
from wald.format.names import Kind, segment_name

ORDERS = "/v1/routes/orders/records"
CURSORS = "/v1/routes/orders/cursors"
EVENTS = "text/event-stream"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log with records 1 to 3 reclaimed and 4 and 5 present, of which billing has processed 1."""
    root = tmp_path_factory.mktemp("positions") / "log"
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD orders")
        with Gate(root) as gate:
            gate.post(ORDERS, b"1\n2\n3\n")
            daemon.ask("CUT")
            gate.post(ORDERS, b"4\n5\n")
            log = wald.open(root)
            log.set_cursor("orders", 3, "billing")
            sealed = root / "segments" / segment_name(1, Kind.SEALED)
            eventually(sealed.exists)
            reclaim(root, "--grace", 0)
            assert not sealed.exists()
            log.set_cursor("orders", 1, "billing", rewind=True)
            yield gate


@pytest.mark.parametrize("query", ["from=1", "from=3", "from=2&format=events", "from=1&to=5&limit=1"])
def test_a_position_that_was_reclaimed_is_gone(shared: Gate, query: str) -> None:
    answer = shared.get(f"{ORDERS}?{query}")

    assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)
    assert "?from=4 " in answer.json()["hint"]
    assert "?from=earliest" in answer.json()["hint"]
    assert shared.get(f"{ORDERS}?from=4&format=raw").body == b"4\n5\n"
    assert shared.get(f"{ORDERS}?from=earliest&format=raw").body == b"4\n5\n"


def test_a_time_ago_counts_back_from_the_request(gate: Gate) -> None:
    """The time does not count from the first request that specified it."""
    gate.post(ORDERS, b"1\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n"
    gate.post(ORDERS, b"2\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n2\n"
    eventually(lambda: gate.get(f"{ORDERS}?from=0.1s&format=raw").body == b"")


def test_events_that_were_reclaimed_meanwhile_are_gone(shared: Gate) -> None:
    answer = shared.get(ORDERS, accept=EVENTS, last_event_id="2")

    assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)


def test_a_group_of_which_records_were_reclaimed_learns_how_to_go_on(shared: Gate) -> None:
    answer = shared.get(f"{ORDERS}?from=cursor&group=billing")

    assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)
    assert f'PUT {{"sequence": 3}} to {CURSORS}/billing' in answer.json()["hint"]


def test_a_group_begins_at_the_oldest_record_there_or_behind_the_last_one(shared: Gate) -> None:
    for group, position, sequence in (("first", "earliest", 3), ("next", "end", 5)):
        made = shared.ask("PUT", f"{CURSORS}/{group}", json.dumps({"sequence": position}).encode())
        assert made.json() == {"sequence": sequence, "state": "valid", "message": ""}
    leased = shared.post("/v1/routes/orders/groups/first/lease", {"worker": "w"}).json()["records"]
    assert [record["sequence"] for record in leased] == [4, 5]
    assert shared.post("/v1/routes/orders/groups/next/lease", {"worker": "w"}).json() == {"records": []}
    back = shared.ask("PUT", f"{CURSORS}/next", b'{"sequence": "earliest"}')
    assert (back.status, back.json()["hint"]) == (409, '{"sequence": "earliest", "rewind": true} moves it all the same')
    other = shared.ask("PUT", f"{CURSORS}/next", b'{"sequence": "latest"}')
    assert (other.status, other.json()["code"]) == (400, "invalid")


def test_a_group_without_a_cursor_gets_no_records(shared: Gate) -> None:
    answer = shared.get(f"{ORDERS}?from=cursor&group=biling")

    assert (answer.status, answer.json()["code"]) == (404, "not-found")
    assert f'PUT {{"sequence": "earliest"}} to {CURSORS}/biling makes it' in answer.json()["hint"]


@pytest.mark.parametrize(
    ("query", "last_event_id", "status"),
    [
        ("group=billing", "", 400),
        ("from=5&group=billing", "", 400),
        ("", "null", 400),
        ("", "-1", 400),
        ("", "4.0", 400),
        ("", "9" * 20, 400),
        ("", "9" * 5000, 400),
        ("", "9" * 19, 404),
        ("", "5", 200),
        ("", "6", 404),
        ("from=7", "", 404),
        ("from=6", "", 200),
    ],
)
def test_what_is_no_position_is_refused(shared: Gate, query: str, last_event_id: str, status: int) -> None:
    with shared.asked("GET", f"{ORDERS}?{query}", headers={"Accept": EVENTS, "Last-Event-ID": last_event_id}) as answer:
        assert answer.status == status


def test_events_begin_with_the_oldest_record_if_none_came_yet(shared: Gate) -> None:
    with shared.asked("GET", f"{ORDERS}?from=5", headers={"Accept": EVENTS, "Last-Event-ID": ""}) as answer:
        assert [answer.readline() for _ in range(4)][1:] == [b"id: 4\n", b"\n", b"id: 5\n"]


def test_a_path_with_a_slash_at_its_end_is_none(shared: Gate) -> None:
    answer = shared.post(f"{ORDERS}/", b"lost\n")

    assert (answer.status, answer.json()["code"]) == (404, "no-such-path")
    assert answer.json()["hint"] == f"{ORDERS}, without a slash at its end"


def test_a_wait_for_nothing_is_refused(shared: Gate) -> None:
    answer = shared.post(f"{ORDERS}?wait=1s", b"6\n")

    assert (answer.status, answer.json()["hint"]) == (400, "?wait_processed=GROUP&wait=1s")

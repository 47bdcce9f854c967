"""The overview and routes views match the commands, respect each client's rights, and show hostile text as text."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import ORDERS, Gate, entry
from running import Daemon, eventually, wald

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HOSTILE = '"><script>alert(1)</script>\u202e\x1b[31m'
ACTIVE = re.compile(r"<(?:script(?![^>]*\ssrc=)|iframe|object|embed|base)\b|<[^>]*\son\w+=")
READER, CHIEF = entry("reader", read=["orders"]), entry("chief", admin=True)


@pytest.fixture
def guarded(daemon: Daemon) -> Iterator[Gate]:
    """A gate with tokens and records on two routes, one of which the reader may see."""
    daemon.ask("ROUTE ADD payroll")
    daemon.ask("PUB payroll 2\nx\n")
    daemon.ask("PUB orders 2\nx\n")
    with Gate(daemon.root, tokens=READER + CHIEF) as running:
        yield running


def session(gate: Gate, token: str) -> dict[str, str]:
    """Log in; return the cookie header of the session."""
    answer = gate.ask("POST", "/login", f"token={token}-token".encode(), FORM)
    assert answer.status == 303
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_the_overview_shows_what_there_is_and_a_route_why_it_is_held_back(gate: Gate, root: Path) -> None:
    gate.post(ORDERS, b"one\ntwo\n")
    assert 'id="seg-1" class="active"' in gate.get("/").page
    gate.post("/v1/cut")
    gate.post(ORDERS, b"three\n")
    wald("cursor", "set", "orders", 1, "--group", "billing", "--root", root)
    eventually(lambda: re.search(r"active 1 .*pinned 1", gate.get("/").text))  # after the segments are scanned
    eventually(lambda: 'id="seg-1" class="sealed"' in gate.get("/").page)
    assert 'id="seg-3" class="active"' in gate.get("/").page
    found = gate.get("/").text
    assert "Head 3" in found
    assert "2 segments, records 1 to 3" in found
    assert "orders/billing 1 2" in found  # processed up to 1, lag 2
    assert "daemon running" in found

    eventually(lambda: "billing has processed" in gate.get("/routes/orders").text)
    found = gate.get("/routes/orders").text
    assert "billing has processed orders up to record 1, and 1 segment holds later records" in found
    command = f"wald --root {root} cursor set orders 3 --group billing"
    assert command in found
    wald(*command.split()[1:])
    eventually(lambda: "Nothing is pinned for this route" in gate.get("/routes/orders").text)


def test_a_route_without_a_cursor_has_no_mark_and_no_line(gate: Gate, root: Path) -> None:
    gate.post(ORDERS, b"one\n")
    eventually(lambda: "1 route has no cursor" in gate.get("/").text)
    source = gate.get("/").body.decode()
    assert 'id="mark-' not in source
    assert "orders/processed" not in source

    wald("cursor", "set", "orders", 1, "--root", root)
    eventually(lambda: "orders/processed 1 0" in gate.get("/").text)
    assert 'id="mark-1"' in gate.get("/").body.decode()


@pytest.mark.slow  # waits for the rate interval
def test_rates_are_said_to_be_over_the_time_since_the_picture_before(gate: Gate) -> None:
    """Without JavaScript, a page is loaded only now and then."""
    gate.get("/")
    gate.post(ORDERS, b"x\n" * 10_000)
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 3.2)
    assert re.search(r"In [0-9,]+ records/s [0-9.]+ KiB/s, over [3-9]\.?[0-9]* s ", gate.get("/").text)


def test_routes_are_sorted_and_found_without_javascript(gate: Gate) -> None:
    for name in ("alpha", "beta", "gamma"):
        gate.post(f"/v1/routes/{name}")
    gate.post("/v1/routes/gamma/records", b"one\ntwo\n")

    def shown(query: str) -> list[str]:
        return re.findall(r'id="route-([\w.]+)"', gate.get(f"/routes{query}").body.decode())

    eventually(lambda: len(shown("?sort=route")) == 4)
    assert shown("?sort=route") == ["alpha", "beta", "gamma", "orders"]
    eventually(lambda: shown("?sort=lag")[0] == "gamma")
    assert shown("?find=ET") == ["beta"]
    assert shown("?find=nothing") == []
    assert gate.get("/routes?sort=nothing").status == 400
    assert gate.get("/routes?page=0").status == 400


def test_hostile_text_is_shown_and_does_nothing(gate: Gate, daemon: Daemon, root: Path) -> None:
    """The text is in a query, in a path, and in a group name, which other users can choose."""
    query = "%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E%E2%80%AE%1B%5B31m"
    (root / "routes" / "orders" / "cursors" / f"{HOSTILE.replace('/', '_')}.cursor").write_text("1\n")
    for path in ("/routes/nowhere", "/routes/..%2f..%2fetc", "/routes/a%00b", "/nothing"):
        assert gate.get(path).status in (400, 404)
    paths = (f"/routes?find={query}", f"/routes/{query}", f"/{query}", "/", "/routes", "/routes/orders")
    pages = [gate.get(path, accept="text/html") for path in paths]

    for answer in pages:
        source = answer.body.decode()
        assert answer.headers["content-type"].startswith("text/html")
        assert not ACTIVE.search(source)
        assert "alert(1)</script>" not in source
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)
    assert "\\u202e" in pages[0].body.decode()


def test_a_session_has_the_rights_of_its_token_and_ends_with_it(guarded: Gate) -> None:
    reader, chief = session(guarded, "reader"), session(guarded, "chief")

    assert guarded.ask("GET", "/routes/payroll", headers=reader).status == 403
    assert guarded.ask("GET", "/routes/payroll", headers=chief).status == 200
    assert [each["route"] for each in guarded.ask("GET", "/v1/routes", headers=reader).json()["routes"]] == ["orders"]

    for seen, named in ((reader, "ROOT"), (chief, str(guarded.root))):  # an admin can paste the commands unchanged
        source = guarded.ask("GET", "/records/2", headers=seen).body.decode()
        assert f"wald --root {named} where 2" in source
        assert (str(guarded.root) in source) == (seen is chief)

    guarded.reload(tokens=CHIEF)
    assert guarded.ask("GET", "/", headers=reader).status == 303
    assert guarded.ask("GET", "/", headers=chief).status == 200
    answer = guarded.ask("POST", "/logout", headers=chief)
    assert (answer.status, answer.headers["location"]) == (303, "./login")
    assert guarded.ask("GET", "/", headers=chief).status == 303


def test_the_cookie_is_for_this_gate_alone_and_guesses_have_a_bound(guarded: Gate) -> None:
    body = b"token=chief-token"
    cookie = guarded.ask("POST", "/login", body, FORM).headers["set-cookie"]

    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
    assert "chief" not in cookie
    assert guarded.ask("POST", "/login", body, FORM | {"Origin": "http://elsewhere.example"}).status == 403
    assert guarded.ask("POST", "/login", b"token=guess", FORM).status == 401
    assert guarded.ask("GET", "/login?token=chief").headers.get("set-cookie") is None
    # A client that guesses has to wait, and a right token from the same address has not.
    guesses = [guarded.ask("POST", "/login", f"token=guess{n}".encode(), FORM) for n in range(11)]

    assert [answer.status for answer in guesses] == [401] * 9 + [429] * 2
    assert 0 < int(guesses[-1].headers["retry-after"]) <= 60
    assert guarded.ask("POST", "/login", b"token=chief-token", FORM).status == 303
    assert guarded.ask("POST", "/login", b"token=guess", FORM).status == 429
    assert guarded.ask("GET", "/", by="chief").status == 200

"""The overview and routes views match the commands, respect each client's rights, and show hostile text as text."""

from __future__ import annotations

import hashlib
import html
import json
import re
import signal
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gating import Answer, Gate
from running import Daemon, eventually, wald

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HOSTILE = '"><script>alert(1)</script>\u202e\x1b[31m'


class Text(HTMLParser):
    """Parser that collects a page's visible words and its active elements."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base") or any(name.startswith("on") for name, _ in attrs):
            self.scripts.append(f"{tag} {attrs}")


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return " ".join(Text(answer.body.decode()).words)


def entry(name: str, **rights: object) -> str:
    return json.dumps({"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **rights}) + "\n"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(entry("reader", read=["orders"]) + entry("chief", admin=True))
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(daemon: Daemon, tokens: Path) -> Iterator[Gate]:
    """A gate with tokens and records on two routes, one of which the reader may see."""
    daemon.ask("ROUTE ADD payroll")
    daemon.ask("PUB payroll 2\nx\n")
    daemon.ask("PUB orders 2\nx\n")
    wald("cursor", "set", "payroll", 1, "--group", "salaries", "--root", daemon.root)
    with Gate(daemon.root, "--tokens", tokens) as running:
        yield running


def session(gate: Gate, token: str) -> dict[str, str]:
    """Log in; return the cookie header of the session."""
    answer = gate.ask("POST", "/login", f"token={token}".encode(), FORM)
    assert answer.status == 303
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_the_overview_shows_head_segments_and_cursors(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"one\ntwo\n")
    gate.post("/v1/cut")
    gate.post("/v1/routes/orders/records", b"three\n")
    wald("cursor", "set", "orders", 1, "--group", "billing", "--root", root)
    eventually(lambda: re.search(r"active 1 .*pinned 1", text(gate.get("/"))))  # after the segments are scanned
    found = text(gate.get("/"))

    assert "Head 3" in found
    assert "2 segments, records 1 to 3" in found
    assert "orders/billing 1 2" in found  # processed up to 1, lag 2
    assert "daemon running" in found


def test_a_route_without_a_cursor_has_no_mark_and_no_line(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    eventually(lambda: "1 route has no cursor" in text(gate.get("/")))
    source = gate.get("/").body.decode()
    assert 'id="mark-' not in source
    assert "orders/processed" not in source

    wald("cursor", "set", "orders", 1, "--root", root)
    eventually(lambda: "orders/processed 1 0" in text(gate.get("/")))
    assert 'id="mark-1"' in gate.get("/").body.decode()


@pytest.mark.slow  # waits for the rate interval
def test_rates_are_said_to_be_over_the_time_since_the_picture_before(gate: Gate) -> None:
    """Without JavaScript, a page is loaded only now and then."""
    gate.get("/")
    gate.post("/v1/routes/orders/records", b"x\n" * 10_000)
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 3.2)
    assert re.search(r"In [0-9,]+ records/s [0-9.]+ KiB/s, over [3-9]\.?[0-9]* s ", text(gate.get("/")))


def test_a_cut_and_its_seal_are_seen_to_happen(gate: Gate) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    before = gate.get("/").body.decode()
    gate.post("/v1/cut")

    eventually(lambda: 'id="seg-1" class="sealed"' in gate.get("/").body.decode())
    after = gate.get("/").body.decode()
    assert 'id="seg-1" class="active"' in before
    assert 'id="seg-2" class="active"' in after


def test_the_overview_says_that_the_daemon_is_down_and_what_starts_it(gate: Gate, daemon: Daemon, root: Path) -> None:
    daemon.kill()

    eventually(lambda: "daemon not running" in text(gate.get("/")))
    found = html.unescape(gate.get("/").body.decode())
    assert f"wald --root {root} run" in found
    assert "was killed" in found


def test_a_route_says_why_it_is_held_back_and_what_frees_it(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"one\ntwo\n")
    gate.post("/v1/cut")
    wald("cursor", "set", "orders", 1, "--group", "billing", "--root", root)
    eventually(lambda: "billing has processed" in text(gate.get("/routes/orders")))
    found = text(gate.get("/routes/orders"))

    assert "billing has processed orders up to record 1, and 1 segment holds records behind that" in found
    command = f"wald --root {root} cursor set orders 2 --group billing"
    assert command in found
    wald(*command.split()[1:])
    eventually(lambda: "Nothing is pinned for this route" in text(gate.get("/routes/orders")))


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
        assert [each for each in Text(source).scripts if "src" not in each] == []
        assert "alert(1)</script>" not in source
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)
    assert "\\u202e" in pages[0].body.decode()


def test_a_session_has_the_rights_of_its_token_and_ends_with_it(guarded: Gate, tokens: Path) -> None:
    reader, chief = session(guarded, "reader"), session(guarded, "chief")

    assert guarded.ask("GET", "/routes/payroll", headers=reader).status == 403
    assert guarded.ask("GET", "/routes/payroll", headers=chief).status == 200
    assert [each["route"] for each in guarded.ask("GET", "/v1/routes", headers=reader).json()["routes"]] == ["orders"]

    for seen, named in ((reader, "ROOT"), (chief, str(guarded.root))):  # an admin can paste the commands unchanged
        source = guarded.ask("GET", "/records/2", headers=seen).body.decode()
        assert f"wald --root {named} where 2" in source
        assert (str(guarded.root) in source) == (seen is chief)

    tokens.write_text(entry("chief", admin=True))
    guarded.process.send_signal(signal.SIGHUP)
    eventually(lambda: guarded.ask("GET", "/", headers=reader).status == 303)
    assert guarded.ask("GET", "/", headers=chief).status == 200
    answer = guarded.ask("POST", "/logout", headers=chief)
    assert (answer.status, answer.headers["location"]) == (303, "./login")
    assert guarded.ask("GET", "/", headers=chief).status == 303


def test_a_reader_learns_nothing_of_the_routes_of_others(guarded: Gate) -> None:
    reader = session(guarded, "reader")
    eventually(lambda: "orders" in text(guarded.ask("GET", "/routes", headers=reader)))

    for path in ("/", "/routes", "/routes?find=payroll&sort=lag", "/routes/orders", "/records?route=orders"):
        source = guarded.ask("GET", path, headers=reader).body.decode()
        assert "salaries" not in source
        assert 'id="seg-' not in source
        assert str(guarded.root) not in source
        assert "payroll" not in re.sub(r'find=payroll|value="payroll"|“payroll”', "", source)


def test_the_cookie_is_for_this_gate_alone_and_no_script_reads_it(guarded: Gate) -> None:
    body = b"token=chief"
    cookie = guarded.ask("POST", "/login", body, FORM).headers["set-cookie"]

    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
    assert "chief" not in cookie
    assert guarded.ask("POST", "/login", body, FORM | {"Origin": "http://elsewhere.example"}).status == 403
    assert guarded.ask("POST", "/login", b"token=guess", FORM).status == 401
    assert guarded.ask("GET", "/login?token=chief").headers.get("set-cookie") is None


def test_who_guesses_tokens_has_to_wait_and_a_right_token_from_the_same_address_has_not(guarded: Gate) -> None:
    guesses = [guarded.ask("POST", "/login", f"token=guess{n}".encode(), FORM) for n in range(11)]

    assert [answer.status for answer in guesses] == [401] * 10 + [429]
    assert 0 < int(guesses[-1].headers["retry-after"]) <= 60
    assert guarded.ask("POST", "/login", b"token=chief", FORM).status == 303
    assert guarded.ask("POST", "/login", b"token=guess", FORM).status == 429
    assert guarded.ask("GET", "/", headers={"Authorization": "Bearer chief"}).status == 200

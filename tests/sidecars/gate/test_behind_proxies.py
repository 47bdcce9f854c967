"""The gate behind nginx, haproxy and Caddy, with the configurations of docs/http.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlencode, urljoin

import pytest
from gating import BILLING, ORDERS, Gate, entry
from proxying import COMMANDS, PORT, PREFIX, Proxy, documented, own_host
from running import TIMEOUT_SECONDS, Daemon

TOKEN = {"Authorization": "Bearer ann-token"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HTML = {"Accept": "text/html"}
OTHERS = sorted(COMMANDS.keys() - {"nginx"})
TYPED = {"sequence": "1"}  # typed into empty form fields


@dataclass
class Form:
    """An HTML form with the values that a browser would submit."""

    method: str
    action: str
    fields: dict[str, str] = field(default_factory=dict)


class Addresses(HTMLParser):
    """Collector of a page's relative links, loaded resources and forms.

    Args:
        base: the address of the page.
    """

    def __init__(self, source: str, base: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.live = ""
        self.forms: list[Form] = []
        self._base = base
        self._select = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.links += [self._absolute(given[name]) for name in ("href", "src") if name in given]
        if "data-live" in given:
            self.live = self._absolute(given["data-live"])
        if tag == "form":
            self.forms.append(Form(given.get("method", "get"), self._absolute(given["action"])))
        elif tag == "input":
            self.forms[-1].fields[given["name"]] = given.get("value", "") or TYPED.get(given["name"], "")
        elif tag == "select":
            self._select = given["name"]
        elif tag == "option" and "value" in given:
            fields = self.forms[-1].fields
            if "selected" in given or self._select not in fields:
                fields[self._select] = given["value"]

    def _absolute(self, address: str) -> str:
        return urljoin(self._base, address).partition("#")[0]


@pytest.fixture
def gate(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    """A gate with tokens and short records."""
    (tmp_path / "tokens").write_text(entry("ann", admin=True))
    (tmp_path / "gate.toml").write_text('[limits]\nrecord_max_bytes = "64KiB"\nhead_timeout = "10m"\n')
    options = ("--tokens", tmp_path / "tokens", "--config", tmp_path / "gate.toml", "--log-requests")
    with Gate(daemon.root, "--trusted-proxy", "127.0.0.1", *options) as running:
        yield running


@pytest.fixture(params=COMMANDS)
def proxy(request: pytest.FixtureRequest, gate: Gate, tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(request.param, gate, tmp_path) as running:
        yield running


def waiting_requests(start: str) -> dict[str, tuple[str, str, bytes | None]]:
    """Return requests whose responses never end or that wait."""
    return {
        "ndjson": ("GET", f"{ORDERS}?from={start}&follow=1", None),
        "raw": ("GET", f"{ORDERS}?from={start}&follow=1&format=raw&heartbeat=1", None),
        "events": ("GET", f"{ORDERS}?from={start}&format=events", None),
        "wait": ("GET", f"{ORDERS}?from={start}&wait=300s", None),
        "lease": ("POST", f"{BILLING}/lease", b'{"worker": "ann", "wait": 300}'),
    }


def make_group(proxy: Proxy) -> None:
    cursor = "/v1/routes/orders/cursors/billing"
    assert proxy.ask("PUT", cursor, b'{"sequence": "earliest"}', TOKEN)[0] == 200


def append(proxy: Proxy, body: bytes) -> tuple[int, bytes]:
    status, _, answer = proxy.ask("POST", ORDERS, body, TOKEN | {"Content-Type": "text/plain"})
    return status, answer


def begin(proxy: Proxy, method: str, path: str, body: bytes | None) -> HTTPConnection:
    connection = proxy.connect()
    connection.request(method, path, body, TOKEN | ({"Content-Type": "application/json"} if body else {}))
    return connection


def read_to(answer: HTTPResponse, value: bytes, name: str) -> None:
    """Read lines of a response until one has the given value."""
    line = b""
    while value not in line:
        line = answer.readline()
        assert line, name


def require_delivery(proxy: Proxy) -> None:
    """Check that records arrive over a response that never ends."""
    make_group(proxy)
    begun = {name: begin(proxy, *request) for name, request in waiting_requests("earliest").items()}
    assert append(proxy, b"first\n")[0] == 200
    answers = {name: connection.getresponse() for name, connection in begun.items()}
    for name, answer in answers.items():
        assert answer.status == 200, name
        read_to(answer, b"first", name)
    assert append(proxy, b"second\n")[0] == 200
    for name in ("ndjson", "raw", "events"):
        read_to(answers[name], b"second", name)
    for connection in begun.values():
        connection.close()


def test_records_arrive_through_nginx_with_its_default_settings(gate: Gate, tmp_path: Path) -> None:
    """By default, nginx speaks HTTP/1.0 to the gate and buffers responses unless a header disables it."""
    with Proxy("nginx", gate, tmp_path, "location / { proxy_pass http://127.0.0.1:7700; }") as proxy:
        require_delivery(proxy)


def require_bodies_and_errors(proxy: Proxy) -> None:
    large = b"x" * 1023 + b"\n"
    status, answer = append(proxy, large * 8192)
    first = json.loads(answer)["first"]
    assert (status, json.loads(answer)["count"]) == (200, 8192)
    assert append(proxy, b"x" * (128 << 10))[0] == 413
    assert proxy.ask("POST", ORDERS, large * 128, {"Content-Type": "text/plain"})[0] == 401
    assert proxy.ask("GET", f"{ORDERS}?format=raw&from={first}&limit=8192", None, TOKEN)[2] == large * 8192


def require_login(proxy: Proxy) -> None:
    origin = {"Origin": proxy.origin}
    assert proxy.ask("POST", "/login", b"token=ann-token", FORM | {"Origin": "http://evil.example"})[0] == 403
    status, headers, _ = proxy.ask("POST", "/login", b"token=ann-token", FORM | origin)
    assert (status, headers["location"]) == (303, "./")
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert proxy.ask("GET", "/routes/orders", None, cookie | {"Accept": "text/html"})[0] == 200


def require_client_address(gate: Gate) -> None:
    """A client cannot spoof its address."""
    connection = HTTPConnection(own_host(), PORT, timeout=TIMEOUT_SECONDS, source_address=("127.9.9.9", 0))
    spoofed = {"X-Forwarded-For": "127.6.6.6", "X-Forwarded-Proto": "https"}
    connection.request("POST", "/login", b"token=ann-token", FORM | spoofed)
    cookie = connection.getresponse().headers["set-cookie"]
    connection.close()
    line = [json.loads(each) for each in gate.log.splitlines() if '"path": "/login"' in each][-1]

    assert line["address"] == "127.9.9.9"
    assert "Secure" not in cookie


def test_records_bodies_errors_logins_and_addresses_pass(proxy: Proxy, gate: Gate) -> None:
    require_delivery(proxy)
    require_bodies_and_errors(proxy)
    require_login(proxy)
    require_client_address(gate)


@pytest.mark.parametrize("name", ["nginx", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_every_link_and_form_of_the_page_works_below_a_path(name: str, gate: Gate, tmp_path: Path) -> None:
    gate.ask("POST", ORDERS, b"first\nsecond\n", TOKEN | {"Content-Type": "text/plain"})
    with Proxy(name, gate, tmp_path, documented(name, below=True)) as proxy:

        def ask(method: str, path: str, headers: dict[str, str]) -> tuple[str, bytes]:
            """Follow redirects as a browser does; return the final address and page."""
            assert path.startswith(f"{PREFIX}/"), path
            status, found, page = proxy.ask(method, path, None, HTML | headers)
            if status in (301, 302, 303):
                return ask("GET", urljoin(path, found["location"]), headers)
            assert status == (404 if path.endswith("/nowhere") else 200), (path, page)
            return path, page

        for path in ("/", "/routes/orders"):
            address, page = ask("GET", PREFIX + path, {})
            assert address == f"{PREFIX}/login"
        [login] = Addresses(page.decode(), address).forms
        origin = {"Origin": proxy.origin}
        _, headers, _ = proxy.ask("POST", login.action, b"token=ann-token", FORM | origin)
        assert urljoin(login.action, headers["location"]) == f"{PREFIX}/"
        cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}

        waiting = [f"{PREFIX}/", f"{PREFIX}/routes/nowhere"]
        seen, logout = set[str](), set[str]()
        while waiting:
            path = waiting.pop()
            alike = re.sub("[0-9]+", "1", path)  # each record's page links to the next record
            if alike in seen:
                continue
            seen.add(alike)
            address, page = ask("GET", path, cookie)
            if not page.startswith(b"<!doctype html>"):
                continue
            found = Addresses(page.decode(), address)
            waiting += found.links
            waiting += [f"{each.action}?{urlencode(each.fields)}" for each in found.forms if each.method == "get"]
            logout |= {each.action for each in found.forms if each.method == "post"}
            if found.live:
                connection = proxy.connect()
                connection.request("GET", found.live, None, cookie | {"Accept": "text/event-stream"})
                read_to(connection.getresponse(), b"event: parts", address)
                connection.close()

        pages = ("", "routes", "routes/orders", "records", "records/1", "records/1/value", "history", "openapi.json")
        assert {f"{PREFIX}/{each}" for each in pages} <= {each.partition("?")[0] for each in seen}
        servers = json.loads(ask("GET", f"{PREFIX}/openapi.json", {})[1])["servers"]
        assert [urljoin(f"{PREFIX}/openapi.json", each["url"]) for each in servers] == [f"{PREFIX}/"]
        assert logout == {f"{PREFIX}/logout"}
        assert ask("POST", logout.pop(), cookie | origin)[0] == f"{PREFIX}/login"
        assert ask("GET", f"{PREFIX}/", cookie)[0] == f"{PREFIX}/login"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_api_works_below_a_path_and_its_name_leads_to_the_page(name: str, gate: Gate, tmp_path: Path) -> None:
    with Proxy(name, gate, tmp_path, documented(name, below=True)) as proxy:
        status, headers, _ = proxy.ask("GET", PREFIX)
        assert status in (301, 302)
        assert urljoin(proxy.origin + PREFIX, headers["location"]) == f"{proxy.origin}{PREFIX}/"
        status, _, answer = proxy.ask("GET", f"{PREFIX}{ORDERS}?from=end&wait=1ms", None, TOKEN)
        assert (status, answer.strip()) == (200, b"")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_proxy_that_ends_silent_answers_after_30_seconds_ends_none(name: str, gate: Gate, tmp_path: Path) -> None:
    with Proxy(name, gate, tmp_path, timeout=30) as proxy:
        make_group(proxy)
        begun = {each: begin(proxy, *request) for each, request in waiting_requests("end").items()}
        answers = {each: connection.getresponse() for each, connection in begun.items()}
        for _ in range(4):
            assert answers["ndjson"].readline() == b"\n"
        assert append(proxy, b"last\n")[0] == 200
        for each, answer in answers.items():
            read_to(answer, b"last", each)
        for connection in begun.values():
            connection.close()

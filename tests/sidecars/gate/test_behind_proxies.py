"""The gate behind nginx, haproxy and Caddy, with the configurations of docs/http.md."""

import html
import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urljoin

import pytest
from gating import BILLING, ORDERS, Gate, entry
from proxying import COMMANDS, PORT, PREFIX, Proxy, documented, own_host
from running import TIMEOUT_SECONDS, Daemon

TOKEN = {"Authorization": "Bearer ann-token"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HTML = {"Accept": "text/html"}
OTHERS = sorted(COMMANDS.keys() - {"nginx"})


@pytest.fixture
def gate(daemon: Daemon) -> Iterator[Gate]:
    """A gate with tokens and short records."""
    config = '[limits]\nrecord_max_bytes = "64KiB"\nhead_timeout = "10m"\n'
    options = ("--trusted-proxy", "127.0.0.1", "--log-requests")
    with Gate(daemon.root, *options, config=config, tokens=entry("ann", admin=True)) as running:
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
def test_every_link_of_the_page_works_below_a_path(name: str, gate: Gate, tmp_path: Path) -> None:
    gate.post(ORDERS, b"first\nsecond\n", by="ann")
    with Proxy(name, gate, tmp_path, documented(name, below=True)) as proxy:

        def ask(method: str, path: str, headers: dict[str, str]) -> tuple[str, str]:
            """Follow redirects as a browser does; return the final address and page."""
            assert path.startswith(f"{PREFIX}/"), path
            status, found, page = proxy.ask(method, path, None, HTML | headers)
            if status in (301, 302, 303):
                return ask("GET", urljoin(path, found["location"]), headers)
            assert status == (404 if path.endswith("/nowhere") else 200), (path, page)
            return path, page.decode(errors="replace")

        def targets(address: str, page: str, attribute: str) -> list[str]:
            found = re.findall(rf""" {attribute}=["']([^"']*)""", page)
            return [urljoin(address, html.unescape(each)).partition("#")[0] for each in found]

        for path in ("/", "/routes/orders"):
            address, page = ask("GET", PREFIX + path, {})
            assert address == f"{PREFIX}/login"
        [login] = targets(address, page, "action")
        origin = {"Origin": proxy.origin}
        _, headers, _ = proxy.ask("POST", login, b"token=ann-token", FORM | origin)
        assert urljoin(login, headers["location"]) == f"{PREFIX}/"
        cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}

        waiting = [f"{PREFIX}/", f"{PREFIX}/routes/nowhere", f"{PREFIX}/record?sequence=1"]
        seen, forms = set[str](), set[str]()
        while waiting:
            path = waiting.pop()
            alike = re.sub("[0-9]+", "1", path)  # each record's page links to the next record
            if alike in seen:
                continue
            seen.add(alike)
            address, page = ask("GET", path, cookie)
            if not page.startswith("<!doctype html>"):
                continue
            waiting += [*targets(address, page, "href"), *targets(address, page, "src")]
            forms |= set(targets(address, page, "action"))
            for live in targets(address, page, "data-live"):
                connection = proxy.connect()
                connection.request("GET", live, None, cookie | {"Accept": "text/event-stream"})
                read_to(connection.getresponse(), b"event: parts", address)
                connection.close()

        pages = ("", "routes", "routes/orders", "records", "records/1", "records/1/value", "history", "openapi.json")
        assert {f"{PREFIX}/{each}" for each in pages} <= {each.partition("?")[0] for each in seen}
        assert forms == {f"{PREFIX}/{each}" for each in ("logout", "record", "records", "routes", "history")}
        servers = json.loads(ask("GET", f"{PREFIX}/openapi.json", {})[1])["servers"]
        assert [urljoin(f"{PREFIX}/openapi.json", each["url"]) for each in servers] == [f"{PREFIX}/"]
        assert ask("POST", f"{PREFIX}/logout", cookie | origin)[0] == f"{PREFIX}/login"
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

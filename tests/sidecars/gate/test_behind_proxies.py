"""The gate behind nginx, haproxy and Caddy, with the configurations of docs/http.md."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Self

import pytest
from gating import Gate, entry
from group_requests import GROUP
from programs import program
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"
PAGE = Path(__file__).parents[3] / "docs" / "http.md"
PORT = 18080
TOKEN = {"Authorization": "Bearer ann-token"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}

NGINX = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    proxy_read_timeout {timeout}s;
    send_timeout {timeout}s;
    server {{
        listen {address};
        {documented}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 60s
    timeout client {timeout}s
frontend public
    bind {address}
    default_backend wald
{documented}
"""
CADDY = """
{{
    admin off
    auto_https off
    default_bind {host}
}}
{documented}
"""
SETTINGS = {"nginx": NGINX, "haproxy": HAPROXY, "caddy": CADDY}
COMMANDS = {
    "nginx": ["-e", "stderr", "-c"],
    "haproxy": ["-db", "-f"],
    "caddy": ["run", "--adapter", "caddyfile", "--config"],
}


def documented(name: str) -> str:
    """Return the configuration that the page has for a proxy."""
    pattern = rf"^{name}\b[^\n]*:\n\n```text\n(.*?)```"
    found = re.search(pattern, PAGE.read_text(), re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert found, name
    return found[1]


def own_host() -> str:
    """Return an address of loopback that no other process uses."""
    return "127." + ".".join(str(each) for each in (os.getpid() + (1 << 20)).to_bytes(3, "big"))


class Proxy:
    """A proxy in front of a gate; in a ``with`` block it is killed at the end."""

    def __init__(self, name: str, gate: Gate, directory: Path, given: str = "", timeout: int = 60) -> None:
        """
        Args:
            given: the configuration; "" for the documented one.
        """
        self._path = program(name)
        self.address = f"{own_host()}:{PORT}"
        given = (given or documented(name)).replace("127.0.0.1:7700", f"127.0.0.1:{gate.port}")
        given = given.replace("log.example", f"http://{self.address}").replace("60s", f"{timeout}s")
        settings = directory / f"{name}.conf"
        settings.write_text(
            SETTINGS[name].format(
                directory=directory, host=own_host(), address=self.address, documented=given, timeout=timeout
            )
        )
        self._log = directory / f"{name}.log"
        environment = {**os.environ, "HOME": str(directory)}
        with self._log.open("ab") as log:
            line = [self._path, *COMMANDS[name], str(settings)]
            self._process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)

    def __enter__(self) -> Self:
        try:
            eventually(self._answers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            socket.create_connection((own_host(), PORT)).close()
        except ConnectionRefusedError:
            return False
        return True

    def connect(self) -> HTTPConnection:
        return HTTPConnection(own_host(), PORT, timeout=TIMEOUT_SECONDS)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body of an answer."""
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


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
    """Requests whose answers do not end, or that wait."""
    return {
        "ndjson": ("GET", f"{ORDERS}?from={start}&follow=1", None),
        "raw": ("GET", f"{ORDERS}?from={start}&follow=1&format=raw&heartbeat=1", None),
        "events": ("GET", f"{ORDERS}?from={start}&format=events", None),
        "wait": ("GET", f"{ORDERS}?from={start}&wait=300s", None),
        "lease": ("POST", f"{GROUP}/lease", b'{"consumer": "ann", "wait": 300}'),
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
    """Read the lines of an answer up to one with a value."""
    line = b""
    while value not in line:
        line = answer.readline()
        assert line, name


def require_delivery(proxy: Proxy) -> None:
    """Check that records arrive while the answer has no end."""
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


def test_records_arrive_while_the_answer_has_no_end(proxy: Proxy) -> None:
    require_delivery(proxy)


def test_records_arrive_through_nginx_with_its_default_settings(gate: Gate, tmp_path: Path) -> None:
    """It then speaks HTTP/1.0, and buffers answers unless told otherwise."""
    with Proxy("nginx", gate, tmp_path, "location / { proxy_pass http://127.0.0.1:7700; }") as proxy:
        require_delivery(proxy)


def test_the_api_works_below_a_path_that_the_proxy_removes(gate: Gate, tmp_path: Path) -> None:
    found = re.search(r"`(location /log/ .*)`", PAGE.read_text())
    assert found
    with Proxy("nginx", gate, tmp_path, found[1]) as proxy:
        status, _, answer = proxy.ask("GET", f"/log{ORDERS}?from=end&wait=1ms", None, TOKEN)

    assert (status, answer.strip()) == (200, b"")


def test_bodies_and_errors_pass(proxy: Proxy) -> None:
    large = b"x" * 1023 + b"\n"
    status, answer = append(proxy, large * 8192)
    assert (status, json.loads(answer)["count"]) == (200, 8192)
    assert append(proxy, b"x" * (128 << 10))[0] == 413
    assert proxy.ask("POST", ORDERS, large * 128, {"Content-Type": "text/plain"})[0] == 401
    assert proxy.ask("GET", f"{ORDERS}?format=raw&limit=8192", None, TOKEN)[2] == large * 8192


def test_a_person_logs_in(proxy: Proxy) -> None:
    origin = {"Origin": f"http://{proxy.address}"}
    assert proxy.ask("POST", "/login", b"token=ann-token", FORM | {"Origin": "http://evil.example"})[0] == 403
    status, headers, _ = proxy.ask("POST", "/login", b"token=ann-token", FORM | origin)
    assert (status, headers["location"]) == (303, "/")
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert proxy.ask("GET", "/routes/orders", None, cookie | {"Accept": "text/html"})[0] == 200


def test_the_gate_knows_the_address_of_the_client(proxy: Proxy, gate: Gate) -> None:
    """A client cannot choose another one."""
    connection = HTTPConnection(own_host(), PORT, timeout=TIMEOUT_SECONDS, source_address=("127.9.9.9", 0))
    spoofed = {"X-Forwarded-For": "127.6.6.6", "X-Forwarded-Proto": "https"}
    connection.request("POST", "/login", b"token=ann-token", FORM | spoofed)
    cookie = connection.getresponse().headers["set-cookie"]
    connection.close()
    line = next(json.loads(each) for each in gate.log.splitlines() if '"path": "/login"' in each)

    assert line["address"] == "127.9.9.9"
    assert "Secure" not in cookie


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

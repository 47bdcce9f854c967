"""Who may do what: the token file, host names, browser sessions, and addresses behind trusted proxies."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate, entry
from running import TIMEOUT_SECONDS, Daemon, eventually

from wald_gate.auth.clients import TrustedProxies

ORDERS = "/v1/routes/orders/records"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        entry("in", write=["ord*"]) + entry("out", read=["orders"], work=["orders"]) + entry("all", admin=True)
    )
    return path


@pytest.fixture
def guarded(daemon: Daemon, tokens: Path) -> Iterator[Gate]:
    """A gate with tokens, on a log with the routes orders, which has a record, and other."""
    daemon.ask("ROUTE ADD other")
    daemon.ask("PUB orders 2\nx\n")
    with Gate(daemon.root, "--tokens", tokens) as running:
        yield running


def status(gate: Gate, token: str | None, method: str, path: str) -> int:
    headers = {"Content-Type": "text/plain"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return gate.ask(method, path, b"y\n" if method == "POST" else None, headers).status


def test_sighup_reads_the_tokens_again_and_a_wrong_file_changes_nothing(guarded: Gate, tokens: Path) -> None:
    tokens.write_text(entry("new", read=["*"]))
    guarded.process.send_signal(signal.SIGHUP)
    eventually(lambda: status(guarded, "new-token", "GET", ORDERS) == 200)
    eventually(lambda: "wald-gate: SIGHUP: certificates, tokens, limits and hosts are read again" in guarded.log)
    assert status(guarded, "out-token", "GET", ORDERS) == 401

    tokens.write_text("{}\n")
    guarded.process.send_signal(signal.SIGHUP)
    eventually(lambda: "not a token of wald-gate" in guarded.log)
    assert status(guarded, "new-token", "GET", ORDERS) == 200
    [line] = [line for line in guarded.log.splitlines() if "not a token of wald-gate" in line]
    assert line.startswith("wald-gate: SIGHUP: ")
    assert line.endswith("; the previous ones remain effective")


def test_a_refusal_says_which_right_is_missing(guarded: Gate) -> None:
    for method, path, needed in [
        ("GET", ORDERS, "needs the right to read the route orders"),
        ("POST", "/v1/cut", "needs the right to administer the log"),
        ("POST", "/v1/routes/new", "needs the right to administer the log"),
    ]:
        headers = {"Authorization": "Bearer in-token"}

        refused = guarded.ask(method, path, headers=headers)

        assert (refused.status, refused.json()["detail"].endswith(needed)) == (403, True), refused.body


def test_a_stream_ends_when_the_file_of_tokens_says_something_else(guarded: Gate, tokens: Path) -> None:
    """Records appended after a token is removed do not reach its client."""
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?follow=1&format=raw", headers=headers) as lines:
        assert lines.readline() == b"x\n"
        tokens.write_text(entry("in", write=["ord*"]))
        guarded.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(guarded, "out-token", "GET", ORDERS) == 401)
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        assert lines.read() == b""


def store_much(gate: Gate) -> bytes:
    """Store more than the connection and the gate buffer for a client that does not read."""
    large = b"%0999d\n" * 20_000 % tuple(range(20_000))
    storing = {"Authorization": "Bearer all-token", "Content-Type": "text/plain"}
    assert gate.ask("POST", ORDERS, large, storing).status == 200
    return large


def add_token(gate: Gate, tokens: Path) -> None:
    tokens.write_text(tokens.read_text() + entry("new", read=["*"]))
    gate.process.send_signal(signal.SIGHUP)
    eventually(lambda: status(gate, "new-token", "GET", f"{ORDERS}?limit=1") == 200)


def test_a_read_that_has_an_end_is_whole_although_the_tokens_change(guarded: Gate, tokens: Path) -> None:
    """A client could not tell a shortened response from a complete one."""
    large = store_much(guarded)
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?from=2&format=raw", headers=headers) as lines:
        first = lines.readline()
        add_token(guarded, tokens)
        assert first + lines.read() == large


def test_events_that_end_before_all_have_come_say_no_later_id_than_that_of_the_last(
    guarded: Gate, tokens: Path
) -> None:
    """A browser resumes after the last id."""
    store_much(guarded)
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?from=2&format=events", headers=headers) as lines:
        first = lines.readline()
        add_token(guarded, tokens)
        rest = first + lines.read()
    ids = [int(each) for each in re.findall(rb"^id: (\d+)$", rest, re.MULTILINE)]
    shown = [int(each) for each in re.findall(rb'"sequence": ?(\d+)', rest)]
    assert shown == [*range(2, shown[-1] + 1)]
    assert shown[-1] < 20_001
    assert ids[-1] == shown[-1]


def ask_as(gate: Gate, token: str, method: str, path: str, fields: object = None) -> Answer:
    body = None if fields is None else json.dumps(fields).encode()
    return gate.ask(method, path, body, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})


def metric(gate: Gate, name: str) -> int:
    lines = ask_as(gate, "all-token", "GET", "/metrics").body.decode().splitlines()
    [found] = [line for line in lines if line.startswith(name)]
    return int(float(found.split()[-1]))


def test_a_lease_that_waits_ends_when_its_client_may_not_lease_any_more(guarded: Gate, tokens: Path) -> None:
    """It gets the response of a new request and leases no record; other clients' leases continue."""
    leasing = "/v1/routes/orders/groups/billing/lease"
    ask_as(guarded, "all-token", "PUT", "/v1/routes/orders/cursors/billing", {"sequence": 0})
    [first] = ask_as(guarded, "all-token", "POST", leasing, {"worker": "all"}).json()["records"]
    assert first["value"] == "x"
    with ThreadPoolExecutor() as pool:
        ended, goes_on = (
            pool.submit(ask_as, guarded, f"{name}-token", "POST", leasing, {"worker": name, "wait": 300})
            for name in ("out", "all")
        )
        eventually(lambda: metric(guarded, "wald_gate_waiting_leases") == 2)
        tokens.write_text(entry("in", write=["ord*"]) + entry("all", admin=True))
        guarded.process.send_signal(signal.SIGHUP)
        refused = ended.result(TIMEOUT_SECONDS)
        assert (refused.status, refused.headers["www-authenticate"], refused.json()["code"]) == (
            401,
            'Bearer realm="wald"',
            "unauthorized",
        )
        assert metric(guarded, "wald_gate_waiting_leases") == 1
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        [record] = goes_on.result(TIMEOUT_SECONDS).json()["records"]
        assert (record["sequence"], record["tries"]) == (2, 1)


def test_a_read_that_has_waited_gives_nothing_to_a_client_that_may_not_read_any_more(
    guarded: Gate, tokens: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(ask_as, guarded, "out-token", "GET", f"{ORDERS}?from=end&wait=60s")
        eventually(lambda: metric(guarded, 'wald_gate_connections{state="busy"}') == 2)
        tokens.write_text(entry("in", write=["ord*"]))
        guarded.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(guarded, "out-token", "GET", ORDERS) == 401)
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        assert reading.result(TIMEOUT_SECONDS).status == 401


def test_a_page_of_another_site_changes_nothing(shared: Gate) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}

    assert shared.ask("POST", ORDERS, b"x\n", headers).status == 403
    assert shared.ask("POST", ORDERS, b"x\n", headers | {"Origin": f"http://127.0.0.1:{shared.port}"}).status == 200


def test_without_tokens_only_its_own_names_are_served(shared: Gate) -> None:
    for host, status in [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:7700", 200),
        ("192.0.2.7", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:7700", 421),
        ("", 421),
    ]:
        answer = shared.ask("GET", ORDERS, headers={"Host": host})

        assert answer.status == status, answer.body
        assert shared.ask("GET", "/healthz", headers={"Host": host}).status == 200


def test_a_name_that_is_configured_is_served(daemon: Daemon) -> None:
    with Gate(daemon.root, "--host", "log.example") as gate:
        assert gate.ask("GET", ORDERS, headers={"Host": "log.example:7700"}).status == 200
        assert gate.ask("GET", ORDERS, headers={"Host": "evil.example"}).status == 421


def test_with_tokens_any_name_is_served_unless_some_are_configured(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "tokens").touch()
    for options, status in (((), 401), (("--host", "log.example"), 421)):
        with Gate(daemon.root, "--tokens", tmp_path / "tokens", *options) as gate:
            assert gate.ask("GET", ORDERS, headers={"Host": "any.example"}).status == status


def test_each_answer_forbids_guessing_and_other_sites(shared: Gate) -> None:
    for path in [ORDERS, "/v1/nothing", "/v1/head", "/healthz", "/openapi.json"]:
        answer = shared.ask("GET", path, headers={"Origin": "https://elsewhere.example"})

        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def logging_in(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("ann", admin=True) + entry("bob", read=["orders"]))
    with Gate(daemon.root, "--tokens", tokens) as gate:
        yield gate


def begin(gate: Gate, name: str) -> str:
    """Start a session; return its cookie."""
    answer = gate.ask("POST", "/login", f"token={name}-token".encode(), FORM)
    return answer.headers["set-cookie"].partition(";")[0]


def test_a_client_that_begins_many_sessions_ends_the_oldest_of_its_own(logging_in: Gate) -> None:
    ann = begin(logging_in, "ann")
    bob, *others = [begin(logging_in, "bob") for _ in range(51)]

    assert logging_in.get("/v1/head", cookie=bob).status == 401  # of one client, the oldest sessions end
    assert [logging_in.get("/v1/routes", cookie=each).status for each in (ann, others[0], others[-1])] == [200] * 3


def test_behind_a_proxy_that_speaks_tls_the_cookie_is_never_sent_without(logging_in: Gate) -> None:
    for scheme, is_secure in [("https", True), ("http", False)]:
        headers = FORM | {"Host": "log.example", "Origin": f"{scheme}://log.example"}
        answer = logging_in.ask("POST", "/login", b"token=ann-token", headers)
        cookie, *attributes = answer.headers["set-cookie"].split("; ")

        assert ("Secure" in attributes) is is_secure
        assert logging_in.get("/v1/routes", cookie=cookie).status == 200


def test_the_client_is_the_last_address_that_is_not_of_a_trusted_proxy() -> None:
    for peer, forwarded, client in [
        ("10.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["6.6.6.6, 1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["6.6.6.6, 1.2.3.4, 10.9.9.9"], "1.2.3.4"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", ["[2001:db8::1]"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["::ffff:1.2.3.4"], "1.2.3.4"),
        ("10.0.0.1", ["1.2.3.4, unknown"], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("9.9.9.9", ["1.2.3.4"], "9.9.9.9"),
        ("::1", ["1.2.3.4"], "::1"),
    ]:
        headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
        scope: dict[str, Any] = {"client": (peer, 1), "scheme": "http", "headers": headers}
        TrustedProxies(["10.0.0.0/8", "2001:db8:1::/48"]).apply(scope)

        assert (scope["client"][0], scope["scheme"]) == (client, "http")


def test_a_unix_socket_has_no_trusted_proxy() -> None:
    cases: list[tuple[str, int] | None] = [None, ("", 0)]
    for client in cases:
        headers = [(b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-proto", b"https")]
        scope: dict[str, Any] = {"client": client, "scheme": "http", "headers": headers}
        TrustedProxies(["0.0.0.0/0", "::/0"]).apply(scope)

        assert (scope["client"], scope["scheme"]) == (client, "http")


def log_in(gate: Gate, token: str, **forwarded: str) -> Answer:
    headers = {f"X-Forwarded-{name}": value for name, value in forwarded.items()}
    return gate.ask("POST", "/login", f"token={token}".encode(), FORM | headers)


@pytest.mark.parametrize("trusted", ["127.0.0.1", "10.0.0.0/8"])
def test_only_a_trusted_proxy_says_who_asks_and_whether_they_use_tls(
    daemon: Daemon, tmp_path: Path, trusted: str
) -> None:
    is_trusted = trusted == "127.0.0.1"
    (tmp_path / "tokens").write_text(entry("ann", admin=True))
    options = ("--trusted-proxy", trusted, "--tokens", tmp_path / "tokens", "--log-requests")
    with Gate(daemon.root, *options) as gate:
        name, *attributes = log_in(gate, "ann-token", For="1.2.3.4", Proto="https").headers["set-cookie"].split("; ")
        line = next(json.loads(each) for each in gate.log.splitlines() if '"path": "/login"' in each)

        assert ("Secure" in attributes, name.startswith("__Host-")) == (is_trusted, is_trusted)
        assert line["address"] == ("1.2.3.4" if is_trusted else "127.0.0.1")
        cookie = {"Cookie": name}
        for proto, expected in (("https", 200), ("http", 401 if is_trusted else 200)):
            assert gate.ask("GET", "/v1/head", headers=cookie | {"X-Forwarded-Proto": proto}).status == expected

"""Who may do what: the token file, host names, browser sessions, and addresses behind trusted proxies."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gating import ORDERS, Answer, Gate, entry
from running import TIMEOUT_SECONDS, Daemon, eventually

from wald_gate.auth.clients import TrustedProxies

IN, OUT, ALL = entry("in", write=["ord*"]), entry("out", read=["orders"], work=["orders"]), entry("all", admin=True)


@pytest.fixture
def guarded(daemon: Daemon) -> Iterator[Gate]:
    """A gate with tokens, on a log with the routes orders, which has a record, and other."""
    daemon.ask("ROUTE ADD other")
    daemon.ask("PUB orders 2\nx\n")
    with Gate(daemon.root, tokens=IN + OUT + ALL) as running:
        yield running


def test_sighup_reads_the_tokens_again_and_a_wrong_file_changes_nothing(guarded: Gate) -> None:
    read_again = "wald-gate: SIGHUP: certificates, tokens, limits and hosts were reloaded"
    assert read_again in guarded.reload(tokens=entry("new", read=["*"]))
    assert [guarded.get(ORDERS, name).status for name in ("new", "out")] == [200, 401]

    said = guarded.reload(tokens="{}\n")
    assert guarded.get(ORDERS, "new").status == 200
    [line] = [line for line in said.splitlines() if "not a token of wald-gate" in line]
    assert line.startswith("wald-gate: SIGHUP: ")
    assert line.endswith("; the previous settings remain effective")


def test_a_refusal_says_which_right_is_missing(guarded: Gate) -> None:
    for method, path, needed in [
        ("GET", ORDERS, "needs the right to read the route orders"),
        ("POST", "/v1/cut", "needs the right to administer the log"),
        ("POST", "/v1/routes/new", "needs the right to administer the log"),
    ]:
        refused = guarded.ask(method, path, by="in")
        assert (refused.status, refused.json()["detail"].endswith(needed)) == (403, True), refused.body


def test_a_stream_ends_when_the_file_of_tokens_says_something_else(guarded: Gate) -> None:
    """Records appended after a token is removed do not reach its client."""
    with guarded.asked("GET", f"{ORDERS}?follow=1&format=raw", by="out") as lines:
        assert lines.readline() == b"x\n"
        guarded.reload(tokens=IN)
        assert guarded.get(ORDERS, "out").status == 401
        assert guarded.post(ORDERS, b"y\n", by="in").status == 200
        assert lines.read() == b""


def test_a_read_that_has_an_end_is_whole_although_the_tokens_change(guarded: Gate) -> None:
    """A client could not tell a shortened response from a complete one."""
    large = b"%0999d\n" * 20_000 % tuple(range(20_000))  # more than the connection and the gate buffer
    assert guarded.post(ORDERS, large, by="all").status == 200
    with guarded.asked("GET", f"{ORDERS}?from=2&format=raw", by="out") as lines:
        first = lines.readline()
        guarded.reload(tokens=IN + OUT + ALL + entry("new", read=["*"]))
        assert first + lines.read() == large
    # Events have no end. A browser resumes after the last id, which is that of the last event that came.
    with guarded.asked("GET", f"{ORDERS}?from=2&format=events", by="out") as lines:
        first = lines.readline()
        guarded.reload(tokens=IN + OUT + ALL)
        rest = first + lines.read()
    ids = [int(each) for each in re.findall(rb"^id: (\d+)$", rest, re.MULTILINE)]
    shown = [int(each) for each in re.findall(rb'"sequence": ?(\d+)', rest)]
    assert shown == [*range(2, shown[-1] + 1)]
    assert shown[-1] < 20_001
    assert ids[-1] == shown[-1]


def test_who_waits_gets_nothing_once_the_right_to_it_is_gone(guarded: Gate) -> None:
    """Each gets the response of a new request and leases no record; other clients' leases continue."""
    guarded.put("/v1/routes/orders/cursors/billing", {"sequence": 0}, by="all")
    [first] = guarded.worked("lease", by="all")["records"]
    assert first["value"] == "x"
    with ThreadPoolExecutor() as pool:
        ended, goes_on = (pool.submit(guarded.work, "lease", name, by=name, wait=300) for name in ("out", "all"))
        reading = pool.submit(guarded.get, f"{ORDERS}?from=end&wait=60s", "out")
        eventually(lambda: guarded.metric("wald_gate_waiting_leases", "all") == 2)
        eventually(lambda: guarded.metric('wald_gate_connections{state="busy"}', "all") == 4)
        guarded.reload(tokens=IN + ALL)
        refused = ended.result(TIMEOUT_SECONDS)
        assert (refused.status, refused.json()["code"]) == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == 'Bearer realm="wald"'
        assert guarded.metric("wald_gate_waiting_leases", "all") == 1
        assert guarded.post(ORDERS, b"y\n", by="in").status == 200
        [record] = goes_on.result(TIMEOUT_SECONDS).json()["records"]
        assert (record["sequence"], record["tries"]) == (2, 1)
        assert reading.result(TIMEOUT_SECONDS).status == 401


def test_a_page_of_another_site_changes_nothing(shared: Gate) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}

    assert shared.ask("POST", ORDERS, b"x\n", headers).status == 403
    assert shared.ask("POST", ORDERS, b"x\n", headers | {"Origin": shared.origin}).status == 200


def test_without_tokens_only_its_own_and_configured_names_are_served(shared: Gate, daemon: Daemon) -> None:
    own = ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:7700", "192.0.2.7")
    others = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7700", "")
    for host in (*own, *others):
        assert shared.get(ORDERS, host=host).status == (200 if host in own else 421), host
        assert shared.get("/healthz", host=host).status == 200
    with Gate(daemon.root, "--host", "log.example") as gate:
        assert gate.get(ORDERS, host="log.example:7700").status == 200
        assert gate.get(ORDERS, host="evil.example").status == 421
    for options, status in (((), 401), (("--host", "log.example"), 421)):
        with Gate(daemon.root, *options, tokens="") as gate:
            assert gate.get(ORDERS, host="any.example").status == status


def test_each_answer_forbids_guessing_and_other_sites(shared: Gate) -> None:
    for path in [ORDERS, "/v1/nothing", "/v1/head", "/healthz", "/openapi.json"]:
        answer = shared.get(path, origin="https://elsewhere.example")

        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def log_in(gate: Gate, name: str, **headers: str) -> Answer:
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    return gate.ask("POST", "/login", f"token={name}-token".encode(), form | sent)


def test_a_client_that_begins_many_sessions_ends_the_oldest_of_its_own(guarded: Gate) -> None:
    def begin(name: str) -> str:
        return log_in(guarded, name).headers["set-cookie"].partition(";")[0]

    ann = begin("all")
    bob, *others = [begin("out") for _ in range(51)]

    assert guarded.get("/v1/head", cookie=bob).status == 401  # of one client, the oldest sessions end
    assert [guarded.get("/v1/routes", cookie=each).status for each in (ann, others[0], others[-1])] == [200] * 3


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
    for unix in (None, ("", 0)):  # a unix socket has no trusted proxy
        headers = [(b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-proto", b"https")]
        scope = {"client": unix, "scheme": "http", "headers": headers}
        TrustedProxies(["0.0.0.0/0", "::/0"]).apply(scope)

        assert (scope["client"], scope["scheme"]) == (unix, "http")


@pytest.mark.parametrize("trusted", ["127.0.0.1", "10.0.0.0/8"])
def test_only_a_trusted_proxy_says_who_asks_and_whether_they_use_tls(daemon: Daemon, trusted: str) -> None:
    is_trusted = trusted == "127.0.0.1"
    with Gate(daemon.root, "--trusted-proxy", trusted, "--log-requests", tokens=ALL) as gate:
        answer = log_in(gate, "all", X_Forwarded_For="1.2.3.4", X_Forwarded_Proto="https")
        name, *attributes = answer.headers["set-cookie"].split("; ")
        line = next(json.loads(each) for each in gate.log.splitlines() if '"path": "/login"' in each)

        assert ("Secure" in attributes, name.startswith("__Host-")) == (is_trusted, is_trusted)
        assert line["address"] == ("1.2.3.4" if is_trusted else "127.0.0.1")
        for proto, expected in (("https", 200), ("http", 401 if is_trusted else 200)):
            assert gate.get("/v1/head", cookie=name, x_forwarded_proto=proto).status == expected
        # A proxy that speaks TLS shows in the Origin, too.
        for scheme in ("https", "http"):
            answer = log_in(gate, "all", Host="log.example", Origin=f"{scheme}://log.example")
            cookie, *attributes = answer.headers["set-cookie"].split("; ")
            assert ("Secure" in attributes) is (scheme == "https")
            assert gate.get("/v1/routes", cookie=cookie).status == 200

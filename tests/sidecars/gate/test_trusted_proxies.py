"""X-Forwarded-For and X-Forwarded-Proto are trusted only from the proxies in the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate, entry
from running import Daemon

from wald_gate.auth.origins import TrustedProxies

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


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


@pytest.mark.parametrize("client", [None, ("", 0)])
def test_a_unix_socket_has_no_trusted_proxy(client: tuple[str, int] | None) -> None:
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

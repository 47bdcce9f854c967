"""Browser sessions: a client that starts too many loses its own oldest ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate, entry
from running import Daemon

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def guarded(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("ann", admin=True) + entry("bob", read=["orders"]))
    with Gate(daemon.root, "--tokens", tokens) as gate:
        yield gate


def begin(gate: Gate, name: str) -> str:
    """Start a session; return its cookie."""
    answer = gate.ask("POST", "/login", f"token={name}-token".encode(), FORM)
    return answer.headers["set-cookie"].partition(";")[0]


def test_a_client_that_begins_many_sessions_ends_the_oldest_of_its_own(guarded: Gate) -> None:
    ann = begin(guarded, "ann")
    bob, *others = [begin(guarded, "bob") for _ in range(51)]

    assert guarded.get("/v1/head", cookie=bob).status == 401
    assert [guarded.get("/v1/routes", cookie=each).status for each in (ann, others[0], others[-1])] == [200] * 3


@pytest.mark.parametrize(("scheme", "is_secure"), [("https", True), ("http", False)])
def test_behind_a_proxy_that_speaks_tls_the_cookie_is_never_sent_without(
    guarded: Gate, scheme: str, is_secure: bool
) -> None:
    headers = FORM | {"Host": "log.example", "Origin": f"{scheme}://log.example"}
    answer = guarded.ask("POST", "/login", b"token=ann-token", headers)
    cookie, *attributes = answer.headers["set-cookie"].split("; ")

    assert ("Secure" in attributes) is is_secure
    assert guarded.get("/v1/routes", cookie=cookie).status == 200

"""Pages load only resources of the gate, receive live updates as events, and report errors."""

from __future__ import annotations

import json
import re
from http.client import HTTPResponse
from urllib.parse import urljoin

from gating import Gate

from wald_gate.page.frame import PLACES

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}
BOUNDS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
EVENTS = {"Accept": "text/event-stream"}


def events(response: HTTPResponse, count: int) -> list[tuple[str, str]]:
    """Read the next events of a stream; return their names and data."""
    found: list[tuple[str, str]] = []
    name = ""
    while len(found) < count:
        field, _, value = response.readline().decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            found.append((name, value))
    return found


def test_a_page_is_bound_by_its_headers(gate: Gate) -> None:
    for path in [*(place.path for place in PLACES), "/login", "/live", "/assets/nothing"]:
        answer = gate.get(path)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))

        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert policy == POLICY
        assert {name: answer.headers[name] for name in BOUNDS} == BOUNDS


def test_a_page_holds_no_script_and_no_style_and_refers_to_nothing_elsewhere(gate: Gate) -> None:
    """All addresses are relative, because a proxy may strip a path prefix."""
    for path in [*(place.path for place in PLACES), "/login", "/routes/orders", "/no/such/page"]:
        html = gate.get(path, accept="text/html").body.decode()
        referred = re.findall(r"""(?:src|href|action|data-live)=["']([^"']*)""", html)

        assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", html)
        assert [each for each in referred if not re.match(r"\.\.?/|[#?]", each)] == []
        assert {gate.get(urljoin(path, each)).status for each in referred if "/assets/" in each} == {200}


def test_head_has_the_headers_alone(gate: Gate) -> None:
    answer = gate.ask("HEAD", "/")

    assert (answer.status, answer.body) == (200, b"")
    assert gate.ask("HEAD", "/", headers=EVENTS).status == 200


def test_events_bring_the_parts_first_and_then_only_what_has_changed(gate: Gate) -> None:
    with gate.asked("GET", "/", headers=EVENTS) as response:
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        (hello, build), (_, first) = events(response, 2)
        html = gate.get("/").body.decode()
        ids = {name for name, _ in json.loads(first)}
        gate.post("/v1/routes/orders/records", b"one\ntwo\n")
        changed = [json.loads(data) for _, data in events(response, 3)]

    assert hello == "hello"
    assert f'data-build="{build}"' in html
    assert ids <= set(re.findall(r'id="(\w+)"', html))
    assert "live_state" in ids
    assert "live_state" not in {name for parts in changed for name, _ in parts}  # the daemon's state has not changed
    assert any(parts for parts in changed)


def test_a_gate_ends_although_somebody_looks(gate: Gate) -> None:
    with gate.asked("GET", "/", headers=EVENTS) as response:
        events(response, 2)
        assert gate.stop() == 0
        assert response.read().endswith(b"\n")  # the stream ended properly


def test_what_goes_wrong_is_a_page_for_people(gate: Gate) -> None:
    answer = gate.ask("POST", "/login", b"token=x", {"Content-Type": "text/plain"})

    assert answer.status == 415
    assert b"<h1>Unsupported Media Type</h1>" in answer.body


def test_a_login_has_a_bound(gate: Gate) -> None:
    """Logins need no authentication, and parsing one blocks all other requests."""
    for form, status in [(b"a=1&" * 1000, 400), (b"token=" + b"x" * 5000, 413)]:
        answer = gate.ask("POST", "/login", form, {"Content-Type": "application/x-www-form-urlencoded"})

        assert answer.status == status

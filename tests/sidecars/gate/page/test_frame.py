"""Pages load only resources of the gate, receive live updates as events, and report errors."""

import json
import os
import re
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urljoin

import pytest
from browsing import Chromium
from gating import ORDERS, Gate
from running import Daemon, eventually
from tracing import traced

from wald_gate.page.frame import PLACES, Sent, changes

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


def test_a_page_is_bound_by_its_headers_and_refers_to_nothing_elsewhere(gate: Gate) -> None:
    """It has no script and no style; all addresses are relative, because a proxy may strip a path prefix."""
    paths = [*(place.path for place in PLACES), "/login", "/routes/orders", "/no/such/page", "/live", "/assets/nothing"]
    for path in paths:
        answer = gate.get(path, accept="text/html")
        source = answer.body.decode()
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        referred = re.findall(r"""(?:src|href|action|data-live)=["']([^"']*)""", source)

        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert policy == POLICY
        assert {name: answer.headers[name] for name in BOUNDS} == BOUNDS
        assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", source)
        assert [each for each in referred if not re.match(r"\.\.?/|[#?]", each)] == []
        assert {gate.get(urljoin(path, each)).status for each in referred if "/assets/" in each} <= {200}
    answer = gate.ask("HEAD", "/")
    assert (answer.status, answer.body) == (200, b"")
    assert gate.ask("HEAD", "/", headers=EVENTS).status == 200


def test_events_bring_the_parts_first_and_then_only_what_has_changed(gate: Gate) -> None:
    with gate.asked("GET", "/", headers=EVENTS) as response:
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        (hello, build), (_, first) = events(response, 2)
        html = gate.get("/").body.decode()
        ids = {name for name, _ in json.loads(first)}
        gate.post(ORDERS, b"one\ntwo\n")
        changed = [json.loads(data) for _, data in events(response, 3)]
        assert gate.stop() == 0  # although somebody looks
        assert response.read().endswith(b"\n")  # the stream ended properly

    assert hello == "hello"
    assert f'data-build="{build}"' in html
    assert ids <= set(re.findall(r'id="(\w+)"', html))
    assert "live_state" in ids
    assert "live_state" not in {name for parts in changed for name, _ in parts}  # the daemon's state has not changed
    assert any(parts for parts in changed)


def test_a_login_that_goes_wrong_is_a_page_for_people_and_has_a_bound(gate: Gate) -> None:
    """Logins need no authentication, and parsing one blocks all other requests."""
    answer = gate.post("/login", b"token=x")
    assert answer.status == 415
    assert b"<h1>Unsupported Media Type</h1>" in answer.body
    for form, status in [(b"a=1&" * 1000, 400), (b"token=" + b"x" * 5000, 413)]:
        answer = gate.ask("POST", "/login", form, {"Content-Type": "application/x-www-form-urlencoded"})

        assert answer.status == status


def table(**rows: int) -> str:
    return "<table>" + "".join(f'<tr id="{name}"><td>{value}</td></tr>' for name, value in rows.items()) + "</table>"


def test_a_part_is_sent_whole_first_and_then_row_by_row() -> None:
    sent: Sent = {}
    for part, found in (
        (table(a=1, b=2), [("live_x", table(a=1, b=2))]),
        (table(a=1, b=2), []),
        (table(a=1, b=3), [("b", '<tr id="b"><td>3</td></tr>')]),
        (table(a=1, b=3), []),
        # It is sent whole when rows come, go or change places.
        *((part, [("live_x", part)]) for part in (table(a=1), table(b=2, a=1), table(a=1, b=2), "<p>", "<q>")),
        # Parts of a picture are rows, too.
        ('<svg><g id="s-1" class="x"><rect/></g></svg>', None),
        ('<svg><g id="s-1" class="y"><rect/></g></svg>', [("s-1", '<g id="s-1" class="y"><rect/></g>')]),
    ):
        assert changes("live_x", part, sent) == found or found is None
    for number in range(3):
        changes("live_x", table(**{f"r{number}": number}), sent)
    _, rows = sent["live_x"]
    assert list(rows) == ["r2"]  # or a page that follows records for days would keep every row ever sent


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("flock:error=ENOLCK", "it is unknown whether a daemon runs: No locks available"),
        ("statfs:error=EIO", "/log/segments: Input/output error"),
    ],
)
def test_a_look_that_is_refused_is_said_until_one_succeeds(gate: Gate, tmp_path: Path, call: str, said: str) -> None:
    gate.post(ORDERS, b"one\n")
    assert said not in gate.get("/").text
    with traced(gate.process.pid, tmp_path / "trace", f"inject={call}", threads=True):
        eventually(lambda: said in gate.get("/").text)
        for path in ("/routes", "/routes/orders"):
            assert gate.get(path).text
    eventually(lambda: said not in gate.get("/").text)
    assert "Traceback" not in gate.log


BUG = """
import os
from wald_gate.page import views
sound = views._spark

def broken(rates):
    if os.path.exists(os.environ["BROKEN"]):
        raise ZeroDivisionError("a bug of the test")
    return sound(rates)

views._spark = broken
"""


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    """A file that makes every overview fail while it exists."""
    return tmp_path / "broken"


@pytest.fixture
def faulty(daemon: Daemon, tmp_path: Path, flag: Path) -> Iterator[Gate]:
    """A gate whose overview has a bug."""
    place = tmp_path / "bug"
    place.mkdir()
    (place / "sitecustomize.py").write_text(BUG)
    path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    with Gate(daemon.root, env={"PYTHONPATH": path, "BROKEN": str(flag)}) as running:
        yield running


def test_a_page_with_a_bug_says_that_it_is_old_and_goes_on_by_itself(
    chromium: Chromium, faulty: Gate, flag: Path
) -> None:
    with chromium.visit(faulty.origin) as visit:
        visit.page.goto("/")
        notice = visit.page.locator("#connection")
        visit.page.evaluate("window.same = true")
        eventually(lambda: "running" in visit.page.locator("#live_state").inner_text())
        flag.touch()
        eventually(lambda: "The gate has failed at this page (ZeroDivisionError)" in notice.inner_text())
        assert "What you see is from" in notice.inner_text()

        flag.unlink()
        assert faulty.post(ORDERS, b"one\ntwo\n").status == 200
        eventually(lambda: visit.page.locator("#live_extent").inner_text().endswith("records 1 to 2"))
        assert not notice.is_visible()
        assert visit.page.evaluate("window.same")
    assert faulty.log.count("ZeroDivisionError: a bug of the test") == 1


def test_a_stream_with_a_bug_stays_open_and_is_tried_more_and_more_rarely(faulty: Gate, flag: Path) -> None:
    flag.touch()
    with faulty.asked("GET", "/", headers={"Accept": "text/event-stream"}) as response:
        found = b"".join(response.readline() for _ in range(2 + 1 + 2 * 3))
        assert found.count(b"event: failed") == 2
        flag.unlink()
        while b"event: parts" not in (line := response.readline()):
            assert line, "the stream has ended"
    assert faulty.log.count("ZeroDivisionError: a bug of the test") == 1
    assert "no page: /" in faulty.log

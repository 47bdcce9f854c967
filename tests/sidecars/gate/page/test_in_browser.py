"""Every view in a browser: live updates, no JavaScript, keyboard, accessibility, small screens and dark mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import DESK, PHONE, Chromium, Visit
from gating import ORDERS, Gate, entry
from lived_in import live_in
from proxying import PREFIX, Proxy, documented
from running import Daemon, eventually, reclaim, wald

from wald_gate.page.frame import PLACES

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

VIEWS = ("/", "/routes/orders", "/records?route=orders&follow=1", "/records/2500")
MORE = (
    *(place.path for place in PLACES[1:]),
    "/records?route=orders&from=earliest",
    "/records/1",
    "/records/2500?as=hex",
    "/records/99999999",
    "/history?what=deletions",
    "/login",
)
_EVERY = pytest.mark.parametrize("views", [VIEWS, MORE], ids=["one", "more"])
_GONE = "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a realistic log with a running daemon."""
    place = tmp_path_factory.mktemp("views")
    with Daemon(place / "log") as daemon:
        live_in(daemon, place / "vault")
        with Gate(daemon.root) as running:
            yield running


def goto(visit: Visit, path: str) -> None:
    answer = visit.page.goto(path)
    assert answer
    assert answer.status == 200, path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@_EVERY
def test_every_view_is_for_everyone(
    chromium: Chromium, gate: Gate, size: ViewportSize, dark: bool, views: tuple[str, ...]
) -> None:
    """axe-core checks names, roles, contrast, heading order and its other rules."""
    from axe_playwright_python.base import AXE_SCRIPT

    with chromium.visit(gate.origin, size=size, dark=dark) as visit:
        for path in views:
            goto(visit, path)
            visit.page.evaluate(AXE_SCRIPT)
            found = visit.page.evaluate("axe.run().then((found) => found.violations)")
            assert not found, f"{path}: {json.dumps(found, indent=1)[:3000]}"
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= size["width"], path


def test_no_mark_of_a_cursor_hides_another_one_on_a_phone(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin, size=PHONE) as visit:
        goto(visit, "/")
        visit.page.locator(".at path").nth(1).wait_for()  # shown once the segments are counted
        signs, legend = visit.page.evaluate(
            """[
                [...document.querySelectorAll(".at path")].map((sign) => {
                    const box = sign.getBoundingClientRect()
                    return [box.x + box.width / 2, box.y + box.height / 2, box.width, box.bottom]
                }),
                document.querySelector(".strip .legend").getBoundingClientRect().top,
            ]"""
        )
        for (x, y, width, _), (other_x, other_y, *_) in combinations(signs, 2):
            assert hypot(x - other_x, y - other_y) >= width - 1
        assert max(bottom for *_, bottom in signs) <= legend


def test_without_javascript_every_view_is_there_and_links_lead_through_the_records(
    chromium: Chromium, gate: Gate
) -> None:
    with chromium.visit(gate.origin, javascript=False) as visit:
        visit.page.set_viewport_size(PHONE)
        for path in (*VIEWS, *MORE):
            goto(visit, path)
            assert visit.page.locator("main").inner_text().strip(), path
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        visit.page.set_viewport_size(DESK)
        goto(visit, "/records?route=orders")
        visit.page.get_by_role("link", name="Older").click()
        visit.page.locator("table.records tbody a").first.click()
        assert visit.page.locator("h1").inner_text().startswith("Record ")
        visit.page.get_by_role("link", name="Hex").click()
        assert visit.page.locator("pre.value").inner_text().startswith("000000  ")
        visit.page.get_by_label("Views").get_by_role("link", name="History").click()
        visit.page.locator("summary").first.click()
        assert "its last record there" in visit.page.locator("details[open]").inner_text()


def test_a_position_is_typed_and_a_route_chosen_by_keyboard_alone(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin) as visit:
        goto(visit, "/records")
        keys = visit.page.keyboard
        keys.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        keys.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "main"
        keys.press("Tab")
        keys.type("orders")
        keys.press("Tab")
        keys.type("earliest")
        keys.press("Enter")
        visit.page.wait_for_url("**route=orders&from=earliest*")
        assert visit.page.locator("h1").inner_text() == "Records of orders"


@pytest.mark.parametrize("path", ["/", *VIEWS[1:], *MORE])
def test_what_has_the_focus_is_in_the_order_of_the_page_and_can_be_seen(
    chromium: Chromium, gate: Gate, path: str
) -> None:
    with chromium.visit(gate.origin) as visit:
        goto(visit, path)
        visit.page.evaluate("document.activeElement.blur()")
        seen: list[float] = []
        for _ in range(25):
            visit.page.keyboard.press("Tab")
            place, outlined = visit.page.evaluate(
                """() => {
                    const each = document.activeElement, style = getComputedStyle(each)
                    if (each === document.body) return [-1, true]
                    const all = [...document.querySelectorAll("*")]
                    return [all.indexOf(each), parseFloat(style.outlineWidth) >= 2 && style.outlineStyle !== "none"]
                }"""
            )
            if place < 0 or (seen and place < seen[-1]):
                break  # the focus has wrapped around
            assert outlined, place
            seen.append(place)
        assert seen


def test_records_that_come_are_shown_where_they_are_followed_and_pause_keeps_them(
    chromium: Chromium, gate: Gate
) -> None:
    with chromium.visit(gate.origin) as visit:
        goto(visit, "/records?route=audit&follow=1")
        first = visit.page.locator("table.records tbody tr").first
        for number in range(3):
            assert gate.post("/v1/routes/audit/records", b"look %d\n" % number).status == 200
            eventually(lambda number=number: f"look {number}" in first.inner_text())  # type: ignore[misc]
        visit.page.get_by_role("link", name="Pause").click()
        assert gate.post("/v1/routes/audit/records", b"too late\n").status == 200
        assert "too late" not in visit.page.locator("table.records").inner_text()
        visit.page.get_by_role("link", name="Follow").click()
        eventually(lambda: "too late" in visit.page.locator("table.records").inner_text())


def test_a_flood_of_records_leaves_the_page_as_small_as_it_was(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin) as visit:
        goto(visit, "/records?route=web.access&follow=1")
        rows = visit.page.locator("table.records tbody tr")
        nodes = visit.page.evaluate("document.querySelectorAll('*').length")
        for number in range(5):
            lines = b"".join(b"flood %d %d\n" % (number, line) for line in range(20_000))
            assert wald("append", "web.access", "--root", gate.root, stdin=lines).returncode == 0
            eventually(lambda number=number: f"flood {number} 19999" in rows.first.inner_text())  # type: ignore[misc]
            assert rows.count() == 50
        assert visit.page.evaluate("document.querySelectorAll('*').length") <= nodes + 10


def test_views_hold_while_records_come_and_segments_are_cut_and_deleted(chromium: Chromium, daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD orders")
    with Gate(daemon.root) as own, chromium.visit(own.origin) as visit:
        assert own.post(ORDERS, b"first\n").status == 200
        browsed = ("/records?route=orders&from=earliest", "/records?route=orders&follow=1")
        for view in (*(place.path for place in PLACES), *browsed):
            lines = b"".join(b"record %d\n" % line for line in range(2_000))
            last = own.post(ORDERS, lines).json()["last"]
            assert own.post("/v1/cut").json()["cut"]
            moved = wald("cursor", "set", "orders", last, "--group", "billing", "--root", daemon.root)
            assert moved.returncode == 0, moved.stderr
            reclaim(daemon.root, "--grace", 0)
            goto(visit, view)
            assert visit.page.locator("main").inner_text().strip(), view
        assert own.post(ORDERS, b"the last one\n").status == 200
        eventually(lambda: "the last one" in visit.page.locator("#live_records").inner_text())


def test_an_open_detail_stays_open_and_the_focus_where_it_is_while_events_come(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin) as visit:
        goto(visit, "/history?what=all")
        summary = visit.page.locator("summary").first
        summary.focus()
        summary.press("Enter")
        assert gate.post("/v1/routes/audit/records", b"one more\n").status == 200
        before = visit.page.locator("ol.events li").first.get_attribute("id")
        assert gate.post("/v1/cut").json()["cut"]
        eventually(lambda: visit.page.locator("ol.events li").first.get_attribute("id") != before)
        assert visit.page.evaluate("document.activeElement.localName") == "summary"
        assert visit.page.locator("details[open]").count() == 1


@pytest.mark.parametrize("path", ["/records?route=audit&follow=1", *(place.path for place in PLACES)])
def test_a_page_says_that_the_daemon_or_the_gate_is_gone_and_goes_on_by_itself(
    chromium: Chromium, daemon: Daemon, path: str
) -> None:
    daemon.ask("ROUTE ADD audit")
    with Gate(daemon.root) as own, chromium.visit(own.origin, allowed=_GONE) as visit:
        assert own.post("/v1/routes/audit/records", b"first\n").status == 200
        goto(visit, path)
        state, notice = visit.page.locator("#live_state"), visit.page.locator("#connection")
        eventually(lambda: "running" in state.inner_text() and "not" not in state.inner_text())

        daemon.kill()
        eventually(lambda: "not running" in state.inner_text())
        daemon.start_again()
        eventually(lambda: "not" not in state.inner_text())

        own.kill()
        eventually(notice.is_visible)
        assert "No connection since" in notice.inner_text()
        own.start()
        eventually(lambda: not notice.is_visible())
        assert own.post("/v1/routes/audit/records", b"last\n").status == 200
        if "follow" in path:
            eventually(lambda: "last" in visit.page.locator("table.records").inner_text())


_REFUSED = "status of 401"


@pytest.fixture
def guarded(daemon: Daemon) -> Iterator[Gate]:
    """A gate that requires tokens, on a log with one record."""
    daemon.ask("PUB orders 2\nx\n")
    with Gate(daemon.root, tokens=entry("ann", admin=True)) as gate:
        yield gate


def submit(visit: Visit, token: str) -> None:
    visit.page.get_by_label("Token").fill(token)
    visit.page.get_by_role("button", name="Log in").click()


def test_a_person_logs_in_looks_and_logs_out_without_javascript(chromium: Chromium, guarded: Gate) -> None:
    with chromium.visit(guarded.origin, javascript=False, allowed=_REFUSED) as visit:
        visit.page.goto("/routes/orders")
        visit.page.wait_for_url("**/login")
        submit(visit, "guess")
        visit.page.get_by_role("alert").wait_for()
        submit(visit, "ann-token")
        visit.page.get_by_role("button", name="Log out").wait_for()
        visit.page.get_by_role("link", name="Routes").click()
        visit.page.get_by_role("link", name="orders", exact=True).first.click()
        visit.page.wait_for_url("**/routes/orders")
        visit.page.get_by_role("button", name="Log out").click()
        visit.page.wait_for_url("**/login")
        visit.page.goto("/")
        visit.page.wait_for_url("**/login")


def test_a_person_logs_in_and_follows_records_below_a_path_of_a_proxy(
    chromium: Chromium, daemon: Daemon, guarded: Gate, tmp_path: Path
) -> None:
    with (
        Proxy("nginx", guarded, tmp_path, documented("nginx", below=True)) as proxy,
        chromium.visit(proxy.origin + PREFIX, allowed=_REFUSED) as visit,
    ):
        page = visit.page
        page.goto(f"{PREFIX}/records/1")
        page.wait_for_url(f"**{PREFIX}/login")
        submit(visit, "guess")
        page.get_by_role("alert").wait_for()
        submit(visit, "ann-token")
        page.wait_for_url(f"**{PREFIX}/")
        page.get_by_role("link", name="Routes").click()
        page.get_by_role("link", name="orders", exact=True).first.click()
        page.get_by_role("link", name="Follow them").click()
        page.get_by_text("following").wait_for()
        assert daemon.ask("PUB orders 6\nlater\n").startswith("OK")
        page.get_by_text("later").wait_for()
        page.get_by_role("link", name="1", exact=True).click()
        page.wait_for_url(f"**{PREFIX}/records/1")
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url(f"**{PREFIX}/login")


def test_the_form_of_a_page_without_an_origin_cannot_log_in(chromium: Chromium, guarded: Gate) -> None:
    """Chromium sends ``Origin: null`` for it, as it does for a sandboxed frame."""
    form = f"<form method=post action={guarded.origin}/login><input name=token value=ann-token><button>Send</button>"
    with chromium.visit(guarded.origin, allowed="status of 403") as visit:
        visit.page.goto(f"data:text/html,{form}")
        visit.page.get_by_role("button", name="Send").click()
        visit.page.get_by_role("heading", name="Forbidden").wait_for()

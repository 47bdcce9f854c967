"""Login and logout in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Chromium, Visit
from gating import Gate, entry
from proxying import PREFIX, Proxy, documented
from running import Daemon

_REFUSED = "status of 401"


@pytest.fixture
def guarded(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    """A gate that requires tokens, on a log with one record."""
    daemon.ask("PUB orders 2\nx\n")
    (tmp_path / "tokens").write_text(entry("ann", admin=True))
    with Gate(daemon.root, "--tokens", tmp_path / "tokens") as gate:
        yield gate


def submit(visit: Visit, token: str) -> None:
    visit.page.get_by_label("Token").fill(token)
    visit.page.get_by_role("button", name="Log in").click()


@pytest.mark.parametrize("javascript", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_a_person_logs_in_looks_and_logs_out(chromium: Chromium, guarded: Gate, javascript: bool) -> None:
    with chromium.visit(guarded.origin, javascript=javascript, allowed=_REFUSED) as visit:
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

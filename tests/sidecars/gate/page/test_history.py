"""The history view shows every ledger event, page by page, and the reason that each deletion was allowed."""

import html
import re
import time
from collections.abc import Iterator
from urllib.parse import urljoin

import pytest
from gating import ORDERS, Answer, Gate, serving
from logs import Unsynced
from running import eventually, reclaim, wald

from wald.files.layout import Root
from wald.files.uptime import ClockStep, add_step
from wald_gate.page.views import COUNT

CUTS = COUNT  # enough for several pages


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log with a hundred cuts, half of them read and deleted, whose daemon was killed."""
    with serving(tmp_path_factory.mktemp("history") / "log") as gate:
        for number in range(CUTS):
            assert gate.post(ORDERS, b"%d\n" % number).status == 200
            assert gate.post("/v1/cut").json()["cut"]
        sealed = gate.root / "ledger" / "segments.jsonl"
        eventually(lambda: sealed.read_text().count('"event":"sealed"') == CUTS)
        assert wald("cursor", "set", "orders", CUTS // 2, "--group", "billing", "--root", gate.root).returncode == 0
        reclaim(gate.root, "--grace", 0)
        gate.daemon.kill()
        add_step(Root(gate.root), Unsynced(), ClockStep(CUTS + 1, time.time_ns(), time.time_ns()))
        gate.daemon.start_again()
        yield gate


def events(answer: Answer) -> list[tuple[str, str]]:
    """Return the id and name of each event, in page order."""
    return re.findall(r'<li id="(e-[^"]*)".*?<span class="what">(.*?)</span>', answer.page, re.DOTALL)


def pages(gate: Gate, query: str = "") -> list[Answer]:
    """Follow the links to older events; return all pages."""
    found = [gate.get(f"/history?{query}")]
    while older := re.search(r'<a href="([^"]*)" rel="next">Older</a>', found[-1].page):
        found.append(gate.get(urljoin("/history", html.unescape(older[1]))))
    return found


def test_every_event_is_shown_once_the_newest_first(gate: Gate) -> None:
    found = pages(gate)
    shown = [event for page in found for event in events(page)]
    names = [name for _, name in shown]
    assert len(found) > 2
    assert len(set(shown)) == len(shown)
    counts = {name: names.count(name) for name in set(names)}
    assert counts == {"cut": CUTS, "sealed": CUTS, "reclaimed": CUTS // 2, "started": 2, "clock-step": 1}
    assert names[0] == "started"
    assert names[-1] == "started"
    cuts = [int(each.rpartition("-")[2]) for each, name in shown if name == "cut"]
    assert cuts == sorted(cuts, reverse=True)


def test_a_start_says_what_it_found_and_a_deletion_which_cursors_made_it_legal(gate: Gate) -> None:
    (first, *_) = pages(gate)
    page = first.page
    assert "epoch 2: wald" in page
    assert "was not stopped: it was killed" in page
    deletion = page[page.index(">reclaimed<") :]
    assert re.search(r"segment 50: records 50 to 50 \(orders 1\)", deletion)
    assert re.search(r"<dt>orders/billing</dt><dd>at 50, its last record there 50</dd>", deletion)


def test_a_kind_or_a_route_leaves_out_the_rest_and_what_is_no_place_is_an_error(gate: Gate) -> None:
    kinds: dict[str, set[str]] = {
        "what=deletions": {"reclaimed"},
        "what=cuts": {"cut", "sealed"},
        "what=lives": {"started", "clock-step"},
        "what=all&route=orders": {"sealed", "reclaimed"},
        "what=losses": set(),
        "route=nosuch": set(),
    }
    for query, names in kinds.items():
        assert {name for page in pages(gate, query) for _, name in events(page)} == names
    places = ("segments", "other:1", "segments:x", "a:1,")
    for query in ("what=gossip", "route=%2e%2e", *(f"before={place}" for place in places)):
        assert gate.get(f"/history?{query}").status == 400
